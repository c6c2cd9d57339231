"""The controller process, killed where it stops a training early, replaces groups without variance, loads adapters."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import func, select, update

from leyden.libs.faults import FaultInjector
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.libs.store.engines import serving_engines
from tests.contract.controller.test_leader import start
from tests.fakes.scripted_engine import ScriptedEngine, running
from tests.support import builders
from tests.support.waiting import eventually

POINTS = ("controller.training_stopped", "controller.adapter_loaded", "controller.groups_completed")


class Case:
    """A run, and controller processes that find it."""

    def __init__(self, database: Database, redis_url: str, engine_url: str, folder: Path) -> None:
        self.database, self.injector = database, FaultInjector(folder / "faults")
        self._start = (database.dsn, redis_url, engine_url, folder)
        self.settings: dict[str, str] = {}
        self.credit: dict[str, Any] = {}

    async def open(self, training: Mapping[str, object], **sampling: object) -> None:
        config = builders.run_document(
            sampling={"group_size": 2, "groups_per_step": 2, "max_policy_lag": 0, **sampling},
            training=training,
            credit=self.credit,
        )
        self.run = await builders.add_run(self.database, config=config)
        await builders.add_policy_version(self.database, self.run, 0)

    async def killed_at(self, point: str) -> None:
        self.injector.arm(point)
        async with self.controller() as process, asyncio.timeout(120):
            assert await process.wait() == -signal.SIGKILL
        assert self.injector.fired(point, 0.0)

    @asynccontextmanager
    async def controller(self) -> AsyncIterator[asyncio.subprocess.Process]:
        process = await start(*self._start, **self.injector.environment, **self.settings)
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def served(self) -> set[tuple[str, int | None, str | None]]:
        async with self.database.read() as session:
            return {(one.run_id, one.policy_version, one.adapter) for one in await serving_engines(session)}

    async def complete_group(self, number: int, reward: float = 1.0, *, has_variance: bool = True) -> None:
        group, rollouts = await builders.add_group(self.database, self.run, number)
        for rollout in rollouts:
            await builders.finish_rollout(self.database, rollout, reward=reward)
        async with self.database.session() as session:
            ended = {"state": "complete", "finished_at": func.now()}
            await session.execute(update(tables.Group).where(tables.Group.id == group.id).values(**ended))
        await builders.add_credited_group(self.database, group, has_variance=has_variance)

    async def end_group(self, number: int, reward: float) -> None:
        """A group that waits for its judgement: one attempt has a reward, the other crashed."""
        _, rollouts = await builders.add_group(self.database, self.run, number)
        ended = datetime.now(UTC) - timedelta(minutes=5)
        for rollout, kind in zip(rollouts, ("succeeded", "agent_error"), strict=True):
            times = {"started_at": ended - timedelta(seconds=9), "finished_at": ended}
            await builders.add_attempt(self.database, rollout, state="settled", **times)
            given = reward if kind == "succeeded" else None
            await builders.add_outcome(self.database, rollout, kind=kind, reward=given)

    async def rewards(self) -> dict[int, list[float | None]]:
        async with self.database.read() as session:
            table, found = tables.Rollout, dict[int, list[float | None]]()
            query = select(tables.Group.number, table.reward).join(tables.Group, tables.Group.id == table.group_id)
            for number, reward in await session.execute(query.order_by(tables.Group.number, table.sibling)):
                found.setdefault(number, []).append(reward)
            return found

    async def groups(self) -> dict[int, str]:
        async with self.database.read() as session:
            table = tables.Group
            query = select(table.number, table.state).where(table.run_id == self.run.id).order_by(table.number)
            return {row.number: row.state for row in await session.execute(query)}

    async def phase(self) -> tuple[str, str | None]:
        async with self.database.read() as session:
            row = await session.get_one(tables.RunStatus, self.run.id)
            return row.phase, row.reason


async def test_a_run_whose_early_end_was_not_committed_ends_once_with_the_same_reason(
    database: Database, redis_url: str, tmp_path: Path
) -> None:
    async with running(ScriptedEngine()) as engine:
        case = Case(database, redis_url, engine.url, tmp_path)
        await case.open({"steps": 9, "early_stopping": {"metric": "train_reward", "target": 0.9}})
        for number in (0, 1):
            await case.complete_group(number)
        step: dict[str, Any] = {"metrics": {}, "checkpoint": "c", "started_at": datetime.now(tz=UTC)}
        async with database.session() as session:
            session.add(tables.Step(run_id=case.run.id, number=1, **step))
            await session.flush()
            for number in (0, 1):
                group = f"{case.run.id}.{number}"
                session.add(tables.StepGroup(group_id=group, run_id=case.run.id, step=1, verdict="trained"))
        await builders.add_policy_version(database, case.run, 1)
        await builders.add_group(database, case.run, 2, admitted_version=1)

        await case.killed_at("controller.training_stopped")
        assert (await case.groups(), await case.phase()) == (
            {0: "complete", 1: "complete", 2: "open"},
            ("running", None),
        )
        async with case.controller():
            await eventually(lambda: _is(case, "completed"))
        assert await case.groups() == {0: "complete", 1: "complete", 2: "cancelled"}
        reason = "stopped early at step 1: the train reward 1 reached the target 0.9"
        assert await case.phase() == ("completed", reason)


async def test_a_group_without_variance_is_replaced_once_by_a_controller_that_is_killed(
    database: Database, redis_url: str, tmp_path: Path
) -> None:
    async with running(ScriptedEngine()) as engine:
        case = Case(database, redis_url, engine.url, tmp_path)
        await case.open({"steps": 1}, refill_zero_variance=1)
        await case.complete_group(0, has_variance=False)
        await case.complete_group(1)
        before = {0: "complete", 1: "complete"}
        await case.killed_at("controller.groups_written")
        assert await case.groups() == before
        await case.killed_at("controller.admitted")
        assert await case.groups() == {**before, 2: "open"}
        # The rollouts that were not enqueued are; no further group is admitted.
        await case.killed_at("controller.enqueued")
        assert await case.groups() == {**before, 2: "open"}


async def test_a_failures_reward_is_decided_once_with_the_end_of_its_group(
    database: Database, redis_url: str, tmp_path: Path
) -> None:
    async with running(ScriptedEngine()) as engine:
        case = Case(database, redis_url, engine.url, tmp_path)
        await case.open({"steps": 9})
        await case.end_group(0, -2.0)
        await case.killed_at("controller.groups_completed")
        assert (await case.rewards(), await case.groups()) == ({0: [None, None]}, {0: "open"})
        await case.killed_at("controller.committed")
        assert (await case.rewards(), await case.groups()) == ({0: [-2.0, -2.0]}, {0: "complete"})
        # A later group with a smaller reward changes no decision.
        await case.end_group(1, -3.0)
        async with case.controller():
            await eventually(lambda: _all_complete(case))
        assert await case.rewards() == {0: [-2.0, -2.0], 1: [-3.0, -3.0]}


async def _all_complete(case: Case) -> bool:
    return set((await case.groups()).values()) == {"complete"}


async def _is(case: Case, phase: str) -> bool:
    return (await case.phase())[0] == phase


async def test_adapters_that_were_loaded_and_not_written_are_served_once_after_a_restart(
    database: Database, redis_url: str, tmp_path: Path
) -> None:
    async with running(ScriptedEngine()) as engine:
        case = Case(database, redis_url, engine.url, tmp_path)
        pool = {"engine_urls": [engine.url], "adapters": 2, "max_adapter_rank": 16}
        case.settings["CONTROLLER_POOLS"] = json.dumps({"default": pool})
        await case.open({"steps": 9, "lora": {"rank": 4}})
        first = case.run
        await builders.add_policy_version(database, first, 1)
        await case.open({"steps": 9, "lora": {"rank": 4}})
        await case.killed_at("controller.adapter_loaded")
        assert await case.served() == set()
        async with case.controller():
            expected = {(first.id, 1, f"{first.id}:1"), (case.run.id, 0, f"{case.run.id}:0")}

            async def is_served() -> bool:
                return await case.served() == expected

            await eventually(is_served)
        assert sum(line.startswith("load") for line in engine.journal) == len(engine.adapters) == 2


async def test_a_controller_killed_while_an_adapter_fails_to_load_leaves_the_version_before(
    database: Database, redis_url: str, tmp_path: Path
) -> None:
    async with running(ScriptedEngine()) as engine:
        case = Case(database, redis_url, engine.url, tmp_path)
        case.settings["CONTROLLER_POOLS"] = json.dumps({"default": {"engine_urls": [engine.url], "adapters": 2}})
        await case.open({"steps": 9, "lora": {"rank": 4}})
        await builders.add_policy_version(database, case.run, 1)
        one, two = (f"{case.run.id}:{version}" for version in (1, 2))

        async def serves(version: int) -> bool:
            return await case.served() == {(case.run.id, version, f"{case.run.id}:{version}")}

        async with case.controller():
            await eventually(lambda: serves(1))
            engine.bad_paths = {path.replace("/1/", "/2/") for path in engine.adapters.values()}
            await builders.add_policy_version(database, case.run, 2)
            await _loads(engine, two, 2)
            assert await serves(1)
        # It was killed.
        before = len(engine.journal)
        async with case.controller():
            await _loads(engine, two, 2, since=before)
            assert await serves(1) and set(engine.adapters) == {one}
            engine.bad_paths = set()
            await eventually(lambda: serves(2))
            assert set(engine.adapters) == {one, two}


async def _loads(engine: ScriptedEngine, name: str, count: int, since: int = 0) -> None:
    async def happened() -> bool:
        return sum(line.startswith(f"load {name} ") for line in engine.journal[since:]) >= count

    await eventually(happened)
