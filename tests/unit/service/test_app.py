"""The application every service begins with, over a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from leyden.libs.service import Checks, JsonResponse, Problem, create_internal_app, serving
from leyden.libs.service.app import create_app


async def starlette(_request: Request) -> Response:
    raise KeyError("refused")


async def on_key_error(_request: Request, error: KeyError) -> Response:
    return JsonResponse({"missing": str(error)}, 409)


def build(**options: object) -> FastAPI:
    app = create_app(
        "sample",
        routes=[Route("/starlette/{name}", starlette)],
        error_handlers={KeyError: on_key_error},
        max_body_bytes=100,
        body_limits={"/upload": 1000},
        **options,
    )

    @app.post("/echo/{name}")
    @app.post("/upload/{name}")
    async def echo(name: str, request: Request) -> Response:
        return JsonResponse({"name": name, "size": len(await request.body())})

    @app.get("/problem")
    async def problem() -> None:
        raise Problem(503, "the store is away", cause="store_away", retry_after_seconds=7, extensions={"more": 1})

    @app.get("/number")
    async def number(value: int) -> int:
        return value

    @app.get("/broken")
    async def broken() -> None:
        raise ZeroDivisionError("secret detail")

    @app.get("/stream")
    async def stream(gate: str = "") -> Response:
        async def chunks() -> AsyncIterator[bytes]:
            yield b"first"
            if gate == "break":
                raise ZeroDivisionError
            await asyncio.wait_for(app.state.gate.wait(), 20)
            yield b"second"

        return StreamingResponse(chunks())

    return app


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    app = build()
    app.state.gate = asyncio.Event()
    async with serving(app) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as opened:
        opened.app = app
        yield opened


async def test_problems_are_rfc_9457(client: httpx.AsyncClient) -> None:
    answer = await client.get("/problem")
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["retry-after"] == "7"
    assert answer.json() == {
        "type": "about:blank",
        "title": "Service Unavailable",
        "status": 503,
        "detail": "the store is away",
        "cause": "store_away",
        "more": 1,
    }


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/absent", 404), ("DELETE", "/number", 405), ("GET", "/number", 422), ("GET", "/number?value=x", 422)],
)
async def test_framework_errors_are_problems_too(
    client: httpx.AsyncClient, method: str, path: str, status: int
) -> None:
    answer = await client.request(method, path)
    assert (answer.status_code, answer.json()["status"]) == (status, status)
    assert answer.headers["content-type"] == "application/problem+json"


async def test_wrong_values_are_headed_in_plain_words(client: httpx.AsyncClient) -> None:
    assert (await client.get("/number")).json()["title"] == "Invalid request"


async def test_unexpected_errors_reveal_no_internals(client: httpx.AsyncClient) -> None:
    answer = await client.get("/broken", headers={"x-request-id": "abc-1"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "abc-1")
    assert "secret" not in answer.text


async def test_a_stream_that_breaks_is_cut_not_completed(client: httpx.AsyncClient) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        await client.get("/stream?gate=break")


async def test_streams_are_sent_chunk_by_chunk(client: httpx.AsyncClient) -> None:
    async with client.stream("GET", "/stream") as answer:
        chunks = answer.aiter_raw()
        assert await anext(chunks) == b"first"
        client.app.state.gate.set()
        assert await anext(chunks) == b"second"


async def test_bodies_are_bounded_declared_or_chunked(client: httpx.AsyncClient) -> None:
    async def pieces(count: int) -> AsyncIterator[bytes]:
        for _ in range(count):
            yield b"x" * 50

    assert (await client.post("/echo/a", content=b"x" * 100)).json() == {"name": "a", "size": 100}
    assert (await client.post("/echo/a", content=b"x" * 101)).status_code == 413
    assert (await client.post("/echo/a", content=pieces(2))).status_code == 200
    assert (await client.post("/echo/a", content=pieces(3))).json()["cause"] == "too_large"
    assert (await client.post("/upload/a", content=pieces(20))).status_code == 200
    assert (await client.post("/upload/a", content=pieces(21))).status_code == 413


async def test_request_ids_are_generated_or_adopted(client: httpx.AsyncClient) -> None:
    made = (await client.get("/number?value=1")).headers["x-request-id"]
    forged = (await client.get("/number?value=1", headers={"x-request-id": "a b\tc"})).headers["x-request-id"]
    assert len(made) == len(forged) == 16


@pytest.fixture
async def internal() -> AsyncIterator[httpx.AsyncClient]:
    checks = Checks()
    async with (
        serving(create_internal_app(checks)) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as opened,
    ):
        opened.checks = checks
        yield opened


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics", "/docs", "/openapi.json", "/"])
async def test_an_application_shows_nothing_of_the_inside(client: httpx.AsyncClient, path: str) -> None:
    assert (await client.get(path)).status_code == 404


async def test_ready_names_the_cause(internal: httpx.AsyncClient) -> None:
    assert (await internal.get("/healthz")).json() == {"status": "ok"}
    assert (await internal.get("/readyz")).status_code == 200
    internal.checks.starting = True
    assert (await internal.get("/readyz")).json()["checks"] == {"start": "not finished"}
    internal.checks.starting = False

    async def refuses() -> None:
        raise ConnectionError("connection refused\nmore")

    internal.checks.add("database", refuses)
    answer = await internal.get("/readyz")
    assert (answer.status_code, answer.json()) == (
        503,
        {"status": "unavailable", "checks": {"database": "ConnectionError: connection refused"}},
    )


async def test_metrics_name_routes_not_paths(client: httpx.AsyncClient, internal: httpx.AsyncClient) -> None:
    await client.post("/echo/one?key=secret", content=b"x")
    refused = await client.get("/starlette/one")
    assert (refused.status_code, refused.json()) == (409, {"missing": "'refused'"})
    await client.get("/nowhere/one")
    text = (await internal.get("/metrics")).text
    assert 'leyden_http_request_seconds_count{method="POST",route="/echo/{name}",service="sample",status="200"}' in text
    assert 'method="GET",route="/starlette/{name}",service="sample",status="409"' in text
    assert 'method="GET",route="unmatched",service="sample",status="404"' in text
    assert "/one" not in text
    assert "secret" not in text


async def test_a_hanging_check_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leyden.libs.service.health.CHECK_SECONDS", 0.01)
    checks = Checks()
    checks.add("slow", asyncio.Event().wait)
    assert "no answer" in (await checks.run())["slow"]


async def test_an_occupied_port_is_reported_with_the_remedy() -> None:
    async with serving(build()) as port:
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}"):
            async with serving(build(), port=port):
                pass
