"""Every change of the API stands in the list with the token that asked for it; tokens expire and rotate."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from sqlalchemy import update

from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.services import api
from leyden.services.api import access, datasets, rollouts, runs
from leyden.services.api.attempts import routes as attempts
from leyden.services.api.duels import routes as duels
from tests.support import builders

MODULES = (access, attempts, datasets, duels, rollouts, runs)


async def issued(http: httpx.AsyncClient, name: str, *scopes: str, **more: Any) -> dict[str, Any]:
    answer = await http.post("/v1/tokens", json={"name": name, "scopes": list(scopes), **more})
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


def bearer(made: dict[str, Any]) -> dict[str, str]:
    return {"authorization": f"Bearer {made['token']}"}


async def audit(http: httpx.AsyncClient, **filters: Any) -> list[dict[str, Any]]:
    found, cursor = list[dict[str, Any]](), None
    while True:
        pages = {} if cursor is None else {"cursor": cursor}
        page = (await http.get("/v1/audit", params={**filters, "limit": 2, **pages})).json()
        found += page["items"]
        cursor = page["next_cursor"]
        if cursor is None:
            return found


async def rated_rollout(database: Database) -> tables.Rollout:
    reward = {"components": [{"name": "thumbs", "from": "feedback"}], "wait": {"seconds": 60.0}}
    run = await builders.add_run(database, config=builders.run_document(reward=reward))
    _, [rollout] = await builders.add_group(database, run, size=1)
    await builders.add_attempt(database, rollout)
    return rollout


async def test_the_list_says_who_did_what(api_http: httpx.AsyncClient, database: Database) -> None:
    run = await builders.add_run(database)
    _, [rollout] = await builders.add_group(database, run, size=1)
    ann = await issued(api_http, "ann", "write")
    reward = {"key": "k", "value": 0.5}
    for status in (201, 200):
        given = await api_http.post(f"/v1/rollouts/{rollout.id}/rewards", json=reward, headers=bearer(ann))
        assert (given.status_code, given.json()["given_by"]) == (status, "ann")
    rated = await rated_rollout(database)
    value = {"key": "k", "component": "thumbs", "value": 1.0, "comment": "good"}
    for status in (201, 200):
        given = await api_http.post(f"/v1/rollouts/{rated.id}/feedback", json=value, headers=bearer(ann))
        assert (given.status_code, given.json()["given_by"], given.json()["attempt"]) == (status, "ann", 1)
    body = json.dumps({"question": 1}).encode()
    for key in ("one", "one", "two"):
        headers = {**bearer(ann), "idempotency-key": key, "content-type": "application/x-ndjson"}
        await api_http.post("/v1/datasets", params={"name": "d"}, content=body, headers=headers)
    for _ in range(2):
        assert (await api_http.post(f"/v1/runs/{run.id}/pause", headers=bearer(ann))).status_code == 200
    assert (await api_http.post("/v1/runs/none/pause", headers=bearer(ann))).status_code == 404
    entries = await audit(api_http)
    shown = [(one["token_name"], one["action"], one["subject"]) for one in entries]
    # Repeats, and what was refused, changed nothing.
    assert shown == [
        ("ann", "pause_run", run.id),
        ("ann", "upload_dataset", shown[1][2]),
        ("ann", "create_feedback", rated.id),
        ("ann", "create_reward", rollout.id),
        ("first-admin", "create_token", ann["id"]),
    ]
    assert entries[2]["detail"] == {"key": "k", "component": "thumbs", "value": 1.0}
    assert entries[3]["detail"] == {"key": "k", "name": "reward", "value": 0.5}
    [shown_feedback] = (await api_http.get(f"/v1/rollouts/{rated.id}")).json()["feedback"]
    assert (shown_feedback["given_by"], shown_feedback["comment"]) == ("ann", "good")
    assert ann["token"] not in json.dumps(entries)
    assert [one["action"] for one in await audit(api_http, token="ann", subject=rollout.id)] == ["create_reward"]
    assert len(await audit(api_http, action="pause_run")) == 1 and await audit(api_http, token="bob") == []
    assert (await api_http.get("/v1/audit", headers=bearer(ann))).status_code == 403


def test_every_route_that_changes_something_does_it_inside_a_recorded_transaction() -> None:
    routes = [one for module in MODULES for one in module.router.routes if isinstance(one, APIRoute)]
    # It stores nothing.
    changing = [one for one in routes if one.methods != {"GET"} and one.name != "grade_rollout"]
    ways = ("changing(", "create_once(", "_issue_once(", "_store(")
    unrecorded = [one.path for one in changing if not any(way in inspect.getsource(one.endpoint) for way in ways)]
    assert len(changing) > 10 and unrecorded == []
    sources = {path.name: path.read_text() for path in Path(api.__path__[0]).rglob("*.py")}
    assert [name for name, source in sources.items() if ".session()" in source] == ["audit.py"]


async def test_a_token_expires(api_http: httpx.AsyncClient, database: Database) -> None:
    made = await issued(api_http, "ci", "read", expires_seconds=3600)
    assert made["expires_at"] is not None and (await issued(api_http, "x", "read"))["expires_at"] is None
    assert (await api_http.get("/v1/runs", headers=bearer(made))).status_code == 200
    async with database.session() as session:
        table = tables.ApiToken
        await session.execute(update(table).where(table.id == made["id"]).values(expires_at=table.created_at))
    refused = await api_http.get("/v1/runs", headers=bearer(made))
    assert (refused.status_code, refused.json()["cause"]) == (401, "token")
    assert (await api_http.post(f"/v1/tokens/{made['id']}/rotate")).status_code == 409


@pytest.mark.parametrize(("grace", "status"), [(0, 401), (60, 200)])
async def test_a_rotated_token_has_a_new_secret_and_the_old_one_ends_after_the_grace(
    api_http: httpx.AsyncClient, grace: int, status: int
) -> None:
    old = await issued(api_http, "ci", "write", expires_seconds=3600)
    answer = await api_http.post(f"/v1/tokens/{old['id']}/rotate", json={"grace_seconds": grace})
    new = answer.json()
    assert (answer.status_code, new["name"], new["scopes"]) == (201, "ci", ["write"])
    assert new["id"] != old["id"] and new["token"] != old["token"] and new["expires_at"] > old["expires_at"]
    assert (await api_http.get("/v1/runs", headers=bearer(new))).status_code == 200
    assert (await api_http.get("/v1/runs", headers=bearer(old))).status_code == status
    [entry] = await audit(api_http, action="rotate_token")
    assert entry["subject"] == old["id"] and entry["detail"]["id"] == new["id"]


async def test_a_token_is_rotated_once_and_its_successor_lives_as_long(api_http: httpx.AsyncClient) -> None:
    old = await issued(api_http, "ci", "write")
    address = f"/v1/tokens/{old['id']}/rotate"
    answers = [await api_http.post(address, json={"grace_seconds": 60}) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [201, 409]
    assert answers[0].json()["expires_at"] is None
    assert (await api_http.delete(f"/v1/tokens/{old['id']}")).status_code == 204
    assert (await api_http.get("/v1/runs", headers=bearer(old))).status_code == 401


async def test_a_repeat_that_changes_nothing_leaves_no_entry(api_http: httpx.AsyncClient, database: Database) -> None:
    run, reader = await builders.add_run(database), await issued(api_http, "reader", "read")
    for action in ("pause", "resume", "cancel"):
        answers = [await api_http.post(f"/v1/runs/{run.id}/{action}") for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 200]
        assert len(await audit(api_http, action=f"{action}_run")) == 1
    revoked = [await api_http.delete(f"/v1/tokens/{reader['id']}") for _ in range(2)]
    assert [answer.status_code for answer in revoked] == [204, 204]
    assert len(await audit(api_http, action="revoke_token")) == 1


@pytest.mark.parametrize("name", ["a\nfirst-admin", "a\x1b[31m", "a\u202eb", "a\u2028b", ""])
async def test_a_tokens_name_cannot_forge_a_line(api_http: httpx.AsyncClient, name: str) -> None:
    assert (await api_http.post("/v1/tokens", json={"name": name, "scopes": ["read"]})).status_code == 422
