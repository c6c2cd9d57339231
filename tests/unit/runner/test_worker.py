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
from leyden.libs.contracts.config import RunnerConfig
from leyden.libs.queue import leases
from leyden.libs.queue.notifications import Notifications
from leyden.libs.queue.stream import RolloutQueue
from leyden.libs.sandbox.ended import Ended
from leyden.libs.store import tables
from leyden.libs.store.attempts import AttemptKey
from leyden.libs.store.database import Database
from leyden.services.runner import worker as runner_module
from leyden.services.runner.attempt import RunnerContext
from leyden.services.runner.backends.base import AttemptSpec
from leyden.services.runner.backends.kubernetes.backend import KubernetesBackend
from leyden.services.runner.backends.kubernetes.job import name_of
from leyden.services.runner.settings import Settings
from leyden.services.runner.worker import Runner
from tests.fakes.kubernetes_api import FakeKubernetes
from tests.support import builders
from tests.support.waiting import eventually


async def key_is_good(_url: str, _key: str) -> bool:
    return False


async def never(_moment: float) -> None:
    return None


class Survivors:
    """A backend whose agents outlive their runner."""

    agents_outlive_runner = True

    def __init__(self, found: list[tuple[str, int]], ended: Ended) -> None:
        self.found, self.ended = found, ended
        self.discarded: list[tuple[str, int]] = []
        self.removed: list[tuple[str, int]] = []
        self.adopted: list[str] = []

    async def survivors(self) -> list[tuple[str, int]]:
        return [one for one in self.found if one not in self.discarded and f"{one[0]}.{one[1]}" not in self.adopted]

    async def discard(self, rollout_id: str, attempt: int) -> None:
        self.discarded.append((rollout_id, attempt))

    async def remove(self, rollout_id: str, attempt: int, _: RunnerConfig) -> None:
        self.removed.append((rollout_id, attempt))

    async def run(self, spec: AttemptSpec) -> Ended:
        assert spec.adopted
        self.adopted.append(spec.name)
        return self.ended


class Endless(Survivors):
    """A backend whose agents never end."""

    def __init__(self) -> None:
        super().__init__([], Ended(0, b"", b"", 1.0))
        self.started: list[str] = []

    async def run(self, spec: AttemptSpec) -> Ended:
        (self.adopted if spec.adopted else self.started).append(spec.name)
        try:
            return await asyncio.Future[Ended]()
        finally:
            self.found.append((spec.labels["rollout"], int(spec.labels["attempt"])))


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
    assert (backend.discarded, backend.removed) == ([(rollout.id, 7)], [(rollout.id, 1)])
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
    _, [rollout] = await builders.add_group(database, run, size=1)
    async with working(database, redis_url, tmp_path, backend, concurrency=1) as queue:
        await queue.enqueue([rollout.id])
        await eventually(lambda: backend.started)
        async with database.session() as session:
            if is_cancelled:
                await session.execute(update(tables.Run).values(intent="cancelled"))
            else:
                await eventually(lambda: is_running(database, rollout.id))
                # As after an outage of the store: another runner's leases are so long that this one's looks silent.
                assert await leases.adopt_silent(session, [AttemptKey(rollout.id, 1)], "runner-c", 600.0)
        await eventually(lambda: backend.removed if is_cancelled else backend.found)
        await eventually(lambda: runner_module.RUNNING.collect()[0].samples[0].value == 0)
        assert (backend.found, backend.adopted) == ([(rollout.id, 1)], [])
        assert is_cancelled or (backend.removed, backend.discarded) == ([], [])


async def test_an_agent_that_ends_before_its_former_runner_learns_of_its_adoption_counts(
    database: Database, redis_url: str, tmp_path: Path
) -> None:
    document = builders.run_document(runner={"type": "kubernetes", "image": "agents/flight:3"})
    _, [rollout] = await builders.add_group(database, await builders.add_run(database, config=document), size=1)
    job = name_of(f"{rollout.id}.1")
    async with FakeKubernetes().serving() as server:
        server.on_job = lambda made: server.running(made["metadata"]["name"])
        server.logs[f"{job}-x7k2p"] = b'{"reward": 1}'
        async with working(database, redis_url, tmp_path, of_cluster(server, tmp_path), lease_seconds=600.0) as queue:
            await queue.enqueue([rollout.id])
            # It has seen the agent run.
            await eventually(lambda: server.requests["PATCH jobs"])
            await run_out(database, 60.0)
            async with database.session() as session:
                assert await leases.adopt_silent(session, [AttemptKey(rollout.id, 1)], "runner-c", 600.0)
            server.ended(job, 0)
            await eventually(lambda: runner_module.RUNNING.collect()[0].samples[0].value == 0)
            assert (await outcomes(database, rollout.id), server.deleted) == ([], [])
        await run_out(database, 3.5)
        async with working(database, redis_url, tmp_path, of_cluster(server, tmp_path)):
            await eventually(lambda: server.deleted)
    assert (await outcomes(database, rollout.id), server.deleted) == ([(1, "succeeded", 1.0)], [job])


def of_cluster(server: FakeKubernetes, folder: Path) -> KubernetesBackend:
    """The backend of one runner."""
    (folder / "agent.yaml").write_text("spec: {containers: [{name: agent, image: 'placeholder:1'}]}")
    values = {"backend": "kubernetes", "namespace": "rollouts", "pod_template_file": folder / "agent.yaml"}
    return KubernetesBackend(Settings(**values), server.cluster())


async def run_out(database: Database, seconds: float) -> None:
    """Lets every lease end so soon, as where its runner has not renewed it for long."""
    async with database.session() as session:
        soon = func.clock_timestamp() + func.make_interval(0, 0, 0, 0, 0, 0, seconds)
        await session.execute(update(tables.Attempt).values(lease_expires_at=soon))


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
    database: Database, redis_url: str, folder: Path, backend: Survivors | KubernetesBackend, **options: Any
) -> AsyncIterator[RolloutQueue]:
    """A runner with this backend inside the block; gives its queue."""
    kind = "kubernetes" if isinstance(backend, KubernetesBackend) else "process"
    keys = folder / "keys.json"
    keys.touch(0o600)
    keys.write_text(json.dumps({"k1": "x" * 40}))
    settings = Settings(**{"lease_seconds": 12.0, "drain_seconds": 0, "capability_keys_file": keys, **options})
    names = {"refuses_key": key_is_good, "gateway_down_since": never, "watching_since": time.monotonic()}
    endpoints: Any = SimpleNamespace(run=asyncio.Event().wait, **names)
    context = RunnerContext(settings, KeyRing(keys), {kind: backend}, endpoints)  # type: ignore[dict-item]
    queue, notifications, stop = RolloutQueue(redis_url, runner_type=kind), Notifications(redis_url), asyncio.Event()
    running = asyncio.create_task(Runner("runner-b", database, queue, notifications, context).run(stop))
    try:
        yield queue
    finally:
        stop.set()
        await running
        await queue.close()
        await notifications.close()
        if isinstance(backend, KubernetesBackend):
            await backend.close()


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
