"""A run of which most attempts die the same way says so."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from leyden.libs.contracts.call_counts import CallCounts
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.libs.store.read import results, runs
from leyden.libs.store.read.warnings import warnings_of
from tests.support import builders


def attempt(**changes: Any) -> dict[str, Any]:
    good = {
        "kind": "succeeded",
        "detail": None,
        "stderr": "",
        "group_id": "g",
        "reason": "succeeded",
        "has_variance": True,
        "is_trainable": True,
        "calls": 2,
        "untrainable": 0,
        "untrainable_reason": None,
    }
    return {**good, **changes}


CRASH = {"kind": "agent_error", "reason": "agent_error", "detail": "the agent exited with code 1"}


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        (
            {**CRASH, "stderr": "Traceback\nModuleNotFoundError: No module named 'x'\n\n"},
            "6 of the last 10 attempts ended as agent_error: the agent exited with code 1: "
            "ModuleNotFoundError: No module named 'x'",
        ),
        (
            {"kind": "infra_error", "detail": "agent.directory /etc lies in no folder", "reason": None, "calls": 0},
            "6 of the last 10 attempts ended as infra_error: agent.directory /etc lies in no folder",
        ),
        (
            {"reason": "no_reward"},
            "6 of the last 10 attempts gave no reward: end its output with a line such as "
            '{"reward": 1.0}, or name graders in `reward`',
        ),
        ({"calls": 0}, "6 of the last 10 attempts made no model call: does the agent use OPENAI_BASE_URL?"),
        (
            {"untrainable": 2, "untrainable_reason": "sampled with top_k"},
            "12 of the last 20 model calls do not train: sampled with top_k: let the agent leave out these parameters;"
            " a temperature must be above 0, best 1 (or write `sampling.override`: training then samples without them)",
        ),
    ],
)
def test_most_attempts_that_end_alike_make_a_warning(changes: dict[str, Any], warning: str) -> None:
    others = [attempt(group_id=f"{number}") for number in range(4)]
    assert warnings_of([attempt(**changes)] * 6 + others) == [warning]
    assert warnings_of([attempt(**changes)] * 5 + others + [attempt()]) == []
    assert warnings_of([attempt(**changes)] * 3) == []


def test_numbers_do_not_make_a_failure_another_one() -> None:
    times = [attempt(kind="timeout", detail=f"stopped after {seconds} s") for seconds in range(300, 308)]
    assert warnings_of(times) == ["8 of the last 8 attempts ended as timeout: stopped after 300 s"]


def test_equal_rewards_everywhere_make_a_warning() -> None:
    pairs = [attempt(group_id=f"{number // 2}", has_variance=False) for number in range(8)]
    assert warnings_of(pairs) == [
        "in each of the last 4 groups all rewards are equal: there is nothing to learn from them"
    ]
    assert warnings_of([*pairs, attempt(group_id="5", has_variance=True)]) == []


def test_groups_that_cannot_train_do_not_have_equal_rewards() -> None:
    pairs = [attempt(group_id=f"{number // 2}", has_variance=False, is_trainable=False) for number in range(8)]
    assert warnings_of(pairs) == []


async def test_a_run_carries_its_warnings(database: Database) -> None:
    run = await builders.add_run(database)
    _, rollouts = await builders.add_group(database, run, size=4)
    for rollout in rollouts:
        await builders.finish_rollout(
            database, rollout, reward=None, kind="agent_error", detail="exit code 1", stderr_tail="ImportError: no y\n"
        )
        await builders.add_call(database, rollout, trainable=False, untrainable_reason="sampled with top_k")
    async with database.read() as session:
        found = (await runs.get_run(session, run.id)).warnings
    assert found == [
        "4 of the last 4 attempts ended as agent_error: exit code 1: ImportError: no y",
        "4 of the last 4 model calls do not train: sampled with top_k: let the agent leave out these parameters; a"
        " temperature must be above 0, best 1 (or write `sampling.override`: training then samples without them)",
    ]


async def test_a_step_without_a_token_that_can_be_trained_says_why(database: Database) -> None:
    run = await builders.add_run(database)
    group, _ = await builders.add_group(database, run, size=2)
    counts = {"calls": 3, "untrainable": {"role checker does not train": 3}}
    await builders.add_credited_group(database, group, has_variance=False, min_policy_version=None, calls=counts)
    async with database.session() as session:
        row = {"metrics": {"trainable_tokens": 0}, "checkpoint": "c", "started_at": datetime.now(tz=UTC)}
        session.add(tables.Step(run_id=run.id, number=1, **row))
        await session.flush()
        session.add(tables.StepGroup(group_id=group.id, run_id=run.id, step=1, verdict="untrainable"))
    async with database.read() as session:
        found = await runs.get_run(session, run.id)
        step = (await results.list_steps(session, run.id, cursor=None, limit=1)).items[0]
    assert found.warnings == [
        "step 1 had no token that can be trained: of 3 model calls 3 role checker does not train: name their role in"
        " `train`, or mend the conditions of `roles` (`leyden run agents`)"
    ]
    assert (found.calls, step.calls) == (CallCounts(**counts), CallCounts(**counts))
    assert step.groups == {"untrainable": 1}


async def test_a_tool_that_fails_in_most_calls_is_a_warning_and_a_series(database: Database) -> None:
    run = await builders.add_run(database)
    tools = {"sql": {"ok": 2, "error": 8, "unset": 5}, "search": {"ok": 5, "error": 5}, "rare": {"error": 9}}
    for number in range(1, 5):
        async with database.read() as session:
            assert (await runs.get_run(session, run.id)).warnings == []
        group, _ = await builders.add_group(database, run, number=number, size=2)
        counts = {"calls": 12, "tools": tools if number == 1 else {"sql": {"error": 1, "ok": 1}}}
        await builders.add_credited_group(database, group, calls=counts)
        async with database.session() as session:
            row = {"metrics": {}, "checkpoint": "c", "started_at": datetime.now(tz=UTC)}
            session.add(tables.Step(run_id=run.id, number=number, **row))
            await session.flush()
            session.add(tables.StepGroup(group_id=group.id, run_id=run.id, step=number, verdict="trained"))
    async with database.read() as session:
        warnings = (await runs.get_run(session, run.id)).warnings
        metrics = await results.get_metrics(session, run.id, ["tool.sql.failed_share", "tool.sql.calls"])
    assert warnings == [
        "tool sql failed in 11 of the 16 calls of the last 4 steps whose end is known: read one with `leyden rollout"
        " show`, or say by credit.air.failures what a failure of this tool is"
    ]
    assert {one.name: [point[2] for point in one.points] for one in metrics.series} == {
        "tool.sql.failed_share": [0.8, 0.5, 0.5, 0.5],
        "tool.sql.calls": [15.0, 2.0, 2.0, 2.0],
    }


@pytest.mark.parametrize("has_variance", [True, False])
async def test_rewards_are_equal_where_credit_found_them_equal(database: Database, has_variance: bool) -> None:
    """The outcomes print no number here: all rewards came over HTTP."""
    run = await builders.add_run(database)
    for number in range(4):
        group, rollouts = await builders.add_group(database, run, number=number, size=2)
        for rollout in rollouts:
            await builders.finish_rollout(database, rollout, reward=0.0)
            await builders.add_call(database, rollout)
        await builders.add_credited_group(database, group, has_variance=has_variance)
    async with database.read() as session:
        found = (await runs.get_run(session, run.id)).warnings
    assert len(found) == (0 if has_variance else 1), found
