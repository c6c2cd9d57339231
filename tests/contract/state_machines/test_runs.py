"""Intent and phase of a run, changed in any order and concurrently, against a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule
from sqlalchemy import func, select

from leyden.libs.contracts.api.runs import EvaluationRequest
from leyden.libs.contracts.states import RUN_TRANSITIONS, RunPhase
from leyden.libs.store import tables
from leyden.libs.store.database import Refused
from leyden.libs.store.runs import actions
from leyden.libs.store.runs.phases import Phase, write_phases
from tests.support import builders
from tests.support.state_machines import StoreMachine, serial, walk

REFUSED = "refused"
WANTED = {"pause": "paused", "resume": "running", "cancel": "cancelled"}


@dataclass(frozen=True)
class Model:
    intent: str = "running"
    phase: str = "running"
    evaluations: int = 0

    def ask(self, action: str) -> tuple[Model, str]:
        """What is wanted afterwards; asking for what is wanted already is never refused while it may still come."""
        wanted = WANTED[action]
        if self.phase == "completed" or (self.phase == "failed" and action != "cancel"):
            return self, REFUSED
        if "cancelled" in (self.intent, self.phase) and self.intent != wanted:
            return self, REFUSED
        return replace(self, intent=wanted), wanted

    def move(self, phase: str) -> tuple[Model, str]:
        if phase != self.phase and RunPhase(phase) not in RUN_TRANSITIONS[RunPhase(self.phase)]:
            return self, REFUSED
        return replace(self, phase=phase), phase

    def evaluate(self) -> tuple[Model, int | str]:
        if self.intent == "cancelled" or self.phase in {"failed", "cancelled"}:
            return self, REFUSED
        return replace(self, evaluations=self.evaluations + 1), self.evaluations + 1


Deed = tuple[Callable[[Model], tuple[Model, Any]], Callable[[], Any]]


class RunMachine(StoreMachine):
    @initialize()
    def begin(self) -> None:
        self.open()
        self.model = Model()
        dataset = self.await_(builders.add_dataset(self.database, name=builders.ids.new_id("questions")))
        document = builders.run_document(dataset=dataset.name)
        self.run = self.await_(builders.add_run(self.database, dataset_id=dataset.id, config=document))

    def ask(self, action: str) -> Deed:
        async def work() -> str:
            try:
                async with self.database.session() as session:
                    return str((await actions.change_intent(session, self.run.id, action))[0].intent)
            except actions.ActionRefused:
                return REFUSED

        return lambda model: model.ask(action), work

    def move(self, phase: str) -> Deed:
        async def work() -> str:
            try:
                async with self.database.session() as session:
                    await write_phases(session, [Phase(self.run.id, RunPhase(phase), None)])
            except Refused:
                return REFUSED
            return phase

        return lambda model: model.move(phase), work

    def evaluate(self, _: object) -> Deed:
        async def work() -> int | str:
            try:
                async with self.database.session() as session:
                    asked = EvaluationRequest(dataset=self.run.dataset_id)
                    made = await actions.create_evaluation(session, self.run.id, asked)
            except actions.ActionRefused:
                return REFUSED
            return int(made.removeprefix(f"{self.run.id}.e"))

        return Model.evaluate, work

    # What ends a walk comes seldom, except where a failed or completed run is asked for more.
    asking = st.tuples(st.just("ask"), st.sampled_from(["pause", "resume", "resume"] * 3 + ["cancel"]))
    moving = st.tuples(st.just("move"), st.sampled_from([*RunPhase, *["running", "paused", "evaluating"] * 2]).map(str))
    evaluating = st.tuples(st.just("evaluate"), st.none())
    deeds = asking | asking | moving | evaluating

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
        if hasattr(self, "run"):
            assert self.stored() == self.model

    def stored(self) -> Model:
        async def read() -> Model:
            async with self.database.read() as session:
                run = await session.get_one(tables.Run, self.run.id)
                status = await session.get_one(tables.RunStatus, self.run.id)
                table = tables.Evaluation
                count = await session.scalar(select(func.count()).where(table.run_id == self.run.id))
            return Model(run.intent, status.phase, count or 0)

        return self.await_(read())


def test_runs_follow_the_model_in_any_order_and_at_once(postgres_dsn: str) -> None:
    walk(RunMachine, postgres_dsn, examples=40, steps=15)
