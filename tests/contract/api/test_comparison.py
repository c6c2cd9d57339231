"""Runs beside each other in the API: documents, series, and tasks won and lost."""

from __future__ import annotations

import io
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from rich.console import Console
from sqlalchemy import select, text, update

from leyden.libs.cli.view.comparison import comparison_parts
from leyden.libs.contracts import ids
from leyden.libs.contracts.api.comparison import Comparison
from leyden.libs.contracts.api.runs import Evaluation
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.libs.store.read.best import BestVersion, Measurement, best_measured
from leyden.libs.store.read.comparison import _compared
from tests.support import builders

START = datetime(2026, 1, 1, tzinfo=UTC)


async def trained_step(
    database: Database, run: tables.Run, number: int, rewards: Sequence[float], **columns: Any
) -> None:
    """A step that trained one group of version 1 with these rewards; without any, a group that credit excluded."""
    group, rollouts = await builders.add_group(
        database, run, number, size=max(1, len(rewards)), state="complete", admitted_version=1
    )
    for rollout, reward in zip(rollouts, rewards, strict=False):
        await builders.finish_rollout(database, rollout, reward=reward)
    mean = sum(rewards) / len(rewards) if rewards else None
    await builders.add_credited_group(database, group, reward_mean=mean, counted_siblings=len(rewards))
    async with database.session() as session:
        made = {"metrics": {}, "checkpoint": "", "started_at": START, **columns}
        session.add(tables.Step(run_id=run.id, number=number, **made))
        session.add(tables.StepGroup(group_id=group.id, run_id=run.id, step=number, verdict="trained"))


def test_rounding_moves_no_task_and_makes_no_version_best() -> None:
    higher, lower = (0.1 + 0.2 + 0.3) / 3, (0.3 + 0.2 + 0.1) / 3
    assert higher > lower
    first, other = (cast(Evaluation, SimpleNamespace(id=name, dataset_id="d", run_id=name)) for name in ("a", "b"))
    for rewards in ((lower, higher), (higher, lower)):
        found = _compared(first, other, {"a": {0: rewards[0], 1: 0.5}, "b": {0: rewards[1], 1: 0.75}})
        assert found is not None and (found.won, found.lost, found.same) == (1, 0, 1)
    measured = [Measurement(f"{n}", "a", n, n, 1, {0: mean}) for n, mean in ((1, higher), (2, lower))]
    assert best_measured(measured, measured, {1, 2}) == BestVersion(2, "by evaluations", lower, "evaluations")


async def test_the_tasks_that_changed_leave_rounding_out(api_http: httpx.AsyncClient, database: Database) -> None:
    dataset = (await builders.add_dataset(database, [{"question": n} for n in range(2)])).id
    # The task's means on paper are equal; the stored ones differ in the last bit.
    first = await measured_run(database, dataset, 0.1, [0.1 + 0.2 + 0.3, 0.5])
    other = await measured_run(database, dataset, 0.2, [0.3 + 0.2 + 0.1, 0.75])
    [tasks] = (await api_http.get("/v1/comparison", params={"run": [first.id, other.id]})).json()["tasks"]
    assert [(one["number"], one["rewards"]) for one in tasks["changes"]] == [(1, [0.5, 0.75])]
    assert (tasks["won"], tasks["lost"], tasks["same"]) == (1, 0, 1)


async def measured_run(database: Database, dataset: str, rate: float, rewards: list[float]) -> tables.Run:
    """A run with one step, whose evaluation gave these rewards to tasks 0, 1, …"""
    document = builders.run_document(dataset=dataset, name=f"rate {rate}", optimizer={"learning_rate": rate})
    run = await builders.add_run(database, config=document, dataset_id=dataset)
    evaluation = ids.evaluation_id(run.id, 1)
    columns = {"dataset_id": dataset, "policy_version": 0, "rollouts_per_task": 1, "max_tasks": len(rewards)}
    async with database.session() as session:
        session.add(tables.Evaluation(id=evaluation, run_id=run.id, number=1, **columns))
        started = datetime(2026, 1, 1, tzinfo=UTC)
        session.add(tables.Step(run_id=run.id, number=1, metrics={"loss": rate}, checkpoint="", started_at=started))
    for number, reward in enumerate(rewards):
        _, [rollout] = await builders.add_group(
            database, run, number, size=1, evaluation_id=evaluation, task_number=number, dataset_id=dataset
        )
        await builders.finish_rollout(database, rollout, reward=reward)
    return run


async def test_runs_are_compared_by_document_series_and_task(api_http: httpx.AsyncClient, database: Database) -> None:
    dataset = (await builders.add_run(database)).dataset_id
    first = await measured_run(database, dataset, 1e-6, [0.0, 0.5, 1.0, 0.25])
    other = await measured_run(database, dataset, 1e-5, [1.0, 0.5, 0.5, 0.75])
    answer = await api_http.get("/v1/comparison", params={"run": [first.id, other.id], "names": ["loss"]})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert [run["id"] for run in found["runs"]] == [first.id, other.id]
    assert found["differences"] == [{"path": "optimizer.learning_rate", "values": ["1e-06", "1e-05"]}]
    assert [[one["points"][0][2] for one in metrics["series"]] for metrics in found["metrics"]] == [[1e-6], [1e-5]]
    assert [[one["number"] for one in of_run] for of_run in found["evaluations"]] == [[1], [1]]
    [tasks] = found["tasks"]
    assert (tasks["run_id"], tasks["won"], tasks["lost"], tasks["same"]) == (other.id, 2, 1, 1)
    # Gains 1, 0, -0.5 and 0.5: mean 0.25, standard deviation 0.6455, Student's t of 3 degrees 3.182.
    assert tasks["difference"] == 0.25
    changes = [(one["number"], one["rewards"], one["text"]) for one in tasks["changes"]]
    assert changes == [(0, [0.0, 1.0], '{"question": "2+2"}'), (3, [0.25, 0.75], None), (2, [1.0, 0.5], None)]
    for change in tasks["changes"]:
        shown = [(await api_http.get(f"/v1/rollouts/{one}")).json() for one in change["rollout_ids"]]
        assert [(one["run_id"], one["task_number"]) for one in shown] == [
            (first.id, change["number"]),
            (other.id, change["number"]),
        ]
    assert (tasks["low"], tasks["high"]) == (pytest.approx(-0.777, abs=1e-3), pytest.approx(1.277, abs=1e-3))


async def test_a_failure_earns_the_same_in_each_compared_run(api_http: httpx.AsyncClient, database: Database) -> None:
    dataset = (await builders.add_dataset(database, [{"question": n} for n in range(2)])).id
    runs = [await measured_run(database, dataset, rate, [-0.2, -0.2]) for rate in (0.1, 0.2)]
    for run, smallest in zip(runs, (-0.2, -5.0), strict=True):
        async with database.session() as session:
            await session.execute(
                update(tables.RunStatus).where(tables.RunStatus.run_id == run.id).values(smallest_reward=smallest)
            )
            crashed = await session.get_one(tables.Rollout, f"{run.id}.e1.1.0")
            crashed.reward, crashed.reason = None, "agent_error"
    [tasks] = (await api_http.get("/v1/comparison", params={"run": [run.id for run in runs]})).json()["tasks"]
    assert (tasks["same"], tasks["difference"], tasks["changes"]) == (2, 0.0, [])


async def test_a_terminal_shows_the_tasks_that_changed_most(api_http: httpx.AsyncClient, database: Database) -> None:
    dataset = (await builders.add_run(database)).dataset_id
    first = await measured_run(database, dataset, 1e-6, [0.0, 1.0])
    other = await measured_run(database, dataset, 1e-5, [1.0, 1.0])
    answer = await api_http.get("/v1/comparison", params={"run": [first.id, other.id]})
    output = io.StringIO()
    Console(file=output, width=300).print(*comparison_parts(Comparison.model_validate(answer.json())))
    _, shown = output.getvalue().split(
        f"Tasks of {dataset} that changed most from rate 1e-06 ({first.id}) to rate 1e-05"
    )
    row = shown.splitlines()[2].split()
    rollouts = [f"{run.id}.e1.0.0" for run in (first, other)]
    assert row == ["0", "0.000", "1.000", "+1.000", '{"question":', '"2+2"}', *rollouts]


async def test_an_unknown_run_is_named_and_a_run_beside_itself_differs_in_nothing(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    run = await builders.add_run(database)
    answer = await api_http.get("/v1/comparison", params={"run": [run.id, "nobody"]})
    assert answer.status_code == 404 and "nobody" in answer.json()["detail"]
    found = (await api_http.get("/v1/comparison", params={"run": [run.id, run.id]})).json()
    assert (found["differences"], found["tasks"]) == ([], [])


async def test_an_evaluation_that_goes_on_compares_no_tasks(api_http: httpx.AsyncClient, database: Database) -> None:
    dataset = (await builders.add_run(database)).dataset_id
    first = await measured_run(database, dataset, 1e-6, [0.0, 0.5])
    other = await measured_run(database, dataset, 1e-5, [0.0, 0.5])
    later = ids.evaluation_id(other.id, 2)
    columns = {"dataset_id": dataset, "policy_version": 1, "rollouts_per_task": 2}
    async with database.session() as session:
        session.add(tables.Evaluation(id=later, run_id=other.id, number=2, **columns))
    group = {"evaluation_id": later, "dataset_id": dataset, "admitted_version": 1}
    _, [rollout, _] = await builders.add_group(database, other, 0, **group)
    await builders.finish_rollout(database, rollout, reward=1.0)
    found = (await api_http.get("/v1/comparison", params={"run": [first.id, other.id]})).json()
    assert [one["reward"]["mean"] for one in (e["results"] for e in found["evaluations"][1])] == [0.25, 1.0]
    [tasks] = found["tasks"]
    assert tasks["evaluation_ids"] == [ids.evaluation_id(first.id, 1), ids.evaluation_id(other.id, 1)]
    assert (tasks["same"], tasks["difference"]) == (2, 0.0)


async def test_curves_of_several_runs_have_their_rewards_by_step_and_their_best_versions(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    dataset = (await builders.add_run(database)).dataset_id
    new = await builders.add_run(database)
    measured = await measured_run(database, dataset, 1e-6, [0.0, 0.5])
    async with database.session() as session:
        for row in await session.scalars(select(tables.Evaluation).where(tables.Evaluation.run_id == measured.id)):
            row.policy_version = 1
        of_version_1 = update(tables.Group).where(tables.Group.run_id == measured.id).values(admitted_version=1)
        await session.execute(of_version_1)
    trained = await builders.add_run(database)
    for run, version in product((measured, trained), (0, 1)):
        await builders.add_policy_version(database, run, version)
    for number, rewards in enumerate([(0.0, 1.0), (1.0, 1.0), ()], start=1):
        await trained_step(database, trained, number, rewards)
    runs = [new.id, measured.id, trained.id, "nobody"]
    answer = await api_http.get("/v1/curves", params={"run": runs})
    assert answer.status_code == 200, answer.text
    assert [[*one.values()] for one in answer.json()["items"]] == [
        [new.id, [], [], None, None, None, None],
        [measured.id, [[1, None]], [[1, 0.25]], 1, "by evaluations", 0.25, "evaluations"],
        [
            *(trained.id, [[1, 0.5], [2, 1.0], [3, None]], []),
            *(1, "by training, each version on other tasks: no evaluation measured one", 0.75, "training"),
        ],
    ]
    async with database.read() as session:
        by_sql = text("""SELECT step, avg(r.reward) FROM step_groups g JOIN rollouts r USING (group_id)
            WHERE g.run_id = :run AND r.state = 'finished' GROUP BY step ORDER BY step""")
        rewards = [tuple(row) for row in await session.execute(by_sql, {"run": trained.id})]
    assert rewards == [(1, 0.5), (2, 1.0)]


async def test_a_long_run_has_a_curve_of_forty_steps_the_first_and_the_newest_among_them(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    runs = [await builders.add_run(database) for _ in range(2)]
    async with database.session() as session:
        for run, steps in zip(runs, (40, 317), strict=True):
            session.add_all(
                tables.Step(run_id=run.id, number=number, metrics={}, checkpoint="", started_at=START)
                for number in range(1, steps + 1)
            )
    found = (await api_http.get("/v1/curves", params={"run": [run.id for run in runs]})).json()["items"]
    short, long = ([step for step, _ in one["points"]] for one in found)
    assert short == list(range(1, 41))
    assert (len(long), long[0], long[-1]) == (40, 1, 317)
    assert {b - a for a, b in pairwise(long)} <= {8, 9}


async def test_a_list_names_agents_model_and_pool_of_each_run(api_http: httpx.AsyncClient, database: Database) -> None:
    async with database.session() as session:
        session.add(tables.Pool(name="big", model_path="/models/of-the-pool"))
    agents = [{"name": name, "command": ["a"]} for name in ("solver", "checker")]
    document = {
        name: value for name, value in builders.run_document(agents=agents, pool="big").items() if name != "agent"
    }
    several = await builders.add_run(database, config=document)
    one = await builders.add_run(database, config=builders.run_document(model="/models/own"))
    found = {run["id"]: run for run in (await api_http.get("/v1/runs")).json()["items"]}
    assert (found[several.id]["agent_names"], found[several.id]["model"]) == (
        ["solver", "checker"],
        "/models/of-the-pool",
    )
    assert (found[one.id]["agent_names"], found[one.id]["model"]) == (["{python} /agents/agent.py"], "/models/own")
