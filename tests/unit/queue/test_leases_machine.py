"""Any order of leasing, settling, dying and cancelling, against a model in a few lines of Python."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from sqlalchemy import select, text

from leyden.libs.contracts.states import OutcomeKind
from leyden.libs.queue import leases
from leyden.libs.queue.leases import Lease, Outcome
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.libs.store.runs.rollouts import excuse_attempts
from tests.support import builders, queues


@dataclass
class Model:
    """What must be true of one rollout."""

    state: str = "queued"
    attempts: list[str] = field(default_factory=list)
    """States; a settled one is its outcome's kind."""
    overdue: bool = False
    excused: int = 0

    @property
    def live(self) -> bool:
        return bool(self.attempts) and self.attempts[-1] in {"leased", "running"}

    @property
    def may_run(self) -> bool:
        return self.state == "queued" and len(self.attempts) == self.excused


class LeaseMachine(RuleBasedStateMachine):
    dsn: ClassVar[str]
    rollouts = st.integers(0, 1)

    @initialize()
    def begin(self) -> None:
        self.runner = asyncio.Runner()
        self.database = Database(self.dsn, pool_size=1)
        self.models = [Model(), Model()]
        self.intent = "running"
        self.leases: list[tuple[int, int, Lease]] = []
        self.run = self.await_(builders.add_run(self.database))
        _, self.rows = self.await_(builders.add_group(self.database, self.run))

    def await_(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            self.await_(self.database.close())
            self.runner.close()

    @rule(which=rollouts)
    def lease(self, which: int) -> None:
        model = self.models[which]
        got = self.await_(self._lease(self.rows[which].id))
        if self.intent == "running" and model.may_run:
            model.attempts.append("leased")
            model.overdue = False
            assert got.attempt == len(model.attempts)
            self.leases.append((which, got.attempt, got))
        else:
            assert got is None

    async def _lease(self, rollout_id: str) -> Lease | None:
        async with self.database.session() as session:
            return await queues.lease_rollout(session, rollout_id, "runner", 60)

    def holds(self, which: int, attempt: int) -> bool:
        model = self.models[which]
        return model.live and len(model.attempts) == attempt

    @rule(data=st.data(), kind=st.sampled_from(list(OutcomeKind)))
    def settle(self, data: st.DataObject, kind: OutcomeKind) -> None:
        if not self.leases:
            return
        which, attempt, lease = data.draw(st.sampled_from(self.leases))

        async def settle() -> bool:
            async with self.database.session() as session:
                return await queues.settle(session, lease, Outcome(kind))

        is_live = self.holds(which, attempt)
        assert self.await_(settle()) is is_live
        if is_live:
            self.models[which].attempts[-1] = kind

    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        if not self.leases:
            return
        which, attempt, lease = data.draw(st.sampled_from(self.leases))

        async def start() -> bool:
            async with self.database.session() as session:
                return bool(await leases.start_all(session, [lease]))

        is_live = self.holds(which, attempt)
        assert self.await_(start()) is is_live
        if is_live:
            self.models[which].attempts[-1] = "running"

    @rule()
    def heartbeat(self) -> None:
        async def heartbeat() -> set[str]:
            async with self.database.session() as session:
                return await leases.heartbeat_all(session, [lease.lease_id for *_, lease in self.leases], 60)

        going = [
            (which, lease.lease_id)
            for which, attempt, lease in self.leases
            if self.holds(which, attempt) and self.models[which].state == "queued" and self.intent != "cancelled"
        ]
        assert self.await_(heartbeat()) == {lease_id for _, lease_id in going}
        for which, _ in going:
            self.models[which].overdue = False

    @rule(which=rollouts)
    def let_time_pass(self, which: int) -> None:
        self.models[which].overdue = True
        statement = "UPDATE attempts SET lease_expires_at = now() - interval '1 s' WHERE rollout_id = :id"
        self.execute(statement, id=self.rows[which].id)

    @rule()
    def expire_overdue(self) -> None:
        async def expire() -> set[tuple[str, int]]:
            async with self.database.session() as session:
                expired = await leases.expire_overdue(session)
            # Earlier examples of the same test may have left overdue leases of other runs.
            return {(one.rollout_id, one.attempt) for one in expired if one.run_id == self.run.id}

        overdue = [which for which, model in enumerate(self.models) if model.live and model.overdue]
        assert self.await_(expire()) == {(self.rows[which].id, len(self.models[which].attempts)) for which in overdue}
        for which in overdue:
            self.models[which].attempts[-1] = "expired"

    @rule(which=rollouts)
    def excuse(self, which: int) -> None:
        model = self.models[which]
        if model.live or model.state != "queued":
            return
        model.excused = len(model.attempts)

        async def excuse() -> None:
            async with self.database.session() as session:
                rollout = self.rows[which].id
                await excuse_attempts(session, {rollout: model.excused}, {rollout: 0.0})

        self.await_(excuse())

    # Rarely, since nothing happens to a rollout afterwards.
    @rule(which=rollouts, dice=st.integers(1, 6))
    def cancel_rollout(self, which: int, dice: int) -> None:
        if dice < 6:
            return
        self.models[which].state = "cancelled"
        self.execute("UPDATE rollouts SET state = 'cancelled' WHERE id = :id", id=self.rows[which].id)

    @rule(intent=st.sampled_from(["running", "running", "running", "running", "paused", "cancelled"]))
    def change_intent(self, intent: str) -> None:
        self.intent = intent
        self.execute("UPDATE runs SET intent = :intent WHERE id = :id", intent=intent, id=self.run.id)

    def execute(self, statement: str, **parameters: str) -> None:
        async def execute() -> None:
            async with self.database.session() as session:
                await session.execute(text(statement), parameters)

        self.await_(execute())

    @invariant()
    def the_rows_are_those_of_the_model(self) -> None:
        if not hasattr(self, "rows"):
            return

        async def rows() -> tuple[dict[tuple[str, int], str], list[str]]:
            async with self.database.read() as session:
                attempts = await session.scalars(select(tables.Attempt).where(tables.Attempt.run_id == self.run.id))
                outcomes = await session.scalars(select(tables.Outcome).where(tables.Outcome.run_id == self.run.id))
                kinds = {(row.rollout_id, row.attempt): row.kind for row in outcomes}
                found = {(row.rollout_id, row.number): row.state for row in attempts}
                assert {key for key, state in found.items() if state == "settled"} == set(kinds)
                mine = {row.id for row in self.rows}
                return found | kinds, [one for one in await leases.deliverable_rollouts(session) if one in mine]

        states, deliverable = self.await_(rows())
        assert states == {
            (self.rows[which].id, number): state
            for which, model in enumerate(self.models)
            for number, state in enumerate(model.attempts, 1)
        }
        runnable = [self.rows[which].id for which, model in enumerate(self.models) if model.may_run]
        assert sorted(deliverable) == (runnable if self.intent == "running" else [])


def test_leases_follow_the_model_in_any_order(postgres_dsn: str) -> None:
    LeaseMachine.dsn = postgres_dsn
    run_state_machine_as_test(
        LeaseMachine,
        settings=settings(
            max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
