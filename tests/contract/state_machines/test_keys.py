"""Writes under a key, repeated in any order and at once, against a model: one key, one row.

Rewards of agents and spans count while the attempt runs; rewards of users and creations count at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule
from sqlalchemy import select

from leyden.libs.contracts.api.rollouts import RewardRequest
from leyden.libs.contracts.api.tokens import Token
from leyden.libs.contracts.states import OutcomeKind
from leyden.libs.queue import leases
from leyden.libs.store import access, tables
from leyden.libs.store.database import Session
from leyden.libs.store.read import views
from leyden.libs.store.records import spans
from leyden.services.api.creation import Create, create_once
from tests.support import builders, queues
from tests.support.state_machines import StoreMachine, serial, walk

RECORDED, CONFLICT, ENDED = "recorded", "conflict", "ended"
Values = Mapping[str, float]


@dataclass(frozen=True)
class Model:
    """Rewards by key of the agent (`rewards`) and of users (`people`); `tokens`: names; `created`: names by key."""

    running: bool = True
    rewards: Values = field(default_factory=dict)
    people: Values = field(default_factory=dict)
    spans: frozenset[str] = frozenset()
    created: Mapping[str, str] = field(default_factory=dict)
    tokens: tuple[str, ...] = ()

    def at_endpoint(self, key: str, value: float) -> tuple[Model, str]:
        if not self.running:
            return self, ENDED
        if self.rewards.get(key, value) != value:
            return self, CONFLICT
        return replace(self, rewards={**self.rewards, key: value}), RECORDED

    def by_people(self, key: str, value: float) -> tuple[Model, str]:
        if self.people.get(key, value) != value:
            return self, CONFLICT
        return replace(self, people={**self.people, key: value}), RECORDED

    def span(self, name: str) -> tuple[Model, str]:
        return (replace(self, spans=self.spans | {name}), RECORDED) if self.running else (self, ENDED)

    def settle(self) -> tuple[Model, bool]:
        return replace(self, running=False), self.running

    def create(self, key: str | None, name: str) -> tuple[Model, str]:
        if key is not None and key in self.created:
            return self, "replayed" if self.created[key] == name else CONFLICT
        created = self.created if key is None else {**self.created, key: name}
        return replace(self, created=created, tokens=tuple(sorted([*self.tokens, name]))), "made"


Deed = tuple[Callable[[Model], tuple[Model, Any]], Callable[[], Any]]


class KeyMachine(StoreMachine):
    @initialize()
    def begin(self) -> None:
        self.open()
        self.model = Model()
        run = self.await_(builders.add_run(self.database))
        _, [self.rollout, _] = self.await_(builders.add_group(self.database, run))
        self.caller = builders.ids.new_id("token")
        self.lease = self.await_(self._lease())

    async def _lease(self) -> leases.Lease:
        async with self.database.session() as session:
            lease = await queues.lease_rollout(session, self.rollout.id, "test", 600.0)
        assert lease is not None
        return lease

    def at_endpoint(self, given: tuple[str, float]) -> Deed:
        key, value = given
        reward = spans.NewReward(
            self.rollout.id, 1, key, self.rollout.run_id, spans.ENDPOINT, "reward", value, None, None
        )
        return lambda model: model.at_endpoint(key, value), lambda: self._telemetry([], [reward])

    def span(self, name: str) -> Deed:
        span = spans.NewSpan(
            *(self.rollout.run_id, self.rollout.id, 1, "a" * 32, name, None, "look", "tool", None, "ok", None, None),
            *(None, 1, 2, None, "{}"),
        )
        return lambda model: model.span(name), lambda: self._telemetry([span], [])

    async def _telemetry(self, found: list[spans.NewSpan], rewards: list[spans.NewReward]) -> str:
        try:
            await spans.write_telemetry(self.database, found, rewards)
        except spans.AttemptEnded:
            return ENDED
        except spans.RewardConflict:
            return CONFLICT
        return RECORDED

    def by_people(self, given: tuple[str, float]) -> Deed:
        key, value = given

        async def work() -> str:
            try:
                async with self.database.session() as session:
                    request = RewardRequest(key=key, value=value)
                    await views.add_external_reward(session, self.rollout.id, request)
            except views.RewardConflict:
                return CONFLICT
            return RECORDED

        return lambda model: model.by_people(key, value), work

    def settle(self, _: object) -> Deed:
        async def work() -> bool:
            async with self.database.session() as session:
                return await queues.settle(session, self.lease, leases.Outcome(OutcomeKind.SUCCEEDED, 1.0))

        return Model.settle, work

    @property
    def request(self) -> Any:
        """A request of this machine's caller, as much of one as the entry in the audit needs."""
        return SimpleNamespace(
            app=SimpleNamespace(state=SimpleNamespace(database=self.database)),
            state=SimpleNamespace(caller=SimpleNamespace(token_id=self.caller, name=self.caller)),
            path_params={},
            scope={"route": SimpleNamespace(name="create_token")},
        )

    def create(self, given: tuple[str | None, str]) -> Deed:
        key, name = given

        async def work() -> str:
            async def make(session: Session) -> tuple[Token, bool]:
                token = builders.ids.new_id("token")
                return await access.add_token(session, token, f"{self.caller} {name}", token, ["read"]), True

            try:
                answer = await create_once(self.request, Create(self.caller, key, name.encode()), make)
            except access.KeyReused:
                return CONFLICT
            return "replayed" if "idempotency-replayed" in answer.headers else "made"

        return lambda model: model.create(key, name), work

    given = st.tuples(st.sampled_from("ab"), st.sampled_from([0.0, 1.0]))
    deeds = st.one_of(
        st.tuples(st.sampled_from(["at_endpoint", "by_people"]), given),
        st.tuples(st.just("span"), st.sampled_from(["1" * 16, "2" * 16])),
        st.tuples(st.just("create"), st.tuples(st.sampled_from(["a", "b", None]), st.sampled_from("xy"))),
    )
    ending = st.tuples(st.just("settle"), st.none())

    def deed(self, named: tuple[str, Any]) -> Deed:
        found: Deed = getattr(self, named[0])(named[1])
        return found

    @rule(named=deeds | deeds | deeds | ending)
    def alone(self, named: tuple[str, Any]) -> None:
        expect, work = self.deed(named)
        self.model, answer = expect(self.model)
        assert self.await_(work()) == answer

    @rule(first=deeds, second=deeds | deeds | deeds | ending)
    def at_once(self, first: tuple[str, Any], second: tuple[str, Any]) -> None:
        one, other = self.deed(first), self.deed(second)
        answers = self.both(one[1](), other[1]())
        seen = self.stored()
        assert (seen, answers) in [
            (replace(end, created={}), answer) for end, answer in serial(self.model, one[0], other[0])
        ]
        self.model = next(
            end
            for end, answer in serial(self.model, one[0], other[0])
            if (replace(end, created={}), answer) == (seen, answers)
        )

    @rule(named=deeds)
    def twice_at_once(self, named: tuple[str, Any]) -> None:
        self.at_once(named, named)

    @invariant()
    def the_store_is_the_model(self) -> None:
        if hasattr(self, "lease"):
            assert self.stored() == replace(self.model, created={})

    def stored(self) -> Model:
        async def read() -> Model:
            async with self.database.read() as session:

                async def rows(table: Any) -> Any:
                    return (await session.scalars(select(table).where(table.rollout_id == self.rollout.id))).all()

                attempt = await session.get_one(tables.Attempt, (self.rollout.id, 1))
                mine = tables.ApiToken.name.startswith(self.caller)
                tokens = await session.scalars(select(tables.ApiToken.name).where(mine))
                return Model(
                    running=attempt.state == "leased",
                    rewards={row.key: row.value for row in await rows(tables.Reward)},
                    people={row.key: row.value for row in await rows(tables.ExternalReward)},
                    spans=frozenset(row.span_id for row in await rows(tables.Span)),
                    tokens=tuple(sorted(name.rpartition(" ")[2] for name in tokens)),
                )

        return self.await_(read())


def test_keys_follow_the_model_in_any_order_and_at_once(postgres_dsn: str) -> None:
    walk(KeyMachine, postgres_dsn, examples=15, steps=20)
