"""Runs beside each other in the API: documents, series, and tasks won and lost."""

from __future__ import annotations

from datetime import UTC, datetime

import httpx
import pytest

from leyden.libs.contracts import ids
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from tests.support import builders


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
    assert (tasks["low"], tasks["high"]) == (pytest.approx(-0.777, abs=1e-3), pytest.approx(1.277, abs=1e-3))


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
