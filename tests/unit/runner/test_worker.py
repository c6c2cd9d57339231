"""The runner's loop with everything around it in this process."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import func, select, update

from leyden.libs.capability import KeyRing
from leyden.libs.queue import leases
from leyden.libs.queue.notifications import Notifications
from leyden.libs.queue.stream import RolloutQueue
from leyden.libs.sandbox.ended import Ended
from leyden.libs.store import tables
from leyden.libs.store.attempts import AttemptKey
from leyden.libs.store.database import Database
from leyden.services.runner.attempt import RunnerContext
from leyden.services.runner.backends.base import AttemptSpec
from leyden.services.runner.settings import Settings
from leyden.services.runner.worker import Runner
from tests.support import builders
from tests.support.waiting import eventually


async def key_is_good(_url: str, _key: str) -> bool:
    return False


async def never(_moment: float) -> None:
    return None


class Survivors:
    """A backend whose agents outlive their runner."""

    def __init__(self, found: list[tuple[str, int]], ended: Ended) -> None:
        self.found, self.ended = found, ended
        self.discarded: list[tuple[str, int]] = []
        self.adopted: list[str] = []

    async def survivors(self) -> list[tuple[str, int]]:
        return [one for one in self.found if one not in self.discarded and f"{one[0]}.{one[1]}" not in self.adopted]

    async def discard(self, rollout_id: str, attempt: int) -> None:
        self.discarded.append((rollout_id, attempt))

    def detach(self) -> bool:
        return True

    async def run(self, spec: AttemptSpec) -> Ended:
        assert spec.adopted
        self.adopted.append(spec.name)
        return self.ended


class Endless(Survivors):
    """A backend whose agents never end."""

    def __init__(self) -> None:
        super().__init__([], Ended(0, b"", b"", 1.0))
        self.started: list[str] = []
        self.left: list[tuple[str, int]] = []
        self.killed: list[str] = []

    def leave(self, rollout_id: str, attempt: int) -> None:
        self.left.append((rollout_id, attempt))

    async def run(self, spec: AttemptSpec) -> Ended:
        (self.adopted if spec.adopted else self.started).append(spec.name)
        try:
            return await asyncio.Future[Ended]()
        finally:
            attempt = (spec.labels["rollout"], int(spec.labels["attempt"]))
            if attempt in self.left:
                self.found.append(attempt)
            else:
                self.killed.append(spec.name)


@pytest.mark.parametrize(
    ("ended", "found"),
    [
        (Ended(0, b"", b"", 1.0, reward_line=b'{"reward": 0.5}'), (1, "succeeded", 0.5)),
        # The gateway may have been away before this runner watched it.
        (Ended(1, b"", b"", 1.0), (1, "infra_error", None)),
    ],
)
async def test_attempts_of_a_runner_that_is_gone_are_adopted_and_unwanted_agents_stopped(
    database: Database, redis_url: str, tmp_path: Path, ended: Ended, found: tuple[int, str, float | None]
) -> None:
    run = await builders.add_run(database)
    _, [rollout, *_] = await builders.add_group(database, run)
    await run_elsewhere(database, [rollout], 4.0)
    backend = Survivors([(rollout.id, 1), (rollout.id, 7)], ended)
    async with working(database, redis_url, tmp_path, backend):
        await eventually(lambda: outcomes(database, rollout.id))
    assert await outcomes(database, rollout.id) == [found]
    assert backend.discarded == [(rollout.id, 7)]
    async with database.read() as session:
        outcome = await session.get_one(tables.Outcome, (rollout.id, 1))
    assert ended.exit_code == 0 or "did not yet watch" in (outcome.detail or "")


async def test_a_full_runner_adopts_every_silent_attempt_among_those_of_live_runners(
    database: Database, redis_url: str, tmp_path: Path
) -> None:
    run, backend = await builders.add_run(database), Endless()
    _, [own, *others] = await builders.add_group(database, run, size=9)
    live, silent = others[:5], others[5:]
    await run_elsewhere(database, live, 600.0)
    async with working(database, redis_url, tmp_path, backend, concurrency=1) as queue:
        await queue.enqueue([own.id])
        await eventually(lambda: backend.started)
        await run_elsewhere(database, silent, 4.0)
        backend.found = [(one.id, 1) for one in others]
        await eventually(lambda: len(backend.adopted) >= len(silent))
    assert backend.started == [f"{own.id}.1"]
    assert sorted(backend.adopted) == [f"{one.id}.1" for one in silent]


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_an_attempt_that_another_runner_adopted_keeps_its_agent_and_a_cancelled_one_loses_it(
    database: Database, redis_url: str, tmp_path: Path, *, is_cancelled: bool
) -> None:
    run, backend = await builders.add_run(database), Endless()
    _, [rollout, *_] = await builders.add_group(database, run)
    async with working(database, redis_url, tmp_path, backend, concurrency=1) as queue:
        await queue.enqueue([rollout.id])
        await eventually(lambda: backend.started)
        async with database.session() as session:
            if is_cancelled:
                await session.execute(update(tables.Run).values(intent="cancelled"))
            else:
                await eventually(lambda: is_running(database, rollout.id))
                # Its own runner has not renewed it for long, as after an outage of the store.
                await session.execute(update(tables.Attempt).values(lease_expires_at=SOON))
                assert await leases.adopt_silent(session, [AttemptKey(rollout.id, 1)], "runner-c", 600.0)
        await eventually(lambda: backend.left or backend.killed)
        assert backend.killed == []
        await eventually(lambda: backend.discarded if is_cancelled else backend.found)
        assert (backend.left, backend.adopted) == ([(rollout.id, 1)], [])
        assert backend.discarded == ([(rollout.id, 1)] if is_cancelled else [])


SOON = func.clock_timestamp() + func.make_interval(0, 0, 0, 0, 0, 0, 1)


async def is_running(database: Database, rollout_id: str) -> bool:
    async with database.read() as session:
        return (await session.get_one(tables.Attempt, (rollout_id, 1))).state == "running"


async def run_elsewhere(database: Database, rollouts: Sequence[tables.Rollout], seconds: float) -> None:
    """Starts an attempt of each as another runner, which renews its leases no longer."""
    async with database.session() as session:
        leased = await leases.lease_rollouts(session, [one.id for one in rollouts], "runner-gone", seconds)
        assert len(leased) == len(rollouts)
        await leases.start_all(session, leased)


@asynccontextmanager
async def working(
    database: Database, redis_url: str, folder: Path, backend: Survivors, **options: Any
) -> AsyncIterator[RolloutQueue]:
    """A runner with this backend inside the block; gives its queue."""
    keys = folder / "keys.json"
    keys.touch(0o600)
    keys.write_text(json.dumps({"k1": "x" * 40}))
    settings = Settings(lease_seconds=12.0, drain_seconds=0, capability_keys_file=keys, **options)
    names = {"refuses_key": key_is_good, "gateway_down_since": never, "watching_since": time.monotonic()}
    endpoints: Any = SimpleNamespace(run=asyncio.Event().wait, **names)
    context = RunnerContext(settings, KeyRing(keys), {"process": backend}, endpoints)  # type: ignore[dict-item]
    queue, notifications, stop = RolloutQueue(redis_url), Notifications(redis_url), asyncio.Event()
    running = asyncio.create_task(Runner("runner-b", database, queue, notifications, context).run(stop))
    try:
        yield queue
    finally:
        stop.set()
        await running
        await queue.close()
        await notifications.close()


async def outcomes(database: Database, rollout_id: str) -> list[tuple[int, str, float | None]]:
    async with database.read() as session:
        found = await session.scalars(select(tables.Outcome).where(tables.Outcome.rollout_id == rollout_id))
        return [(one.attempt, one.kind, one.reward) for one in found]


async def test_a_runner_one_of_whose_loops_has_died_ends_instead_of_doing_nothing(
    database: Database, redis_url: str
) -> None:
    async def die() -> None:
        await asyncio.sleep(0.1)
        raise RuntimeError("broken")

    context: Any = SimpleNamespace(settings=Settings(), backends={}, endpoints=SimpleNamespace(run=die))
    queue, notifications = RolloutQueue(redis_url), Notifications(redis_url)
    try:
        async with asyncio.timeout(60):
            with pytest.raises(RuntimeError, match="broken"):
                await Runner("runner-a", database, queue, notifications, context).run(asyncio.Event())
    finally:
        await queue.close()
        await notifications.close()
