"""Rollouts with components: their groups wait for the grades, and every reader has the settled total."""

from __future__ import annotations

import re
from typing import Any

import pytest
from sqlalchemy import func, select, update

from leyden.libs.contracts.api.rollouts import FeedbackRequest, RewardRequest, RolloutDetail
from leyden.libs.contracts.api.runs import StepComponent
from leyden.libs.contracts.ledger import NewComponent
from leyden.libs.contracts.states import ShownRolloutState
from leyden.libs.store import tables
from leyden.libs.store.read import views
from leyden.libs.store.read.results import get_metrics, list_evaluations, list_steps
from leyden.libs.store.read.rollouts import RolloutFilter, list_rollouts
from leyden.libs.store.runs.feedback import add_feedback
from leyden.libs.store.runs.grading import Settled, lease_gradings, settle_gradings
from leyden.libs.store.runs.retention import delete_run
from tests.contract.controller.test_store import LONG_AGO, Scene, add_run, document
from tests.contract.controller.test_store import scene as scene
from tests.support import builders
from tests.support.alarms import alarm_lines, alarms

COMPONENTS = {"components": [{"name": "words", "weight": 0.5, "grader": {"type": "length"}}]}


def graded_document(**changes: Any) -> dict[str, Any]:
    return {**document(groups_per_step=1, max_policy_lag=0, **changes), "reward": COMPONENTS}


async def grade(scene: Scene, count: int, value: float | None, cause: str = "words: it hangs") -> list[str]:
    """Writes what a grader writes; returns the graded rollouts."""
    async with scene.database.session() as session:
        leased = await lease_gradings(session, "test", count, 30.0)
        total, reason = (None, cause) if value is None else (0.5 * value, None)
        component = NewComponent(
            "words",
            "failed" if value is None else "scored",
            0.5,
            value,
            value and value / 2,
            None,
            "it hangs",
            "length",
            0.1,
        )
        await settle_gradings(session, [Settled(one, total, reason, (component,)) for one in leased])
        return [one.rollout_id for one in leased]


async def states(scene: Scene, run: tables.Run) -> list[tuple[str, float | None, str | None]]:
    return [(one.state, one.reward, one.reason) for one in await scene.rollouts(run)]


async def shown(scene: Scene, rollout: str) -> RolloutDetail:
    async with scene.database.read() as session:
        return await views.get_rollout(session, rollout)


async def test_a_group_waits_until_each_of_its_rollouts_is_graded(scene: Scene) -> None:
    run = await add_run(scene, config=graded_document())
    await scene.tick(2)
    first, second = await scene.rollouts(run)
    for rollout in (first, second):
        await scene.attempt(rollout, kind="succeeded", reward=None)
    await scene.tick(2)
    assert await states(scene, run) == [("queued", None, None)] * 2
    assert (await shown(scene, first.id)).state == "grading"
    async with scene.database.read() as session:
        wanted = RolloutFilter(run_id=run.id, state=ShownRolloutState.GRADING)
        page = await list_rollouts(session, wanted, cursor=None, limit=9)
    assert {one.id for one in page.items} == {first.id, second.id}

    assert await grade(scene, 1, 0.8) == [first.id]
    await scene.tick()
    assert await states(scene, run) == [("finished", 0.4, "succeeded"), ("queued", None, None)]
    assert (await scene.groups(run))[0].state == "open"
    assert await grade(scene, 9, 0.2) == [second.id]
    await scene.tick()
    assert await states(scene, run) == [("finished", 0.4, "succeeded"), ("finished", 0.1, "succeeded")]
    assert (await scene.groups(run))[0].state == "complete"
    found = await shown(scene, first.id)
    assert (found.reward, [(one.component, one.value) for one in found.components]) == (0.4, [("words", 0.8)])
    assert await grade(scene, 9, 1.0) == []


async def test_a_rollout_without_a_total_is_excluded_and_never_0(scene: Scene) -> None:
    run = await add_run(scene, config=graded_document())
    await scene.tick(2)
    await scene.finish_all(run)
    await scene.tick()
    await grade(scene, 1, None)
    await grade(scene, 1, 1.0)
    await scene.tick()
    assert await states(scene, run) == [("excluded", None, "ungraded"), ("finished", 0.5, "succeeded")]
    found = await alarms(scene.database, run.id)
    assert [(name, one.reason) for name, one in found.items()] == [
        ("ungraded", "1 attempts have no reward and were excluded; the last: words: it hangs"),
        (
            "component_fails words",
            "component words failed in 1 of the last 2 attempts (50%), and reward.missing decided what they earn; the"
            " last: it hangs",
        ),
    ]
    assert found["component_fails words"].evidence == {"failed": 1, "attempts": 2, "share": 0.5}


async def test_a_component_that_fails_in_one_of_fifty_attempts_is_no_alarm(scene: Scene) -> None:
    run = await add_run(scene, config=graded_document())
    await builders.add_group(scene.database, run, size=100)
    for rollout in await scene.rollouts(run):
        await builders.add_attempt(scene.database, rollout, state="settled", finished_at=LONG_AGO)
        await builders.add_outcome(scene.database, rollout, reward=None)
    async with scene.database.session() as session:
        session.add(tables.RunStatus(run_id=run.id, phase="running"))
        await session.execute(update(tables.Rollout).values(grading_attempt=1))
    await grade(scene, 2, None)
    await grade(scene, 98, 1.0)
    assert "component_fails words" not in await alarms(scene.database, run.id)


async def test_each_component_has_a_curve_of_its_mean_and_its_failures(scene: Scene) -> None:
    run = await add_run(scene, config=graded_document())
    await scene.tick(2)
    await scene.finish_all(run)
    await scene.tick()
    await grade(scene, 1, None)
    await grade(scene, 1, 0.8)
    await scene.tick()
    await scene.credit_and_train(run, 1)
    async with scene.database.read() as session:
        (step,) = (await list_steps(session, run.id, cursor=None, limit=9)).items
        metrics = await get_metrics(session, run.id, ["component.words.mean", "component.words.failed_share"])
    assert step.components == {"words": StepComponent(mean=0.8, failed_share=0.5)}
    assert [[value for _, _, value in one.points] for one in metrics.series] == [[0.8], [0.5]]


async def test_a_run_without_any_reward_ends_with_the_cause(scene: Scene) -> None:
    run = await add_run(scene, config=graded_document(steps=1))
    await scene.tick(2)
    for _ in range(8):
        await scene.finish_all(run)
        await scene.tick()
        await grade(scene, 9, None)
        await scene.tick(2)
    phase, reason = await scene.phase(run)
    assert (phase, reason) == ("failed", "no rollout succeeds: ungraded: words: it hangs")


async def test_an_agents_own_failure_is_not_graded_and_a_lost_attempt_runs_again(scene: Scene) -> None:
    run = await add_run(scene, config=graded_document(failure_reward=-1.0))
    await scene.tick(2)
    crashed, lost = await scene.rollouts(run)
    await scene.attempt(crashed, kind="agent_error", reward=None)
    await scene.attempt(lost, kind=None, reward=None)
    await scene.tick()
    assert await grade(scene, 9, 1.0) == []
    await scene.attempt(lost, 2, kind="succeeded", reward=None)
    await scene.tick()
    assert await grade(scene, 9, 1.0) == [lost.id]
    await scene.tick()
    assert await states(scene, run) == [("finished", -1.0, "agent_error"), ("finished", 0.5, "succeeded")]


async def test_a_value_that_an_outage_may_have_lost_is_asked_for_again(scene: Scene) -> None:
    sent = {"components": [{"name": "score", "from": "otlp"}]}
    run = await add_run(scene, config={**graded_document(), "reward": sent})
    await scene.tick(2)
    came, lost = await scene.rollouts(run)
    for rollout in (came, lost):
        await builders.add_attempt(scene.database, rollout, state="settled", finished_at=LONG_AGO)
        await builders.add_outcome(scene.database, rollout, reward=None, endpoint_down="collector")
    async with scene.database.session() as session:
        names = {"rollout_id": came.id, "attempt": 1, "run_id": run.id}
        session.add(tables.Feedback(key="k", component="score", value=1.0, **names))
    await scene.tick(2)
    assert [one.grading_attempt for one in await scene.rollouts(run)] == [1, None]
    assert [one.excused_attempt for one in await scene.rollouts(run)] == [0, 1]


async def test_an_evaluation_is_complete_when_it_is_graded(scene: Scene) -> None:
    run = await add_run(scene, config=graded_document(steps=0))
    row = {"run_id": run.id, "number": 1, "dataset_id": run.dataset_id, "rollouts_per_task": 2, "max_tasks": 1}
    async with scene.database.session() as session:
        session.add(tables.Evaluation(id=f"{run.id}.e1", policy_version=0, **row))
    await scene.tick(3)
    await scene.finish_all(run)
    await scene.tick()
    async with scene.database.read() as session:
        (open_one,) = (await list_evaluations(session, run.id, cursor=None, limit=9)).items
    assert (open_one.results.complete, open_one.results.pending, open_one.results.reward) == (False, 2, None)
    await grade(scene, 1, 1.0)
    await grade(scene, 1, None)
    await scene.tick()
    async with scene.database.read() as session:
        (done,) = (await list_evaluations(session, run.id, cursor=None, limit=9)).items
    assert (done.results.complete, done.results.pending) == (True, 0)
    assert done.results.rollouts == {"finished": 1, "excluded": 1}
    assert done.results.reward is not None and done.results.reward.mean == 0.5


async def test_rewards_from_outside_are_refused(scene: Scene) -> None:
    run = await add_run(scene, config=graded_document())
    await scene.tick(2)
    rollout, _ = await scene.rollouts(run)
    with pytest.raises(views.RewardConflict, match=r"reward\.components: give feedback for one that is from: feedback"):
        async with scene.database.session() as session:
            await views.add_external_reward(session, rollout.id, RewardRequest(key="k", value=1.0))


def rated_document(seconds: float) -> dict[str, Any]:
    components = [{"name": "thumbs", "from": "feedback"}]
    reward = {"components": components, "wait": {"seconds": seconds}}
    return {**document(groups_per_step=1, max_policy_lag=0, steps=1), "reward": reward}


async def test_a_run_says_that_it_waits_for_feedback(scene: Scene) -> None:
    run = await add_run(scene, config=rated_document(7200.0))
    await scene.tick(2)
    first, second = await scene.rollouts(run)
    await scene.attempt(first, kind="succeeded", reward=None)
    await scene.tick(2)
    assert await scene.phase(run) == ("running", "waiting for thumbs: 0 of 2 rollouts have it")
    assert await alarms(scene.database, run.id) == {}
    request = FeedbackRequest(key="k", component="thumbs", value=0.0)
    async with scene.database.session() as session:
        await add_feedback(session, first.id, request)
    await scene.attempt(second, kind="succeeded", reward=None)
    await scene.tick(2)
    assert await scene.phase(run) == ("running", "waiting for thumbs: 1 of 2 rollouts have it")
    async with scene.database.session() as session:
        await add_feedback(session, second.id, request)
    await scene.tick(1)
    assert await scene.phase(run) == ("running", None)


async def test_a_run_whose_feedback_never_comes_ends_with_that_reason(scene: Scene) -> None:
    run = await add_run(scene, config=rated_document(1800.0))
    await scene.tick(2)
    await scene.finish_all(run)
    await scene.tick(2)
    # The attempts ended an hour ago: a grader is missing since their wait is over.
    (warning,) = await alarm_lines(scene.database, run.id)
    assert re.match(r"2 attempts wait for their grades, the longest for \d{4} s", warning)
    for _ in range(8):
        await grade(scene, 9, None, "thumbs: no feedback within 1800 s")
        await scene.tick(2)
        await scene.finish_all(run)
        await scene.tick()
    reason = "no rollout succeeds: ungraded: thumbs: no feedback within 1800 s"
    assert await scene.phase(run) == ("failed", reason)


async def test_an_attempt_that_waits_for_long_is_an_alarm(scene: Scene) -> None:
    run = await add_run(scene, config=graded_document())
    await scene.tick(2)
    await scene.finish_all(run)
    await scene.tick()
    (warning,) = await alarm_lines(scene.database, run.id)
    assert warning.startswith("2 attempts wait for their grades, the longest for ")
    assert warning.endswith(" s: does a grader run?")


async def test_a_deleted_run_leaves_no_grade(scene: Scene) -> None:
    run = await add_run(scene, config=graded_document())
    await scene.tick(2)
    await scene.finish_all(run)
    await scene.tick()
    await grade(scene, 9, 1.0)
    await scene.tick()
    await builders.end_run(scene.database, run, "cancelled")
    await scene.intend(run, "deleted")
    await delete_run(scene.database, run.id)
    async with scene.database.read() as session:
        for table in (tables.Grading, tables.RolloutReward, tables.Rollout):
            assert await session.scalar(select(func.count()).select_from(table)) == 0
