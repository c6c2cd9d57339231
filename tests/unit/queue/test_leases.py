from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from sqlalchemy import select, text, update

from leyden.libs.contracts.states import OutcomeKind
from leyden.libs.queue import leases
from leyden.libs.queue.leases import Lease, Outcome
from leyden.libs.store import tables
from leyden.libs.store.attempts import AttemptKey
from leyden.libs.store.database import Database
from leyden.libs.store.runs.rollouts import excuse_attempts, queued_rollouts
from tests.support import builders, queues

SUCCESS = Outcome(OutcomeKind.SUCCEEDED, reward=1.0, exit_code=0)
IMAGE = {"type": "kubernetes", "image": "agents:1"}
INFRA = Outcome(OutcomeKind.INFRA_ERROR)


@pytest.fixture
async def rollout(database: Database) -> tables.Rollout:
    run = await builders.add_run(database)
    _, rollouts = await builders.add_group(database, run)
    return rollouts[0]


async def lease(database: Database, rollout: tables.Rollout, owner: str = "runner-a") -> Lease | None:
    async with database.session() as session:
        return await queues.lease_rollout(session, rollout.id, owner, 60)


async def lease_of(database: Database, rollout: tables.Rollout, owner: str = "runner-a") -> Lease:
    got = await lease(database, rollout, owner)
    assert got is not None
    return got


async def settle(database: Database, got: Lease, outcome: Outcome = SUCCESS) -> bool:
    async with database.session() as session:
        return await queues.settle(session, got, outcome)


async def test_a_document_that_does_not_parse_ends_its_own_attempts_alone(database: Database) -> None:
    runs = [await builders.add_run(database) for _ in range(4)]
    first, second, third, good = [(await builders.add_group(database, run))[1][0] for run in runs]
    parts = ({"agent": {"command": "not a list"}}, {"runner": {"type": "of another version"}}, ["no object"])
    for run, part in zip(runs, parts, strict=False):
        async with database.session() as session:
            changed = {**run.config, **part} if isinstance(part, dict) else part
            await session.execute(update(tables.Run).where(tables.Run.id == run.id).values(config=changed))
    async with database.session() as session:
        leased = await leases.lease_rollouts(session, [first.id, second.id, third.id, good.id], "runner-a", 60)
    assert [one.rollout_id for one in leased] == [good.id]
    async with database.session() as session:
        attempts = {one.rollout_id: one.state for one in await session.scalars(select(tables.Attempt))}
        outcomes = {one.rollout_id: one for one in await session.scalars(select(tables.Outcome))}
    assert attempts == {first.id: "settled", second.id: "settled", third.id: "settled", good.id: "leased"}
    reasons = {first: "agent.command: Input", second: "runner: Input", third: "it is no object but a list"}
    for rollout, reason in reasons.items():
        assert outcomes[rollout.id].kind == OutcomeKind.INFRA_ERROR
        assert outcomes[rollout.id].detail.startswith(f"the stored document does not parse: {reason}")


async def make_overdue(database: Database, got: Lease) -> None:
    async with database.session() as session:
        await session.execute(
            update(tables.Attempt)
            .where(tables.Attempt.lease_id == got.lease_id)
            .values(lease_expires_at=text("clock_timestamp() - interval '1 second'"))
        )


async def expire(database: Database, got: Lease) -> None:
    await make_overdue(database, got)
    async with database.session() as session:
        await leases.expire_overdue(session)


async def excuse(database: Database, rollout: tables.Rollout, attempt: int, rest: float = 0.0) -> None:
    async with database.session() as session:
        await excuse_attempts(session, {rollout.id: attempt}, {rollout.id: rest})


async def attempts(database: Database, rollout: tables.Rollout) -> list[tuple[int, str, str]]:
    async with database.read() as session:
        rows = await session.scalars(
            select(tables.Attempt).where(tables.Attempt.rollout_id == rollout.id).order_by(tables.Attempt.number)
        )
        return [(row.number, row.state, row.owner) for row in rows]


async def change(database: Database, table: Any, key: str, **values: Any) -> None:
    async with database.session() as session:
        row = await session.get_one(table, key)
        for name, value in values.items():
            setattr(row, name, value)


async def test_a_lease_carries_all_that_executing_needs(database: Database, rollout: tables.Rollout) -> None:
    got = await lease_of(database, rollout)
    assert (got.run_id, got.group_id, got.rollout_id, got.attempt) == (
        rollout.run_id,
        rollout.group_id,
        rollout.id,
        1,
    )
    assert got.task == {"question": "2+2"}
    assert got.task_number == 0
    assert got.agent.command == ["{python}", "/agents/agent.py"]
    assert got.runner.timeout_seconds == 300.0
    assert got.trace_parent is None


async def test_a_leased_rollout_is_not_leased_again(database: Database, rollout: tables.Rollout) -> None:
    await lease_of(database, rollout)
    assert await lease(database, rollout, "runner-b") is None
    assert await attempts(database, rollout) == [(1, "leased", "runner-a")]


async def test_many_rollouts_are_leased_together_in_the_requested_order(
    database: Database, rollout: tables.Rollout
) -> None:
    run = await builders.add_run(database)
    _, [busy, free] = await builders.add_group(database, run)
    await lease_of(database, busy)
    asked = [free.id, busy.id, rollout.id, free.id, "run-none.0.0"]
    async with database.session() as session:
        got = await leases.lease_rollouts(session, asked, "runner-b", 60)
    assert [(one.rollout_id, one.run_id, one.attempt) for one in got] == [
        (free.id, run.id, 1),
        (rollout.id, rollout.run_id, 1),
    ]
    assert len({one.lease_id for one in got}) == 2
    assert await settle(database, got[1]) is True


async def test_two_runners_with_the_same_many_rollouts_share_them(database: Database) -> None:
    run = await builders.add_run(database)
    _, rollouts = await builders.add_group(database, run, size=40)
    ids = [one.id for one in rollouts]

    async def lease_all(order: list[str]) -> list[Lease]:
        async with database.session() as session:
            return await leases.lease_rollouts(session, order, "runner", 60)

    shares = await asyncio.gather(lease_all(ids), lease_all(ids[::-1]), lease_all(ids))
    assert sorted(one.rollout_id for share in shares for one in share) == sorted(ids)


async def test_of_many_racing_runners_one_gets_the_lease(database: Database, rollout: tables.Rollout) -> None:
    got = await asyncio.gather(*(lease(database, rollout, f"runner-{n}") for n in range(8)))
    assert sum(one is not None for one in got) == 1
    assert len(await attempts(database, rollout)) == 1


async def test_one_of_several_callers_gets_an_expired_lease(database: Database, rollout: tables.Rollout) -> None:
    await expire(database, await lease_of(database, rollout))
    assert await lease(database, rollout) is None
    await excuse(database, rollout, 1)
    got = await asyncio.gather(*(lease(database, rollout, f"runner-{n}") for n in range(4)))
    assert [one.attempt for one in got if one is not None] == [2]
    assert [state for _, state, _ in await attempts(database, rollout)] == ["expired", "leased"]


async def test_settle_after_lease_expired_changes_nothing(database: Database, rollout: tables.Rollout) -> None:
    late = await lease_of(database, rollout)
    await expire(database, late)
    await excuse(database, rollout, 1)
    second = await lease_of(database, rollout, "runner-b")
    assert await settle(database, late) is False
    async with database.session() as session:
        assert await leases.start_all(session, [late]) == set()
        assert await leases.heartbeat_all(session, [late.lease_id], 60) == set()
        assert await session.get(tables.Outcome, (rollout.id, 1)) is None
    assert await settle(database, second) is True


async def test_settling_twice_writes_one_outcome(database: Database, rollout: tables.Rollout) -> None:
    got = await lease_of(database, rollout)
    assert await settle(database, got) is True
    assert await settle(database, got, Outcome(OutcomeKind.SUCCEEDED, reward=0.0)) is False
    async with database.read() as session:
        outcomes = (await session.scalars(select(tables.Outcome))).all()
    assert [(row.attempt, row.kind, row.reward) for row in outcomes] == [(1, "succeeded", 1.0)]


async def test_concurrent_settle_and_expiry_end_the_attempt_once(database: Database, rollout: tables.Rollout) -> None:
    got = await lease_of(database, rollout)
    await make_overdue(database, got)

    async def expire() -> bool:
        async with database.session() as session:
            return bool(await leases.expire_overdue(session))

    settled, expired = await asyncio.gather(settle(database, got), expire())
    assert settled != expired
    assert await attempts(database, rollout) == [(1, "settled" if settled else "expired", "runner-a")]


@pytest.mark.parametrize("kind", list(OutcomeKind))
async def test_a_rollout_runs_again_when_the_controller_excused_its_attempt(
    database: Database, rollout: tables.Rollout, kind: OutcomeKind
) -> None:
    await settle(database, await lease_of(database, rollout), Outcome(kind))
    assert await lease(database, rollout) is None
    await excuse(database, rollout, 1)
    again = await lease_of(database, rollout)
    assert (again.rollout_id, again.attempt) == (rollout.id, 2)
    await settle(database, again, Outcome(kind))
    assert await lease(database, rollout) is None


async def test_a_rollout_rests_until_it_is_due(database: Database, rollout: tables.Rollout) -> None:
    await settle(database, await lease_of(database, rollout), INFRA)
    await excuse(database, rollout, 1, rest=3600.0)
    assert await lease(database, rollout) is None
    async with database.read() as session:
        assert rollout.id not in await leases.deliverable_rollouts(session)
        assert [one.is_due for one in await queued_rollouts(session)] == [False, True]
    await excuse(database, rollout, 1)
    assert (await lease_of(database, rollout)).attempt == 2


async def test_a_finished_rollout_is_not_leased(database: Database, rollout: tables.Rollout) -> None:
    await change(database, tables.Rollout, rollout.id, state="cancelled")
    assert await lease(database, rollout) is None


@pytest.mark.parametrize("intent", ["paused", "cancelled"])
async def test_a_halted_run_leases_nothing(database: Database, rollout: tables.Rollout, intent: str) -> None:
    await change(database, tables.Run, rollout.run_id, intent=intent)
    assert await lease(database, rollout) is None


async def test_an_unknown_rollout_is_not_leased(database: Database) -> None:
    async with database.session() as session:
        assert await queues.lease_rollout(session, "run-none.0.0", "runner", 60) is None


async def test_heartbeat_renews_only_leases_that_may_continue(database: Database, rollout: tables.Rollout) -> None:
    run = await builders.add_run(database)
    _, others = await builders.add_group(database, run, size=3)
    going, lost, cancelled, paused = [await lease_of(database, each) for each in [rollout, *others]]
    await make_overdue(database, lost)
    async with database.session() as session:
        expired = await leases.expire_overdue(session)
    assert [(one.rollout_id, one.attempt, one.owner) for one in expired] == [(lost.rollout_id, 1, "runner-a")]
    await change(database, tables.Rollout, cancelled.rollout_id, state="cancelled")
    await change(database, tables.Run, run.id, intent="paused")
    async with database.session() as session:
        ids = [one.lease_id for one in (going, lost, cancelled, paused)]
        assert await leases.heartbeat_all(session, ids, 600) == {going.lease_id, paused.lease_id}
        row = await session.get_one(tables.Attempt, (rollout.id, 1))
        assert (row.lease_expires_at - going.expires_at).total_seconds() > 500


async def test_an_attempt_is_adopted_once_when_its_owner_has_missed_two_renewals(
    database: Database, rollout: tables.Rollout
) -> None:
    got = await lease_of(database, rollout)
    key = AttemptKey(rollout.id, got.attempt)

    async def adopt(owner: str) -> list[Lease]:
        async with database.session() as session:
            return await leases.adopt_silent(session, [key], owner, 60)

    async def expire_in(seconds: int) -> None:
        moment = text(f"clock_timestamp() + interval '{seconds} seconds'")
        this = update(tables.Attempt).where(tables.Attempt.rollout_id == rollout.id)
        async with database.session() as session:
            began = text("clock_timestamp() - interval '50 seconds'")
            await session.execute(this.values(state="running", started_at=began, lease_expires_at=moment))

    for seconds in (60, 25, -1):
        await expire_in(seconds)
        assert await adopt("runner-b") == []
    await expire_in(15)
    [adopted] = await adopt("runner-b")
    assert (adopted.rollout_id, adopted.attempt, adopted.task, adopted.adopted) == (*key, got.task, True)
    assert got.began_at is None and adopted.began_at is not None
    assert 50 <= time.monotonic() - adopted.began_at < 60
    assert await adopt("runner-c") == []
    assert await attempts(database, rollout) == [(1, "running", "runner-b")]
    assert not await settle(database, got)
    assert await settle(database, adopted)


async def test_start_marks_the_attempt_running_and_may_be_repeated(database: Database, rollout: tables.Rollout) -> None:
    got = await lease_of(database, rollout)
    async with database.session() as session:
        assert await leases.start_all(session, [got]) == {got.lease_id}
        assert await leases.start_all(session, [got]) == {got.lease_id}
    assert await attempts(database, rollout) == [(1, "running", "runner-a")]


async def test_deliverable_rollouts_are_those_that_would_be_leased(database: Database) -> None:
    run = await builders.add_run(database)
    _, [waiting, leased, retried, ended] = await builders.add_group(database, run, size=4)
    await lease_of(database, leased)
    await settle(database, await lease_of(database, retried), INFRA)
    await excuse(database, retried, 1)
    await settle(database, await lease_of(database, ended), SUCCESS)
    async with database.read() as session:
        assert await leases.deliverable_rollouts(session) == [waiting.id, retried.id]
        assert await leases.deliverable_rollouts(session, limit=1) == [waiting.id]


async def test_a_runner_gets_no_rollout_of_another_type(database: Database) -> None:
    config = builders.run_document(runner={"type": "kubernetes", "image": "agents:1"})
    _, [here] = await builders.add_group(database, await builders.add_run(database), size=1)
    _, [there] = await builders.add_group(database, await builders.add_run(database, config=config), size=1)
    async with database.session() as session:
        assert await leases.deliverable_rollouts(session, runner_types=["process"]) == [here.id]
        assert await leases.deliverable_rollouts(session, runner_types=["kubernetes"]) == [there.id]
        leased = await leases.lease_rollouts(session, [here.id, there.id], "runner-a", 30.0, ["kubernetes"])
        assert [one.rollout_id for one in leased] == [there.id]


async def test_a_lease_has_the_agent_of_its_group(database: Database) -> None:
    agents = [{"name": "plain", "command": ["a"]}, {"name": "image", "command": ["b"], "runner": IMAGE}]
    run = await builders.add_run(database, config=builders.run_document(agent=None, agents=agents))
    _, [here] = await builders.add_group(database, run, 0, size=1, agent="plain", runner_type="process")
    _, [there] = await builders.add_group(database, run, 1, size=1, agent="image", runner_type="kubernetes")
    async with database.session() as session:
        for kind, own in (("process", here), ("kubernetes", there)):
            assert await leases.deliverable_rollouts(session, runner_types=[kind]) == [own.id]
            [leased] = await leases.lease_rollouts(session, [here.id, there.id], "runner-a", 30.0, [kind])
            found = (leased.rollout_id, leased.agent_name, leased.agent.command, leased.runner.type)
            name, word = ("plain", "a") if own is here else ("image", "b")
            assert found == (own.id, name, [word], kind)


async def test_no_output_can_make_an_attempt_unsettlable(database: Database, rollout: tables.Rollout) -> None:
    outcome = Outcome(
        OutcomeKind.SUCCEEDED,
        reward=0.5,
        facts={"a\x00": ["\ud800", float("nan"), {"b": float("inf")}], "n": 10**40},
        detail="\x00",
        stdout_tail="x\x00y",
        stderr_tail="\udcff",
    )
    assert await settle(database, await lease_of(database, rollout), outcome) is True
    async with database.read() as session:
        row = await session.get_one(tables.Outcome, (rollout.id, 1))
    assert row.facts == {"a\ufffd": ["?", "nan", {"b": "inf"}], "n": 10**40}
    assert (row.detail, row.stdout_tail, row.stderr_tail) == ("\ufffd", "x\ufffdy", "?")


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_not_finite_is_refused(reward: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        Outcome(OutcomeKind.SUCCEEDED, reward=reward)
