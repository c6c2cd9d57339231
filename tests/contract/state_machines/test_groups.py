"""A group, its rollouts and its verdict, with two controllers and two workers of credit at once, against a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule
from sqlalchemy import select

from leyden.libs.contracts.states import GroupVerdict, RolloutState
from leyden.libs.store import samples, tables
from leyden.libs.store.runs.phases import cancel_open_work
from leyden.libs.store.runs.rollouts import Resolution, complete_groups, resolve_rollouts
from tests.support import builders
from tests.support.state_machines import StoreMachine, serial, walk

REASON = "the run was cancelled"


@dataclass(frozen=True)
class Model:
    """One group of two. Rollouts: state, reward and reason."""

    rollouts: tuple[tuple[str, float | None, str | None], ...] = (("queued", None, None),) * 2
    group: str = "open"
    credited: bool = False

    def resolve(self, which: int, state: str, reward: float | None, reason: str) -> tuple[Model, None]:
        if self.rollouts[which][0] != "queued":
            return self, None
        rollouts = list(self.rollouts)
        rollouts[which] = (state, reward, reason)
        return replace(self, rollouts=tuple(rollouts)), None

    def complete(self) -> tuple[Model, int]:
        done = self.group == "open" and all(rollout[0] != "queued" for rollout in self.rollouts)
        return (replace(self, group="complete"), 1) if done else (self, 0)

    def cancel(self) -> tuple[Model, None]:
        rollouts = tuple(("cancelled", None, REASON) if one[0] == "queued" else one for one in self.rollouts)
        return replace(self, rollouts=rollouts, group="cancelled" if self.group == "open" else self.group), None

    def credit(self) -> tuple[Model, int]:
        due = self.group == "complete" and not self.credited
        return (replace(self, credited=True), 1) if due else (self, 0)


Deed = tuple[Callable[[Model], tuple[Model, Any]], Callable[[], Any]]
"""What something does to the model, and the same on the store."""


class GroupMachine(StoreMachine):
    @initialize()
    def begin(self) -> None:
        self.open()
        self.model = Model()
        self.run = self.await_(builders.add_run(self.database))
        self.group, self.rollouts = self.await_(builders.add_group(self.database, self.run))

    which = st.integers(0, 1)
    ends = st.sampled_from([(RolloutState.FINISHED, 1.0, "succeeded"), (RolloutState.EXCLUDED, None, "infra_error")])

    def resolve(self, which: int, end: tuple[RolloutState, float | None, str]) -> Deed:
        state, reward, reason = end
        attempt = 1 if state is RolloutState.FINISHED else None
        resolution = Resolution(self.rollouts[which].id, state, attempt, reward, reason)

        async def work() -> None:
            async with self.database.session() as session:
                await resolve_rollouts(session, [resolution])

        return lambda model: model.resolve(which, str(state), reward, reason), work

    def complete(self) -> Deed:
        async def work() -> int:
            async with self.database.session() as session:
                return len(set(await complete_groups(session)) & {self.group.id})

        return Model.complete, work

    def cancel(self) -> Deed:
        async def work() -> None:
            async with self.database.session() as session:
                await cancel_open_work(session, [self.run.id], REASON)

        return Model.cancel, work

    def credit(self) -> Deed:
        """One transaction of a worker of credit; the verdict is on all that it could lock."""

        async def work() -> int:
            async with self.database.session() as session:
                claimed = await samples.claim_groups(session, 1000)
                locked = await samples.lock_pending(session, claimed)
                pending = await samples.pending_groups(session, list(locked))
                await samples.write_credit(session, [_verdict(group) for group in pending], [], [])
            return len({group.id for group in pending} & {self.group.id})

        return Model.credit, work

    def deed(self, name: str, which: int, end: tuple[RolloutState, float | None, str]) -> Deed:
        return self.resolve(which, end) if name == "resolve" else getattr(self, name)()

    names = st.sampled_from(["resolve", "resolve", "resolve", "complete", "complete", "credit", "credit", "cancel"])

    @rule(name=names, which=which, end=ends, dice=st.integers(1, 4))
    def alone(self, name: str, which: int, end: Any, dice: int) -> None:
        if name == "cancel" and dice > 1:
            return
        expect, work = self.deed(name, which, end)
        self.model, answer = expect(self.model)
        assert self.await_(work()) == answer

    @rule(first=names, second=names, which=st.tuples(which, which), ends=st.tuples(ends, ends), dice=st.integers(1, 4))
    def at_once(self, first: str, second: str, which: tuple[int, int], ends: Any, dice: int) -> None:
        if "cancel" in (first, second) and dice > 1:
            return
        one, other = self.deed(first, which[0], ends[0]), self.deed(second, which[1], ends[1])
        answers = self.both(one[1](), other[1]())
        seen = self.stored()
        orders = serial(self.model, one[0], other[0])
        assert (seen, answers) in orders
        self.model = seen

    @invariant()
    def the_store_is_the_model(self) -> None:
        if hasattr(self, "rollouts"):
            assert self.stored() == self.model

    def stored(self) -> Model:
        async def read() -> Model:
            async with self.database.read() as session:
                table = tables.Rollout
                query = select(table).where(table.group_id == self.group.id).order_by(table.sibling)
                rollouts = (await session.scalars(query)).all()
                group = await session.get_one(tables.Group, self.group.id)
                credit = await session.get(tables.GroupCredit, (self.group.id, self.group.run_id))
            return Model(
                tuple((one.state, one.reward, one.reason) for one in rollouts), group.state, credit is not None
            )

        return self.await_(read())


def _verdict(group: samples.PendingGroup) -> samples.NewGroupCredit:
    excluded = GroupVerdict.EXCLUDED
    return samples.NewGroupCredit(group.id, group.run_id, excluded, "a test", 1, 0, False, None, None, None)


def test_groups_follow_the_model_in_any_order_and_at_once(postgres_dsn: str) -> None:
    walk(GroupMachine, postgres_dsn, examples=20, steps=20)
