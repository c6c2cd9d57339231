"""A door without FastAPI: errors are told as every door tells them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from leyden.libs.service import JsonResponse, serving
from leyden.libs.service.plain import PlainRoute, create_plain_app


async def echo(request: Request) -> Response:
    return JsonResponse({"name": request.path_params["name"], "size": len(await request.body())})


async def broken(_request: Request) -> Response:
    raise ZeroDivisionError("secret detail")


async def refused(_request: Request) -> Response:
    raise KeyError("refused")


async def breaking(_request: Request) -> Response:
    async def chunks() -> AsyncIterator[bytes]:
        yield b"first"
        raise ZeroDivisionError

    return StreamingResponse(chunks())


async def on_key_error(_request: Request, error: KeyError) -> Response:
    return JsonResponse({"missing": str(error)}, 409)


@asynccontextmanager
async def nothing(_app: Starlette) -> AsyncIterator[None]:
    yield


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    routes = [
        PlainRoute("/echo/{name}", echo, methods=["POST"]),
        PlainRoute("/broken", broken, methods=["GET"]),
        PlainRoute("/refused", refused, methods=["GET"]),
        PlainRoute("/breaking", breaking, methods=["GET"]),
    ]
    handlers = {KeyError: on_key_error}
    app = create_plain_app("sample", routes, lifespan=nothing, max_body_bytes=100, error_handlers=handlers)
    async with serving(app) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as opened:
        yield opened


async def test_a_route_answers_and_its_errors_find_their_handlers(client: httpx.AsyncClient) -> None:
    answers = [
        await client.post("/echo/a", content=b"four"),
        await client.post("/echo/a", content=b"x" * 101),
        await client.get("/refused"),
        await client.get("/echo/a"),
        await client.get("/nowhere"),
    ]
    assert [answer.status_code for answer in answers] == [200, 413, 409, 405, 404]
    assert [answers[0].json(), answers[2].json()] == [{"name": "a", "size": 4}, {"missing": "'refused'"}]


async def test_what_no_handler_knows_tells_nothing_of_the_inside(client: httpx.AsyncClient) -> None:
    answer = await client.get("/broken", headers={"x-request-id": "abc-1"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "abc-1")
    assert "secret" not in answer.text


async def test_an_answer_that_breaks_is_cut_not_completed(client: httpx.AsyncClient) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        await client.get("/breaking")
