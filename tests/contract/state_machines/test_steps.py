"""Steps, policy versions and what they consume, with two trainers at once, against a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule
from sqlalchemy import select

from leyden.libs.store import tables, training
from leyden.libs.store.database import Refused
from tests.support import builders
from tests.support.state_machines import StoreMachine, serial, walk

REFUSED, DONE = "refused", "done"
GROUPS = 6


@dataclass(frozen=True)
class Model:
    """`versions`: number to whether its files are there; `verdicts`: group to its step and verdict."""

    versions: Mapping[int, bool] = field(default_factory=dict)
    verdicts: Mapping[int, tuple[int | None, str]] = field(default_factory=dict)

    def base(self) -> tuple[Model, str]:
        return (replace(self, versions={0: True} | dict(self.versions)), DONE)

    def commit(self, number: int, trained: frozenset[int], still: frozenset[int]) -> tuple[Model, str]:
        used = (trained | still) & self.verdicts.keys()
        if number != len(self.versions) or used:
            return self, REFUSED
        verdicts = dict.fromkeys(trained, (number, "trained")) | dict.fromkeys(still, (number, "no_variance"))
        return Model({**self.versions, number: True}, {**self.verdicts, **verdicts}), DONE

    def refuse(self, groups: frozenset[int]) -> tuple[Model, str]:
        return replace(self, verdicts=dict.fromkeys(groups, (None, "stale")) | dict(self.verdicts)), DONE

    def prune(self, before: int) -> tuple[Model, str]:
        return replace(self, versions={n: exists and not 1 <= n < before for n, exists in self.versions.items()}), DONE


Deed = tuple[Callable[[Model], tuple[Model, Any]], Callable[[], Any]]


class StepMachine(StoreMachine):
    @initialize()
    def begin(self) -> None:
        self.open()
        self.model = Model()
        self.run = self.await_(builders.add_run(self.database))
        self.groups: list[str] = []
        for number in range(GROUPS):
            group, [rollout, _] = self.await_(builders.add_group(self.database, self.run, number))
            self.await_(builders.add_sample(self.database, rollout))
            self.await_(builders.add_credited_group(self.database, group))
            self.groups.append(group.id)

    def base(self, _: object) -> Deed:
        async def work() -> str:
            async with self.database.session() as session:
                await training.add_base_version(session, self.run.id, training.Version(0, "base", "hash", 1), "base")
            return DONE

        return Model.base, work

    def commit(self, wanted: tuple[int, frozenset[int], frozenset[int]]) -> Deed:
        ahead, trained, still = wanted
        # Mostly the next step; sometimes one that was made, or one too far.
        number, still = max(1, len(self.model.versions) + ahead), still - trained
        record = training.StepRecord(
            run_id=self.run.id,
            number=number,
            metrics={},
            checkpoint="somewhere",
            started_at=datetime.now(tz=UTC),
            trained_groups=[self.groups[one] for one in sorted(trained)],
            zero_variance_groups=[self.groups[one] for one in sorted(still)],
            sample_ids=[f"{self.groups[one]}.0:0" for one in sorted(trained)],
            version=training.Version(number, f"path-{number}", "hash", 1),
        )

        async def work() -> str:
            try:
                async with self.database.session() as session:
                    await training.commit_step(session, record)
            except Refused:
                return REFUSED
            return DONE

        return lambda model: model.commit(number, trained, still), work

    def refuse(self, groups: frozenset[int]) -> Deed:
        async def work() -> str:
            async with self.database.session() as session:
                stale = [self.groups[one] for one in sorted(groups)]
                await training.refuse_stale_groups(session, self.run.id, stale)
            return DONE

        return lambda model: model.refuse(groups), work

    def prune(self, before: int) -> Deed:
        async def work() -> str:
            async with self.database.session() as session:
                await training.prune_versions(session, self.run.id, before)
            return DONE

        return lambda model: model.prune(before), work

    some = st.frozensets(st.integers(0, GROUPS - 1), max_size=2)
    committing = st.tuples(st.just("commit"), st.tuples(st.sampled_from([0, 0, 0, 0, -1, 1]), some, some))
    refusing = st.tuples(st.just("refuse"), st.frozensets(st.integers(0, GROUPS - 1), max_size=1))
    pruning = st.tuples(st.just("prune"), st.integers(0, 4))
    deeds = committing | committing | committing | st.tuples(st.just("base"), st.none()) | refusing | pruning

    def deed(self, named: tuple[str, Any]) -> Deed:
        found: Deed = getattr(self, named[0])(named[1])
        return found

    @rule(named=deeds)
    def alone(self, named: tuple[str, Any]) -> None:
        expect, work = self.deed(named)
        self.model, answer = expect(self.model)
        assert self.await_(work()) == answer

    @rule(first=deeds, second=deeds)
    def at_once(self, first: tuple[str, Any], second: tuple[str, Any]) -> None:
        one, other = self.deed(first), self.deed(second)
        answers = self.both(one[1](), other[1]())
        seen = self.stored()
        assert (seen, answers) in serial(self.model, one[0], other[0])
        self.model = seen

    @invariant()
    def the_store_is_the_model(self) -> None:
        if len(getattr(self, "groups", ())) == GROUPS:
            assert self.stored() == self.model

    def stored(self) -> Model:
        async def read() -> Model:
            async with self.database.read() as session:

                async def rows(table: Any) -> Any:
                    return (await session.scalars(select(table).where(table.run_id == self.run.id))).all()

                versions = {row.version: row.pruned_at is None for row in await rows(tables.PolicyVersion)}
                verdicts = {row.group_id: (row.step, row.verdict) for row in await rows(tables.StepGroup)}
                samples = {row.sample_id: row.step for row in await rows(tables.StepSample)}
                steps = {row.number for row in await rows(tables.Step)}
            # A step is there with its version, and the samples of what it trained, or not at all.
            assert steps == set(versions) - {0}
            trained = {group: step for group, (step, verdict) in verdicts.items() if verdict == "trained"}
            assert samples == {f"{group}.0:0": step for group, step in trained.items()}
            return Model(versions, {self.groups.index(group): verdict for group, verdict in verdicts.items()})

        return self.await_(read())


def test_steps_follow_the_model_in_any_order_and_at_once(postgres_dsn: str) -> None:
    walk(StepMachine, postgres_dsn, examples=25, steps=15)
