"""The stream of what changed in a run: names, ids that resume it, and an end when the API stops."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime

import httpx
import pytest

from leyden.libs.store import tables
from leyden.libs.store.database import Database
from tests.fakes.served_api import TOKEN
from tests.support import builders

HEADERS = {"authorization": f"Bearer {TOKEN}"}
ALL = ["run", "steps", "evaluations", "rollouts"]


@pytest.fixture
def http(api_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=api_url, headers=HEADERS, timeout=60) as client:
        yield client


def event(lines: Iterator[str]) -> tuple[str, list[str]]:
    """The id and the data of the next event."""
    found = ""
    for line in lines:
        if line.startswith("id: "):
            found = line.removeprefix("id: ")
        if line.startswith("data: "):
            return found, json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream ended")


async def test_a_stream_names_what_changed_and_goes_on_from_an_id(http: httpx.Client, database: Database) -> None:
    run = await builders.add_run(database)
    asked = {"params": {"run": run.id}}
    with http.stream("GET", "/v1/events", **asked) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()
        first, names = event(lines)
        assert names == ALL
        async with database.session() as session:
            moment = datetime.now(tz=UTC)
            session.add(tables.Step(run_id=run.id, number=1, metrics={}, checkpoint="", started_at=moment))
        assert event(lines)[1] == ["steps"]
        await builders.add_group(database, run)
        last, names = event(lines)
        assert names == ["rollouts"]
    for since, changed in ((last, []), (first, ["steps", "rollouts"]), ("nonsense", ALL)):
        with http.stream("GET", "/v1/events", headers={"last-event-id": since}, **asked) as answer:
            assert event(answer.iter_lines())[1] == changed


async def test_a_transaction_that_commits_after_a_later_one_is_told(http: httpx.Client, database: Database) -> None:
    run = await builders.add_run(database)
    _, [first, second] = await builders.add_group(database, run, size=2)
    for rollout in (first, second):
        await builders.add_attempt(database, rollout, state="settled", finished_at=datetime.now(tz=UTC))
    with http.stream("GET", "/v1/events", params={"run": run.id}) as answer:
        lines = answer.iter_lines()
        assert event(lines)[1] == ALL
        async with database.session() as session:
            values = {"kind": "succeeded", "facts": {}, "stdout_tail": "", "stderr_tail": ""}
            session.add(tables.Outcome(rollout_id=first.id, attempt=1, run_id=run.id, reward=1.0, **values))
            await session.flush()
            await builders.add_outcome(database, second)
            assert event(lines)[1] == ["rollouts"]
        assert event(lines)[1] == ["rollouts"]


def test_a_run_that_is_not_there_has_no_stream(http: httpx.Client) -> None:
    answer = http.get("/v1/events", params={"run": "nobody"})
    assert answer.status_code == 404 and "list runs" in answer.json()["detail"]
