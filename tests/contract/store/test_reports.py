"""The views for dashboards: any role may read them, and they give the same rewards as the API."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from psycopg.errors import InsufficientPrivilege

from docs.dashboards import TRAINING
from leyden.libs.contracts.ids import evaluation_id
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.libs.store.policies import policy_columns
from leyden.libs.store.read.results import get_evaluation
from tests.support.builders import (
    add_attempt,
    add_group,
    add_policy_version,
    add_run,
    finish_rollout,
    run_document,
)

VIEWS = {
    "runs",
    "policies",
    "rollouts",
    "steps",
    "rewards",
    "credits",
    "attempts",
    "policy_versions",
    "engines",
    "storage",
}


async def test_a_role_without_rights_reads_every_view_and_no_table(database: Database, postgres_dsn: str) -> None:
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute("DROP ROLE IF EXISTS reader")
        connection.execute("CREATE ROLE reader")
        connection.execute("SET ROLE reader")
        found = connection.execute("SELECT viewname FROM pg_views WHERE schemaname = 'reports'").fetchall()
        assert {name for (name,) in found} == VIEWS
        for view in VIEWS:
            connection.execute(f"SELECT * FROM reports.{view}").fetchall()
            assert connection.execute(f"SELECT obj_description('reports.{view}'::regclass)").fetchone() != (None,)
        with pytest.raises(InsufficientPrivilege):
            connection.execute("SELECT * FROM public.runs")
        with pytest.raises(InsufficientPrivilege):
            connection.execute("UPDATE reports.engines SET state = 'serving'")
        connection.execute("RESET ROLE")
        connection.execute("DROP ROLE reader")


async def test_a_rollouts_reward_counts_every_source(database: Database, postgres_dsn: str) -> None:
    run = await add_run(database)
    _, rollouts = await add_group(database, run)
    await finish_rollout(database, rollouts[0], reward=1.0)
    async with database.session() as session:
        session.add(
            tables.Reward(
                rollout_id=rollouts[0].id, attempt=1, key="a", run_id=run.id, source="endpoint", name="r", value=0.25
            )
        )
        session.add(tables.ExternalReward(rollout_id=rollouts[0].id, key="b", name="r", value=0.5))
    with psycopg.connect(postgres_dsn) as connection:
        query = "SELECT reward, attempts FROM reports.rollouts WHERE rollout_id = %s"
        assert connection.execute(query, (rollouts[0].id,)).fetchone() == (1.75, 1)
        query = "SELECT newest_reward, revision FROM reports.rollouts WHERE rollout_id = %s"
        assert connection.execute(query, (rollouts[0].id,)).fetchone() == (1.75, 1)
        query = "SELECT source, value FROM reports.rewards WHERE rollout_id = %s ORDER BY source"
        parts = connection.execute(query, (rollouts[0].id,)).fetchall()
        assert parts == [("api", 0.5), ("endpoint", 0.25), ("outcome", 1.0)]


async def test_a_regrades_total_stands_beside_the_reward_that_trained(database: Database, postgres_dsn: str) -> None:
    run = await add_run(database)
    _, (rollout, other) = await add_group(database, run, size=2)
    keys: dict[str, Any] = {"rollout_id": rollout.id, "attempt": 1, "run_id": run.id}
    for one in (rollout, other):
        await finish_rollout(database, one, reward=1.0)
    now = datetime.now(tz=UTC)
    lease = {"tries": 1, "lease_id": "lease", "owner": "test", "lease_expires_at": now, "settled_at": now}
    async with database.session() as session:
        session.add(tables.Grading(**keys, **lease, total=1.0))
        session.add(tables.ExternalReward(rollout_id=rollout.id, key="b", name="r", value=0.5))
        await session.flush()
        for revision, total in ((2, 0.0), (3, 0.25)):
            session.add(tables.Regrade(**keys, revision=revision, reward={}, total=total, token_name="a"))
    with psycopg.connect(postgres_dsn) as connection:
        query = "SELECT reward, newest_reward, revision FROM reports.rollouts ORDER BY revision"
        assert connection.execute(query).fetchall() == [(1.0, 1.0, 1), (1.5, 0.75, 3)]


def query_of(title: str, policy_id: str) -> bytes:
    """The SQL of a panel of the dashboard Training for the policy that is picked."""
    [panel] = [one for one in TRAINING if one["title"] == title]
    [target] = panel["targets"]
    sql: str = target["rawSql"]
    return sql.replace("${run:sqlstring}", f"'{policy_id}'").encode()


async def test_the_dashboard_shows_a_further_policy_with_its_runs_rewards(
    database: Database, postgres_dsn: str
) -> None:
    lead = await add_run(database)
    checker = await add_run(database, dataset_id=lead.dataset_id, **policy_columns(lead.id, "checker"))
    key, now = evaluation_id(lead.id, 1), datetime.now(tz=UTC)
    async with database.session() as session:
        columns = {"run_id": lead.id, "dataset_id": lead.dataset_id, "rollouts_per_task": 1}
        session.add(tables.Evaluation(id=key, number=1, policy_version=0, **columns))
        for run, steps in ((lead, 1), (checker, 2)):
            for number in range(1, steps + 1):
                session.add(tables.Step(run_id=run.id, number=number, metrics={}, checkpoint="", started_at=now))
    await add_policy_version(database, checker, 0)
    _, [rollout] = await add_group(database, lead, size=1, evaluation_id=key)
    await finish_rollout(database, rollout, reward=1.0)
    shown = {"Phase": ("running",), "Steps": (2,), "Policy version": (0,), "Evaluations": (key, 1, 1.0, None)}
    with psycopg.connect(postgres_dsn) as connection:
        for title, row in shown.items():
            assert connection.execute(query_of(title, checker.id)).fetchall() == [row]
        assert connection.execute(query_of("Steps", lead.id)).fetchall() == [(1,)]
        of_run, of_policy = (
            connection.execute(query_of("Reward by source and name", one.id)).fetchall() for one in (lead, checker)
        )
        assert of_policy == of_run != []


async def test_an_evaluation_has_the_apis_mean_in_reports_and_on_the_dashboard(
    database: Database, postgres_dsn: str
) -> None:
    run = await add_run(database)
    key = evaluation_id(run.id, 1)
    async with database.session() as session:
        (await session.get_one(tables.RunStatus, run.id)).smallest_reward = -0.5
        columns = {"run_id": run.id, "dataset_id": run.dataset_id, "rollouts_per_task": 4}
        session.add(tables.Evaluation(id=key, number=1, policy_version=0, **columns))
    _, (solved, crashed, slow, lost) = await add_group(database, run, size=4, evaluation_id=key)
    await finish_rollout(database, solved, reward=1.0)
    await finish_rollout(database, crashed, reward=None, kind="agent_error")
    await finish_rollout(database, slow, reward=None, kind="timeout")
    await add_attempt(database, lost)
    now = datetime.now(tz=UTC)
    lease = {"tries": 1, "lease_id": "lease", "owner": "test", "lease_expires_at": now, "settled_at": now}
    graded: dict[str, Any] = {"rollout_id": lost.id, "attempt": 1, "run_id": run.id}
    async with database.session() as session:
        session.add(tables.ExternalReward(rollout_id=slow.id, key="b", name="r", value=0.25))
        row = await session.get_one(tables.Rollout, lost.id)
        row.state, row.reason, row.grading_attempt, row.finished_at = "excluded", "ungraded", 1, now
        session.add(tables.Grading(**graded, **lease, reason="lost"))
        await session.flush()
        session.add(tables.Regrade(**graded, revision=2, reward={}, total=0.5, token_name="a"))
    async with database.read() as session:
        evaluation = await get_evaluation(session, key)
    assert evaluation is not None and evaluation.results.reward is not None
    found = evaluation.results.reward
    assert (found.count, found.mean) == (4, 0.125)
    with psycopg.connect(postgres_dsn) as connection:
        shown = connection.execute(query_of("Evaluations", run.id)).fetchall()
        assert [row[:3] for row in shown] == [(key, found.count, found.mean)]
        query = "SELECT newest_reward, revision FROM reports.rollouts ORDER BY rollout_id"
        assert connection.execute(query).fetchall() == [(1.0, 1), (-0.5, 1), (-0.5, 1), (0.5, 2)]
        assert connection.execute("SELECT count(reward) FROM reports.rollouts").fetchone() == (1,)


async def test_a_steps_rewards_are_those_of_the_groups_that_its_run_judged(
    database: Database, postgres_dsn: str
) -> None:
    lead = await add_run(database)
    checker = await add_run(database, dataset_id=lead.dataset_id, **policy_columns(lead.id, "checker"))
    steps = {}
    for number in (0, 1):
        group, rollouts = await add_group(database, lead, number, size=3, greedy=2)
        for rollout, reward in zip(rollouts, (number, number + 1, 100), strict=True):
            await finish_rollout(database, rollout, reward=float(reward))
        # Each run judges the groups in an order of its own.
        steps[group.id] = {lead.id: number + 1, checker.id: 2 - number}
    async with database.session() as session:
        for run in (lead, checker):
            for number in (1, 2):
                moment = datetime.now(tz=UTC)
                session.add(tables.Step(run_id=run.id, number=number, metrics={}, checkpoint="", started_at=moment))
        for group_id, by_run in steps.items():
            for run_id, number in by_run.items():
                session.add(tables.StepGroup(group_id=group_id, run_id=run_id, step=number, verdict="trained"))
    with psycopg.connect(postgres_dsn) as connection:
        query = "SELECT step, rollouts, reward_mean FROM reports.steps WHERE run_id = %s ORDER BY step"
        assert connection.execute(query, (lead.id,)).fetchall() == [(1, 2, 0.5), (2, 2, 1.5)]
        assert connection.execute(query, (checker.id,)).fetchall() == [(1, 2, 1.5), (2, 2, 0.5)]
        assert connection.execute("SELECT run_id, steps FROM reports.runs").fetchall() == [(lead.id, 2)]
        query = "SELECT policy_id, run_id, policy, phase, steps FROM reports.policies ORDER BY policy NULLS FIRST"
        assert connection.execute(query).fetchall() == [
            (lead.id, lead.id, None, "running", 2),
            (checker.id, lead.id, "checker", "running", 2),
        ]


async def test_a_reward_for_a_call_of_an_attempt_that_does_not_count_is_in_no_report(
    database: Database, postgres_dsn: str
) -> None:
    run = await add_run(database)
    _, [rollout] = await add_group(database, run, size=1)
    await finish_rollout(database, rollout, reward=1.0)
    async with database.session() as session:
        for attempt, value in ((None, 0.25), (1, 0.5), (2, 64.0)):
            names = {"key": f"{attempt}", "name": "r", "value": value, "attempt": attempt}
            session.add(tables.ExternalReward(rollout_id=rollout.id, **names))
    with psycopg.connect(postgres_dsn) as connection:
        query = "SELECT reward, newest_reward FROM reports.rollouts"
        assert connection.execute(query).fetchall() == [(1.75, 1.75)]
        query = "SELECT sum(value) FROM reports.rewards"
        assert connection.execute(query).fetchall() == [(1.75,)]


async def test_a_number_that_a_step_did_not_measure_is_unknown_in_reports(
    database: Database, postgres_dsn: str
) -> None:
    measures = ("loss", "gradient_norm", "entropy", "clipped_share", "effective_sample_share")
    numbers = dict.fromkeys((*measures, "kl_reference", "policy_lag_mean", "policy_lag_max"), 0.0)
    held = run_document(algorithm={"type": "ppo_clip", "kl_coefficient": 0.1})
    runs = [await add_run(database), await add_run(database, config=held)]
    async with database.session() as session:
        for run in runs:
            for number, tokens in (
                (1, {"computed_tokens": 8, "trainable_tokens": 8}),
                (2, {"computed_tokens": 0, "trainable_tokens": 0}),
            ):
                made = {"metrics": {**numbers, **tokens}, "checkpoint": "", "started_at": datetime.now(tz=UTC)}
                session.add(tables.Step(run_id=run.id, number=number, **made))
    with psycopg.connect(postgres_dsn) as connection:
        query = f"SELECT {', '.join(numbers)} FROM reports.steps WHERE run_id = %s ORDER BY step"
        of_runs = [connection.execute(query, (run.id,)).fetchall() for run in runs]
    nothing = (None,) * len(numbers)
    assert of_runs == [[(*[0.0] * 5, None, 0.0, 0.0), nothing], [(0.0,) * len(numbers), nothing]]


async def test_reports_show_the_entropy_of_a_step_without_variance(database: Database, postgres_dsn: str) -> None:
    run, metrics = await add_run(database), {"computed_tokens": 0, "trainable_tokens": 5, "entropy": 0.25, "loss": 0.0}
    async with database.session() as session:
        session.add(
            tables.Step(run_id=run.id, number=1, metrics=metrics, checkpoint="", started_at=datetime.now(tz=UTC))
        )
    with psycopg.connect(postgres_dsn) as connection:
        assert connection.execute("SELECT entropy, loss FROM reports.steps").fetchall() == [(0.25, None)]
