"""What the controller writes, on a real Postgres: rollouts end once, groups complete, leases lead to retries."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select, update

from libs.contracts import ids
from libs.contracts.states import EngineState
from libs.queue.stream import RolloutQueue
from libs.queue.wake import Wake
from libs.store import groups as store
from libs.store import tables
from libs.store.database import Database
from libs.store.engines import SeenEngine, forget_other_engines, write_engines
from libs.store.locks import AdvisoryLock, LockLost
from services.controller.engines import Fleet, Wanted
from services.controller.settings import Settings
from services.controller.trainers import Trainers
from services.controller.worker import Controller
from tests import builders

LONG_AGO = datetime.now(tz=UTC) - timedelta(hours=1)


class ObedientFleet(Fleet):
    """Engines that serve at once what they should; `served` tells what."""

    def __init__(self) -> None:
        self.served: Wanted | None = None

    def want(self, wanted: Wanted | None) -> None:
        self.served = wanted or self.served

    def wants(self, run_id: str, version: int) -> bool:
        return self.served is not None and (self.served.run_id, self.served.version) == (run_id, version)

    def served_version(self, run_id: str) -> int | None:
        return self.served.version if self.served is not None and self.served.run_id == run_id else None

    def trouble(self) -> str | None:
        return None


class NoTrainers(Trainers):
    """Remembers what was wanted, and starts nothing."""

    def __init__(self) -> None:
        self.wanted: dict[str, int] = {}
        self.failures: dict[str, str] = {}

    def want(self, steps_done: dict[str, int]) -> None:
        self.wanted = steps_done

    def take_failures(self) -> dict[str, str]:
        failures, self.failures = self.failures, {}
        return failures


class Scene:
    """A controller whose engines and trainers are obedient, on a database of its own."""

    def __init__(self, database: Database, redis_url: str, **settings: Any) -> None:
        self.database = database
        self.queue = RolloutQueue(redis_url)
        self.wake = Wake(redis_url)
        self.fleet = ObedientFleet()
        self.trainers = NoTrainers()
        self.settings = Settings(retry_seconds=0, enqueue_again_seconds=0.001, **settings)
        self.controller = self.another_controller()

    def another_controller(self) -> Controller:
        return Controller(self.settings, self.database, self.queue, self.wake, self.fleet, self.trainers)

    async def tick(self, times: int = 1) -> None:
        for _ in range(times):
            await self.controller.tick()

    async def phase(self, run: tables.Run) -> tuple[str, str | None]:
        async with self.database.read() as session:
            row = await session.get_one(tables.RunStatus, run.id)
            return row.phase, row.reason

    async def groups(self, run: tables.Run) -> list[tables.Group]:
        async with self.database.read() as session:
            table = tables.Group
            return list(
                await session.scalars(
                    select(table).where(table.run_id == run.id).order_by(table.evaluation_id, table.number)
                )
            )

    async def rollouts(self, run: tables.Run, state: str | None = None) -> list[tables.Rollout]:
        async with self.database.read() as session:
            table = tables.Rollout
            rows = await session.scalars(select(table).where(table.run_id == run.id).order_by(table.id))
            return [row for row in rows if state in (None, row.state)]

    async def attempt(
        self, rollout: tables.Rollout, number: int = 1, *, kind: str | None, reward: float | None
    ) -> None:
        """An attempt that ended; without a kind its lease ran out."""
        state = "expired" if kind is None else "settled"
        await builders.add_attempt(self.database, rollout, number, state=state, finished_at=LONG_AGO)
        if kind is not None:
            await builders.add_outcome(self.database, rollout, number, kind=kind, reward=reward)

    async def finish_all(self, run: tables.Run, reward: float = 1.0) -> None:
        for rollout in await self.rollouts(run, "queued"):
            await self.attempt(rollout, kind="succeeded", reward=reward)

    async def credit_and_train(self, run: tables.Run, step: int) -> None:
        """What credit and trainer write for a step: every complete training group is consumed by it."""
        groups = [
            group for group in await self.groups(run) if group.evaluation_id is None and group.state == "complete"
        ]
        async with self.database.read() as session:
            consumed = set(await session.scalars(select(tables.StepGroup.group_id)))
        async with self.database.session() as session:
            now = datetime.now(tz=UTC)
            session.add(tables.Step(run_id=run.id, number=step, metrics={}, checkpoint="c", started_at=now))
            for group in groups[: step * run.config["sampling"]["groups_per_step"]]:
                if group.id not in consumed:
                    session.add(_credited(group))
                    await session.flush()
                    session.add(tables.StepGroup(group_id=group.id, run_id=run.id, step=step, verdict="trained"))
        await builders.add_policy_version(self.database, run, step)

    async def intend(self, run: tables.Run, intent: str) -> None:
        async with self.database.session() as session:
            await session.execute(update(tables.Run).where(tables.Run.id == run.id).values(intent=intent))

    async def close(self) -> None:
        await self.queue.close()
        await self.wake.close()


def _credited(group: tables.Group, verdict: str = "credited") -> tables.GroupCredit:
    return tables.GroupCredit(
        group_id=group.id,
        run_id=group.run_id,
        verdict=verdict,
        credit_version=1,
        counted_siblings=group.size,
        has_variance=True,
    )


@pytest.fixture
async def scene(database: Database, redis_url: str):
    made = Scene(database, redis_url)
    yield made
    await made.close()


def document(steps: int = 2, **sampling: Any) -> dict[str, Any]:
    values = {"group_size": 2, "groups_per_step": 2, "max_policy_lag": 1, "max_attempts": 3, **sampling}
    return builders.run_document(sampling=values, training={"steps": steps})


async def add_run(scene: Scene, *, version: int | None = 0, tasks: int = 4, **changes: Any) -> tables.Run:
    dataset = await builders.add_dataset(
        scene.database, [{"question": str(n)} for n in range(tasks)], name=ids.new_id("questions")
    )
    run = await builders.add_run(
        scene.database, dataset_id=dataset.id, config=changes.pop("config", document()), **changes
    )
    async with scene.database.session() as session:
        await session.delete(await session.get_one(tables.RunStatus, run.id))
    if version is not None:
        await builders.add_policy_version(scene.database, run, version)
    return run


async def test_a_run_goes_from_its_first_group_to_completed(scene: Scene) -> None:
    run = await add_run(scene)
    await scene.tick(2)
    assert await scene.phase(run) == ("running", None)
    assert [(group.id, group.admitted_version) for group in await scene.groups(run)] == [
        (f"{run.id}.{number}", 0) for number in range(4)
    ]
    assert await scene.queue.depth() == 8
    assert scene.trainers.wanted == {run.id: 0}

    await scene.finish_all(run)
    await scene.tick()
    assert {group.state for group in await scene.groups(run)} == {"complete"}
    assert {(row.state, row.attempt, row.reward, row.reason) for row in await scene.rollouts(run)} == {
        ("finished", 1, 1.0, "succeeded")
    }

    await scene.credit_and_train(run, 1)
    await scene.tick(2)
    assert scene.fleet.served is not None
    assert scene.fleet.served.version == 1
    await scene.credit_and_train(run, 2)
    await scene.tick(2)
    assert await scene.phase(run) == ("completed", None)
    assert len(await scene.groups(run)) == 4
    assert scene.trainers.wanted == {}
