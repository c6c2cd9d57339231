"""Leases of clients: one request, one attempt, and never a rollout that a runner has."""

from __future__ import annotations

import asyncio

from leyden.libs.contracts.states import OutcomeKind
from leyden.libs.queue import external, leases
from leyden.libs.queue.leases import Lease, Outcome
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from tests.support import builders


async def waiting_run(database: Database, size: int = 2) -> tuple[tables.Run, list[tables.Rollout]]:
    document = {**builders.run_document(), "runner": {"type": "external"}, "agent": {}}
    run = await builders.add_run(database, config=document)
    return run, (await builders.add_group(database, run, size=size))[1]


async def lease(database: Database, run: tables.Run, owner: str) -> tuple[Lease | None, bool]:
    async with database.session() as session:
        return await external.lease_next(session, run.id, owner, 30.0)


async def test_a_repeat_gets_the_attempt_that_its_owner_has(database: Database) -> None:
    run, rollouts = await waiting_run(database)
    (first, is_new), (again, is_repeat_new), (other, _) = [await lease(database, run, name) for name in "aab"]
    assert first is not None and again is not None and other is not None
    assert (first.lease_id, is_new, is_repeat_new) == (again.lease_id, True, False)
    assert {first.rollout_id, other.rollout_id} == {rollout.id for rollout in rollouts}
    assert first.agent.command == [] and first.runner.type == "external"
    assert await lease(database, run, "c") == (None, False)
    async with database.session() as session:
        held = await external.read_demand(session, run.id, "a")
        idle = await external.read_demand(session, run.id, "c")
        assert await external.read_demand(session, "run-none", "a") is None
    assert held == external.Demand("external", [], has_ended=False, is_due=False, is_held=True)
    assert idle == external.Demand("external", [], has_ended=False, is_due=False, is_held=False)


async def test_requests_at_once_with_one_owner_get_one_attempt_and_others_another(database: Database) -> None:
    run, _ = await waiting_run(database, 3)
    leased = await asyncio.gather(*(lease(database, run, owner) for owner in ("a", "a", "a", "b")))
    ids = {found.lease_id for found, _ in leased if found is not None}
    assert len(ids) == 2 and sum(is_new for _, is_new in leased) == 2


async def test_an_owner_that_plays_two_agents_has_an_attempt_of_each(database: Database) -> None:
    document = {**builders.run_document(), "runner": {"type": "external"}}
    del document["agent"]
    run = await builders.add_run(database, config={**document, "agents": [{"name": "a"}, {"name": "b"}]})
    for number, agent in enumerate("ab"):
        await builders.add_group(database, run, number, agent=agent)
    found = dict[str, list[Lease | None]]()
    for agent in "abab":
        async with database.session() as session:
            asked = await external.read_demand(session, run.id, "one/key", agent)
            assert asked is not None and asked.is_held is (agent in found)
            leased, _ = await external.lease_next(session, run.id, "one/key", 30.0, agent)
            found.setdefault(agent, []).append(leased)
    first, again = found["a"], found["b"]
    assert [one and one.agent_name for one in (*first, *again)] == ["a", "a", "b", "b"]
    assert len({one.lease_id for one in (*first, *again) if one is not None}) == 2


async def test_rollouts_of_runners_are_not_leased(database: Database) -> None:
    run = await builders.add_run(database)
    await builders.add_group(database, run)
    assert await lease(database, run, "a") == (None, False)


async def test_the_status_of_an_attempt_follows_its_life(database: Database) -> None:
    run, _ = await waiting_run(database)
    leased, _ = await lease(database, run, "a")
    assert leased is not None
    outcome = Outcome(OutcomeKind.SUCCEEDED, 1.5, {"n": float("nan"), "turns": 3}, stdout_tail="4\x00")
    async with database.session() as session:
        before = await external.lock_attempt(session, run.id, leased.lease_id)
        await leases.start_all(session, [leased])
        await leases.settle_all(session, [(leased, outcome)])
        after = await external.lock_attempt(session, run.id, leased.lease_id)
        assert await external.lock_attempt(session, "run-none", leased.lease_id) is None
    assert before is not None and after is not None and after.outcome is not None
    assert (before.is_live, before.is_wanted, before.seconds, before.outcome) == (True, True, 0.0, None)
    assert (after.is_live, after.lease.attempt) == (False, 1)
    assert external.is_same_end(after.outcome, leased, outcome)
    assert not external.is_same_end(after.outcome, leased, Outcome(OutcomeKind.SUCCEEDED, 1.0, outcome.facts))
