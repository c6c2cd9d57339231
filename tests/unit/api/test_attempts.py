"""Starts, renewals and ends of clients' attempts, each in one transaction."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import AsyncMock

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import select

from leyden.libs.attempts import EndpointMonitor
from leyden.libs.capability import KeyRing, write_keys
from leyden.libs.contracts.api.attempts import EndedAttempt, EndRequest, Heartbeat, LeasedAttempt
from leyden.libs.queue import external
from leyden.libs.queue.external import Demand
from leyden.libs.service import Problem
from leyden.libs.store import tables
from leyden.libs.store.database import Database, ReadSession
from leyden.services.api.attempts import routes, service
from leyden.services.api.attempts.context import AttemptContext
from leyden.services.api.attempts.looks import Looks
from tests.support import builders


class Monitor:
    """Answers that an endpoint was down, or that none was."""

    def __init__(self, down: str | None = None, watching_since: float = 0.0) -> None:
        self.down = down
        self.watching_since = watching_since

    async def check(self) -> None:
        return None

    def down_since(self, _moment: float) -> str | None:
        return self.down

    async def gateway_down_since(self, _moment: float) -> float | None:
        return None if self.down is None else 0.0


def context(folder: Path, monitor: Monitor) -> AttemptContext:
    write_keys(folder / "keys.json")
    keys, endpoints = KeyRing(folder / "keys.json"), cast(EndpointMonitor, monitor)
    looks = Looks(cast(Any, None))
    return AttemptContext("http://gateway", "http://collector", keys, cast(Any, None), endpoints, looks)


@pytest.fixture
def monitor() -> Monitor:
    return Monitor()


@pytest.fixture
def watched(tmp_path: Path, monitor: Monitor) -> AttemptContext:
    return context(tmp_path, monitor)


async def waiting_run(database: Database, **changes: Any) -> tables.Run:
    runner = {"type": "external", "lease_seconds": 30.0, **changes}
    run = await builders.add_run(database, config={**builders.run_document(), "agent": {}, "runner": runner})
    await builders.add_group(database, run)
    return run


async def start(database: Database, run: tables.Run, watched: AttemptContext, owner: str = "a") -> LeasedAttempt:
    async with database.session() as session:
        lease, _ = await external.lease_next(session, run.id, owner, 30.0)
        assert lease is not None
        started = await service.start_attempt(session, lease, watched)
        assert started is not None
        return started


async def end(database: Database, leased: LeasedAttempt, watched: AttemptContext, **fields: Any) -> EndedAttempt:
    async with database.session() as session:
        status = await external.lock_attempt(session, leased.run_id, leased.id)
        assert status is not None
        return (await service.end(session, status, EndRequest(**{"outcome": "succeeded", **fields}), watched))[0]


async def test_an_end_counts_once(database: Database, watched: AttemptContext) -> None:
    leased = await start(database, await waiting_run(database), watched)
    assert leased.base_url == "http://gateway/v1" and leased.environment["OPENAI_API_KEY"] == leased.api_key
    first, again = [await end(database, leased, watched, rewards={"a": 1.0, "b": 0.5}, output="4") for _ in range(2)]
    assert (first.kind, first.reward) == ("succeeded", 1.5) and first == again
    with pytest.raises(Problem, match="has ended as succeeded already"):
        await end(database, leased, watched, output="5")


async def renew(database: Database, leased: LeasedAttempt, watched: AttemptContext) -> Heartbeat:
    async with database.session() as session:
        status = await external.lock_attempt(session, leased.run_id, leased.id)
        assert status is not None
        return await service.renew(session, status, watched)


async def test_a_heartbeat_renews_until_the_timeout(database: Database, watched: AttemptContext) -> None:
    for timeout, stop in ((100.0, None), (1e-6, "timeout")):
        leased = await start(database, await waiting_run(database, timeout_seconds=timeout), watched)
        assert (await renew(database, leased, watched)).stop == stop


async def test_a_late_end_counts_for_nothing(database: Database, watched: AttemptContext) -> None:
    leased = await start(database, await waiting_run(database), watched)
    await builders.end_attempt(database, leased.rollout_id)
    with pytest.raises(Problem, match="no heartbeat before its lease ended"):
        await end(database, leased, watched, reward=1.0)


@pytest.mark.parametrize(
    ("down", "since", "kind"), [(None, 0.0, "agent_error"), ("gateway", 0.0, "infra_error"), (None, 1e6, "infra_error")]
)
async def test_a_failure_is_the_agents_only_where_the_platform_answered(
    database: Database, tmp_path: Path, down: str | None, since: float, kind: str
) -> None:
    judged = context(tmp_path, Monitor(down, time.monotonic() - 60 + since))
    leased = await start(database, await waiting_run(database), judged)
    assert (await end(database, leased, judged, outcome="failed", reason="KeyError")).kind == kind


@pytest.mark.parametrize(
    ("down", "since", "kind"), [(None, 0.0, "timeout"), ("gateway", 0.0, "infra_error"), (None, 1e6, "infra_error")]
)
@pytest.mark.parametrize("by_heartbeat", [True, False])
async def test_a_timeout_is_the_agents_only_where_the_platform_answered(
    database: Database, tmp_path: Path, by_heartbeat: bool, down: str | None, since: float, kind: str
) -> None:
    judged = context(tmp_path, Monitor(down, time.monotonic() - 60 + since))
    leased = await start(database, await waiting_run(database, timeout_seconds=1e-6), judged)
    if by_heartbeat:
        assert (await renew(database, leased, judged)).stop == "timeout"
    else:
        assert (await end(database, leased, judged, reward=1.0)).kind == kind
    async with database.read() as session:
        outcome = await session.get_one(tables.Outcome, (leased.rollout_id, leased.number))
    assert (outcome.kind, outcome.reward) == (kind, None)


async def test_a_cancelled_rollout_and_a_reward_that_nobody_takes(database: Database, watched: AttemptContext) -> None:
    leased = await start(database, await waiting_run(database, stdout_reward=False), watched)
    with pytest.raises(Problem, match="takes no reward of its agent"):
        await end(database, leased, watched, reward=1.0)
    async with database.session() as session:
        (await session.get_one(tables.Run, leased.run_id)).intent = "cancelled"
    assert (await end(database, leased, watched, output="4")).kind == "cancelled"
    assert (await end(database, leased, watched, output="4")).kind == "cancelled"


async def test_requests_that_wait_for_the_same_tasks_look_once(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, looked = await waiting_run(database), list[str | None]()

    async def read(session: ReadSession, run_id: str, owner: str, agent: str | None = None) -> Demand | None:
        looked.append(agent)
        return await read_demand(session, run_id, owner, agent)

    read_demand = external.read_demand
    monkeypatch.setattr(external, "read_demand", read)
    looks = Looks(database)
    found = await asyncio.gather(*(looks.next(run.id, None) for _ in range(16)), looks.next(run.id, "writer"))
    assert sorted(looked, key=str) == [None, "writer"]
    assert [one is not None and one.is_due for one in found] == [True] * 16 + [False]
    waiter = asyncio.create_task(looks.next(run.id, None))
    await asyncio.sleep(0)
    await looks.close()
    await asyncio.wait([waiter])
    assert waiter.cancelled() and len(looked) == 2


async def test_the_routes_lease_renew_and_end(database: Database, watched: AttemptContext) -> None:
    run = await waiting_run(database)
    app, notifications = FastAPI(), AsyncMock()
    app.include_router(routes.router)
    app.state.database, app.state.first_admin_token = database, "secret-of-tests"
    app.state.attempts = replace(watched, notifications=notifications, looks=Looks(database))
    headers = {"authorization": "Bearer secret-of-tests"}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://api", headers=headers) as http:
        leased = (await http.post(f"/v1/runs/{run.id}/attempts", json={"key": "a"})).json()
        address = f"/v1/runs/{run.id}/attempts/{leased['id']}"
        assert (await http.post(f"{address}/heartbeat")).json()["stop"] is None
        ended = [await http.post(f"{address}/end", json={"outcome": "succeeded", "reward": 1}) for _ in range(2)]
        assert [one.status_code for one in ended] == [200, 200] and ended[0].json() == ended[1].json()
        await http.post(f"/v1/runs/{run.id}/attempts")
        assert (await http.post(f"/v1/runs/{run.id}/attempts", json={"wait_seconds": 0.1})).status_code == 204
    notifications.publish_ended.assert_awaited_with([(leased["rollout_id"], 1)])
    async with database.read() as session:
        actions = list(await session.scalars(select(tables.AuditEntry.action).order_by(tables.AuditEntry.id)))
    assert actions == ["lease_attempt", "end_attempt", "lease_attempt"]
