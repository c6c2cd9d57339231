"""The REST API against a real Postgres: datasets, runs, evaluations, rewards."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from libs.store import tables
from libs.store.database import Database
from services.api.app import create_app
from services.api.settings import Settings
from tests import builders

ADMIN = {"authorization": "Bearer secret-of-tests"}


@pytest.fixture
async def http(postgres_dsn: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application, signed in as administrator."""
    app = create_app(Settings(database_url=postgres_dsn, admin_token="secret-of-tests", max_upload_bytes=4096))
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://api", headers=ADMIN) as client:
            yield client


async def upload(http: httpx.AsyncClient, body: str | bytes, name: str = "questions", **headers: str) -> httpx.Response:
    return await http.post("/v1/datasets", params={"name": name}, content=body, headers=headers)


def document(**changes: object) -> dict[str, Any]:
    return builders.run_document(**changes)


async def create(http: httpx.AsyncClient, **changes: object) -> dict[str, Any]:
    await upload(http, '{"question": 1}\n{"question": 2}')
    response = await http.post("/v1/runs", json=document(**changes))
    assert response.status_code == 201, response.text
    made: dict[str, Any] = response.json()
    return made


async def test_an_uploaded_dataset_can_be_listed_with_its_tasks_in_order(http: httpx.AsyncClient) -> None:
    made = (await upload(http, '{"b": 1, "a": "é"}\n\n{"n": 2}\n')).json()
    assert (made["name"], made["task_count"]) == ("questions", 2)
    assert (await http.get("/v1/datasets/questions")).json() == made
    tasks = (await http.get(f"/v1/datasets/{made['id']}/tasks")).json()["items"]
    assert [task["payload"] for task in tasks] == [{"a": "é", "b": 1}, {"n": 2}]


async def test_an_equal_upload_is_a_repeat_and_another_under_its_name_a_conflict(http: httpx.AsyncClient) -> None:
    first = await upload(http, '{"a": 1, "b": 2}')
    repeat = await upload(http, '[{"b": 2, "a": 1}]')
    other = await upload(http, '{"a": 2}')
    assert (first.status_code, repeat.status_code, other.status_code) == (201, 200, 409)
    assert first.json() == repeat.json()
    assert "upload under another name" in other.json()["detail"]


async def test_bad_rows_are_reported_by_line_and_nothing_is_stored(http: httpx.AsyncClient) -> None:
    rows = ['{"a": 1}', "[1]", '{"a": NaN}', '{"a": 1, "a": 2}', '{"a": "\\u0000"}', "{oops", '{"a": 1e999}']
    response = await upload(http, "\n".join(rows))
    assert response.status_code == 422
    assert response.headers["content-type"] == "application/problem+json"
    problems = {problem["path"]: problem["message"] for problem in response.json()["errors"]}
    assert list(problems) == [f"line {number}" for number in range(2, 8)]
    assert "JSON object" in problems["line 2"] and "appears twice" in problems["line 4"]
    assert (await http.get("/v1/datasets")).json() == {"items": [], "next_cursor": None}


async def test_an_upload_beyond_the_limit_is_413(http: httpx.AsyncClient) -> None:
    response = await upload(http, json.dumps({"a": "x" * 5000}))
    assert response.status_code == 413


async def test_a_multipart_upload_takes_its_name_from_the_file(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/datasets", files={"file": ("train.jsonl", b'{"a": 1}')})
    assert (response.status_code, response.json()["name"]) == (201, "train")


async def test_a_run_is_created_with_partitions_and_planned_evaluations(
    http: httpx.AsyncClient, database: Database
) -> None:
    run = await create(http, evaluation={"dataset": "questions", "rollouts_per_task": 3})
    assert (run["intent"], run["phase"], run["progress"]["step"]) == ("running", "pending", 0)
    evaluations = (await http.get(f"/v1/runs/{run['id']}/evaluations")).json()["items"]
    assert [(e["id"], e["policy_version"]) for e in evaluations] == [(f"{run['id']}.e1", 0), (f"{run['id']}.e2", None)]
    assert evaluations[0]["results"] == {"rollouts": {}, "complete": False, "reward": None, "facts": []}
    # Its partitions take rows.
    row = await database_run(database, run["id"])
    _, [rollout, _] = await builders.add_group(database, row)
    await builders.add_call(database, rollout)


async def database_run(database: Database, run_id: str) -> tables.Run:
    async with database.read() as session:
        return await session.get_one(tables.Run, run_id)
