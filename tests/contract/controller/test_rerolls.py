"""Re-rolls of baseline `monte_carlo`: the controller adds them once, the group waits for them, and divergence counts
as nothing."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from leyden.libs.contracts.states import DIVERGED
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.libs.store.read.groups import get_group
from leyden.libs.store.read.views import get_rollout
from leyden.services.credit.worker import credit_pending
from tests.contract.controller.test_kills import Case
from tests.contract.controller.test_store import Scene, add_run, document, scene
from tests.fakes.gateway import Scene as GatewayScene
from tests.fakes.gateway import scene as gateway_scene
from tests.fakes.scripted_engine import ScriptedEngine, running, say_by_request
from tests.support import builders
from tests.support.waiting import eventually

__all__ = ["scene"]
POINTS = ("controller.rerolls_added",)
CREDIT = {"rule": {"type": "identical"}, "baseline": {"type": "monte_carlo", "calls": 1, "samples": 2}}
SIBLINGS = 12
"""The size of a group in the gateway's scene."""
LONG_AGO = datetime.now(UTC) - timedelta(minutes=5)


async def play(database: Database, rollout: tables.Rollout, calls: int, reward: float | None, **outcome: Any) -> None:
    """An attempt that made so many calls and ended with a reward."""
    times = {"started_at": LONG_AGO - timedelta(seconds=9), "finished_at": LONG_AGO}
    for number in range(calls):
        await builders.add_call(database, rollout, [1, *[9, 2] * number], [9])
    await builders.add_attempt(database, rollout, state="settled", **times)
    await builders.add_outcome(database, rollout, reward=reward, **outcome)


async def open_group(scene: Scene) -> tuple[tables.Run, list[tables.Rollout]]:
    """A run with one group, whose siblings made 4 calls and 1 call and earned 1 and 0."""
    config = document(steps=1, groups_per_step=1, max_policy_lag=0) | {"credit": CREDIT}
    run = await add_run(scene, config=config)
    await scene.tick(2)
    siblings = await scene.rollouts(run)
    for rollout, calls, reward in zip(siblings, (4, 1), (1.0, 0.0), strict=True):
        await play(scene.database, rollout, calls, reward)
    return run, siblings


async def test_a_group_gets_its_rerolls_once_and_waits_for_them(scene: Scene) -> None:
    run, (first, second) = await open_group(scene)
    await scene.tick()
    await scene.another_controller().tick()
    (group,) = await scene.groups(run)
    assert (group.state, group.size) == ("open", 4)
    # One call of four leaves one state to measure; a rollout with one call has none.
    rows = sorted(await scene.rollouts(run), key=lambda one: one.sibling)
    assert [(row.rerolls_of, row.from_call, row.state) for row in rows] == [
        (None, None, "finished"),
        (None, None, "finished"),
        (first.id, 2, "queued"),
        (first.id, 2, "queued"),
    ]
    assert await credit_pending(scene.database, 8) == []

    for reroll, reward in zip(rows[2:], (0.5, 0.0), strict=True):
        await play(scene.database, reroll, 4, reward)
    await scene.tick()
    assert [group.state for group in await scene.groups(run)] == ["complete"]
    assert await credit_pending(scene.database, 8) == [group.id]
    # The start is worth 0, the sibling's outcome; the state before call 2 a quarter; the end 1.
    assert await advantages(scene.database, first) == [0.25, 0.25, 0.75, 0.75]
    assert await advantages(scene.database, second) == [-1.0]
    async with scene.database.read() as session:
        shown = await get_group(session, group.id, calls=9)
        seen = await get_rollout(session, rows[2].id)
        samples = set(await session.scalars(select(tables.Sample.rollout_id)))
    assert [one.id for one in shown.siblings] == [first.id, second.id]
    assert (seen.rerolls_of, seen.from_call, shown.reward_mean) == (first.id, 2, 0.5)
    assert samples == {first.id, second.id}


async def test_rerolls_that_diverge_are_excluded_and_counted(scene: Scene) -> None:
    """One sent another request, one ended before the sampled call: nothing measures the state. A try that failed before
    the next one was answered is no further request."""
    run, (first, _) = await open_group(scene)
    await scene.tick()
    *_, other, short = sorted(await scene.rollouts(run), key=lambda one: one.sibling)
    refused = {"status": "refused", "finish_reason": DIVERGED, "trainable": False, "answer": None}
    await builders.add_call(scene.database, other, **refused)
    await play(scene.database, other, 3, None, kind="agent_error")
    await builders.add_call(scene.database, short, [1], [9])
    await builders.add_call(scene.database, short, status="aborted", trainable=False, answer=None)
    await play(scene.database, short, 1, 1.0)
    await scene.tick()
    ends = {row.id: (row.state, row.reason) for row in await scene.rollouts(run)}
    assert ends[other.id] == ends[short.id] == ("excluded", DIVERGED)
    (group,) = await scene.groups(run)
    assert await credit_pending(scene.database, 8) == [group.id]
    assert await advantages(scene.database, first) == [1.0] * 4
    async with scene.database.read() as session:
        verdict = await session.get_one(tables.GroupCredit, (group.id, run.id))
    assert verdict.calls is not None
    assert (verdict.calls["states"], verdict.calls["unmeasured"], verdict.counted_siblings) == (1, 1, 2)


async def test_a_group_with_too_few_siblings_for_credit_gets_none(scene: Scene) -> None:
    config = document(steps=1, groups_per_step=1, max_policy_lag=0) | {"credit": CREDIT}
    config["sampling"] |= {"agent_failure": "exclude"}
    run = await add_run(scene, config=config)
    await scene.tick(2)
    first, failing = await scene.rollouts(run)
    await play(scene.database, first, 4, 1.0)
    await play(scene.database, failing, 4, None, kind="agent_error")
    await scene.tick()
    group, *_ = sorted(await scene.groups(run), key=lambda one: one.number)
    assert (group.state, group.size) == ("complete", 2)


async def test_an_agent_whose_first_call_decides_gets_credit_for_it_alone(
    scene: Scene, database: Database, tmp_path: Path
) -> None:
    """Gateway, controller and credit with an agent of three calls: the first letter that it hears is its reward."""
    credit = {**CREDIT, "baseline": {"type": "monte_carlo", "calls": 2, "samples": 1}}
    run = builders.run_document(credit=credit)
    async with gateway_scene(tmp_path, database, run=run, says=say_by_request(1)) as stage:
        played: set[str] = set()
        group = stage.rollout.group_id
        while (waiting := await queued(database, group, played)) is not None:
            for rollout in waiting:
                if rollout.rerolls_of is not None:
                    await builders.add_attempt(database, rollout)
                reward = await letters_reward(stage, rollout.id)
                await builders.end_attempt(database, rollout.id, state="settled")
                await builders.add_outcome(database, rollout, reward=reward)
                played.add(rollout.id)
            await scene.tick()
        assert await credit_pending(database, 8) == [group]
    assert len(played) == SIBLINGS * 3
    async with database.read() as session:
        rows = {row.id: row for row in await session.scalars(select(tables.Rollout))}
    siblings = {row.id: row.reward for row in rows.values() if row.rerolls_of is None}
    # Every state behind the first call has the value of its end.
    assert all(row.reward == siblings[row.rerolls_of] for row in rows.values() if row.rerolls_of is not None)
    for rollout, reward in siblings.items():
        others = (sum(siblings.values()) - reward) / (SIBLINGS - 1)
        expected = [pytest.approx(reward - others, abs=1e-9), 0.0, 0.0]
        assert await advantages(database, rows[rollout]) == expected


async def letters_reward(stage: GatewayScene, rollout_id: str) -> float:
    """Plays three calls; 1 where the first answer is an even letter."""
    messages: list[Any] = [{"role": "user", "content": "pick"}]
    async with stage.gateway.client(rollout_id) as client:
        for _ in range(3):
            answer = await client.chat.completions.create(model="m", messages=messages)
            said = answer.choices[0].message.content or ""
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "go on"}]
    return 1.0 - ord(messages[1]["content"][0]) % 2


async def queued(database: Database, group: str, played: set[str]) -> list[tables.Rollout] | None:
    """The rollouts of a group that have not played; None once it is complete."""
    async with database.read() as session:
        if (await session.get_one(tables.Group, group)).state == "complete":
            return None
        rows = (await session.scalars(select(tables.Rollout).where(tables.Rollout.group_id == group))).all()
        return [row for row in rows if row.id not in played]


async def test_a_controller_that_dies_while_it_adds_rerolls_adds_them_once(
    database: Database, redis_url: str, tmp_path: Path
) -> None:
    async with running(ScriptedEngine()) as engine:
        case = Case(database, redis_url, engine.url, tmp_path)
        case.credit = CREDIT
        await case.open({"steps": 9})
        group, rollouts = await builders.add_group(database, case.run, 0)
        for rollout, reward in zip(rollouts, (1.0, 0.0), strict=True):
            await play(database, rollout, 3, reward)
        await case.killed_at("controller.rerolls_added")
        assert await rerolls(database, group) == []
        async with case.controller():

            async def added() -> bool:
                return len(await rerolls(database, group)) > 0

            await eventually(added)
        expected = [(f"{group.id}.{number}", rollouts[number // 4].id, 1) for number in range(2, 6)]
        assert await rerolls(database, group) == expected
        assert (await case.groups())[0] == "open"


async def rerolls(database: Database, group: tables.Group) -> list[tuple[str, str | None, int | None]]:
    async with database.read() as session:
        table = tables.Rollout
        query = select(table).where(table.group_id == group.id, table.rerolls_of.is_not(None))
        rows = (await session.scalars(query.order_by(table.sibling))).all()
        return [(row.id, row.rerolls_of, row.from_call) for row in rows]


async def advantages(database: Database, rollout: tables.Rollout) -> list[float]:
    async with database.read() as session:
        table = tables.CallCredit
        query = select(table.advantage).where(table.rollout_id == rollout.id).order_by(table.depth)
        return list(await session.scalars(query))
