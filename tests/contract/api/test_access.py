"""Scopes of bearer tokens, and the API's OpenAPI document."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import datetime

import httpx
import pytest
from fastapi import FastAPI
from openapi_spec_validator import validate
from sqlalchemy import func, select

from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.services.api.app import create_app, openapi_document
from leyden.services.api.settings import Settings
from tests.support import builders


async def token(http: httpx.AsyncClient, *scopes: str) -> dict[str, str]:
    made = (await http.post("/v1/tokens", json={"name": "ci", "scopes": list(scopes)})).json()
    return {"authorization": f"Bearer {made['token']}", "id": made["id"]}


@pytest.mark.parametrize(
    ("scope", "statuses"),
    [("read", (200, 403, 403)), ("write", (200, 404, 403)), ("admin", (200, 404, 200))],
)
async def test_a_scope_allows_only_its_own_routes(
    api_http: httpx.AsyncClient, scope: str, statuses: tuple[int, ...]
) -> None:
    headers = {"authorization": (await token(api_http, scope))["authorization"]}
    answers = [
        await api_http.get("/v1/runs", headers=headers),
        await api_http.post("/v1/runs", json=builders.run_document(dataset="nowhere"), headers=headers),
        await api_http.get("/v1/tokens", headers=headers),
    ]
    assert tuple(answer.status_code for answer in answers) == statuses


async def test_a_stranger_is_refused_before_a_byte_of_its_body_is_read(api_http: httpx.AsyncClient) -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 2**16
            raise AssertionError("a second piece was asked for")

    headers = {"authorization": "Bearer nobodys", "content-type": "multipart/form-data; boundary=b"}
    response = await api_http.post("/v1/datasets", content=endless(), headers=headers)
    assert (response.status_code, response.json()["cause"]) == (401, "token")


async def test_a_revoked_token_is_refused(api_http: httpx.AsyncClient) -> None:
    made = await token(api_http, "admin")
    assert (await api_http.delete(f"/v1/tokens/{made['id']}")).status_code == 204
    response = await api_http.get("/v1/runs", headers={"authorization": made["authorization"]})
    assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")


@pytest.mark.parametrize("header", ["", "Bearer wrong", "Basic abc", "Bearer é"])
async def test_every_route_refuses_an_unknown_token_with_401(api_http: httpx.AsyncClient, header: str) -> None:
    for path in openapi_document()["paths"]:
        response = await api_http.request("GET", path, headers={"authorization": header.encode()})
        assert response.status_code in {401, 405}, path


async def test_a_token_is_shown_once_and_never_listed(api_http: httpx.AsyncClient) -> None:
    made = await token(api_http, "read")
    listed = await api_http.get("/v1/tokens")
    assert made["authorization"].removeprefix("Bearer ") not in listed.text
    assert [item["scopes"] for item in listed.json()["items"]] == [["read"]]


async def test_a_list_has_the_last_change_that_each_token_asked_for(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    first, second = [await token(api_http, "write") for _ in range(2)]
    run = await builders.add_run(database)
    for _ in range(2):
        answer = await api_http.post(f"/v1/runs/{run.id}/pause", headers={"authorization": first["authorization"]})
        assert answer.status_code == 200
        await api_http.post(f"/v1/runs/{run.id}/resume", headers={"authorization": first["authorization"]})
    await api_http.get("/v1/runs", headers={"authorization": second["authorization"]})
    async with database.read() as session:
        query = select(func.max(tables.AuditEntry.created_at)).where(tables.AuditEntry.token_id == first["id"])
        last = await session.scalar(query)
    found = {one["id"]: one["changed_at"] for one in (await api_http.get("/v1/tokens")).json()["items"]}
    assert last is not None
    assert datetime.fromisoformat(found[first["id"]]) == last
    assert found[second["id"]] is None


async def test_a_repeated_token_request_gets_the_same_secret_and_another_key_another(
    api_http: httpx.AsyncClient,
) -> None:
    async def ask(key: str, name: str = "ci") -> httpx.Response:
        body = {"name": name, "scopes": ["read"]}
        return await api_http.post("/v1/tokens", json=body, headers={"idempotency-key": key})

    first, again, other = await ask("a"), await ask("a"), await ask("b")
    assert first.json() == again.json()
    assert first.json()["token"] != other.json()["token"]
    assert (await ask("a", name="another")).status_code == 422
    assert len((await api_http.get("/v1/tokens")).json()["items"]) == 2
    headers = {"authorization": f"Bearer {first.json()['token']}"}
    assert (await api_http.get("/v1/runs", headers=headers)).status_code == 200


@pytest.mark.parametrize("is_rotated", [False, True])
async def test_a_repeat_after_the_first_administrators_token_changed_shows_no_wrong_secret(
    postgres_dsn: str, is_rotated: bool
) -> None:
    old, new = [create_app(Settings(database_url=postgres_dsn, admin_token=secret)) for secret in ("old", "new")]
    async with old.router.lifespan_context(old), new.router.lifespan_context(new):
        path, body, key = "/v1/tokens", {"name": "ci", "scopes": ["read"]}, {"idempotency-key": "a"}
        async with signed_in(old, "old") as http:
            if is_rotated:
                path, body = f"/v1/tokens/{(await http.post(path, json=body)).json()['id']}/rotate", {}
            made = (await http.post(path, json=body, headers=key)).json()
        async with signed_in(new, "new") as http:
            again = await http.post(path, json=body, headers=key)
            renewed = await http.post(f"/v1/tokens/{made['id']}/rotate", headers={"idempotency-key": "b"})
    assert (again.status_code, again.json()["cause"]) == (409, "state")
    assert f"token '{made['id']}'" in again.json()["detail"]
    assert "rotate that token with a new Idempotency-Key" in again.json()["detail"]
    assert (renewed.status_code, "token" in again.json()) == (201, False)


def signed_in(app: FastAPI, secret: str) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {secret}"}
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api", headers=headers)


def test_the_openapi_document_is_valid_and_describes_every_route() -> None:
    document = openapi_document()
    validate(document)
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    assert all(operation["description"] and operation["security"] for operation in operations)
    assert all("default" in operation["responses"] for operation in operations)


async def test_a_ready_api_has_its_database_and_schema(postgres_dsn: str) -> None:
    app = create_app(Settings(database_url=postgres_dsn, admin_token="t"))
    async with app.router.lifespan_context(app):
        assert await app.state.checks.run() == {"database": "ok", "schema": "ok"}


async def test_a_problem_has_its_media_type(api_http: httpx.AsyncClient) -> None:
    missing = await api_http.get("/v1/nothing")
    assert (missing.status_code, missing.headers["content-type"]) == (404, "application/problem+json")
