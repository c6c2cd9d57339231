"""Pruning removes all records of an ended run or none, does not affect other runs, and preserves the results."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import httpx
import pytest
from sqlalchemy import func, select, text

from leyden.libs.contracts.ids import evaluation_id
from leyden.libs.store import tables
from leyden.libs.store.attempts import AttemptKey
from leyden.libs.store.database import Database, Refused
from leyden.libs.store.policies import policy_columns
from leyden.libs.store.read.runs import UnknownRun
from leyden.libs.store.records.artifacts import Artifact, add_artifacts
from leyden.libs.store.records.spans import write_telemetry
from leyden.libs.store.runs import retention
from leyden.libs.store.runs.actions import ActionRefused
from leyden.libs.store.runs.retention import RecordsInUse, prune_run
from leyden.services.controller.upkeep.retention import prune_old
from tests.support import builders

BIG = (tables.ModelCall, tables.Span, tables.CallCredit, tables.Sample)

# Holds everything that pruning holds, and dies before it commits.
PRUNE_AND_WAIT = """
import sys, psycopg
connection = psycopg.connect(sys.argv[1])
print(connection.execute("SELECT prune_run(%s)", [sys.argv[2]]).fetchone()[0] > 0, flush=True)
sys.stdin.read()
"""


async def finished_run(database: Database, phase: str = "completed", *, days_ago: float = 0.0) -> tables.Run:
    run = await builders.add_run(database)
    _, (rollout, _) = await builders.add_group(database, run)
    await builders.finish_rollout(database, rollout, stdout_tail=OUTPUTS[0])
    async with database.session() as session:
        left = [Artifact("report.md", len(OUTPUTS[1]), OUTPUTS[1])]
        await add_artifacts(session, [(AttemptKey(rollout.id, 1), run.id, left)])
    await builders.add_call(database, rollout)
    await builders.add_tool_span(database, rollout, "memory")
    await builders.add_sample(database, rollout)
    await builders.end_run(database, run, phase, days_ago=days_ago)
    return run


async def counts(database: Database, run: tables.Run) -> list[int]:
    """Rows of the run in the big tables."""
    async with database.read() as session:
        counted = [
            await session.scalar(select(func.count()).select_from(table).where(table.run_id == run.id)) for table in BIG
        ]
    return [count or 0 for count in counted]


async def outputs(database: Database, run: tables.Run) -> tuple[str | None, bytes | None]:
    """The text of the run's one outcome, and its one artifact."""
    async with database.read() as session:
        said = await session.scalar(select(tables.Outcome.stdout_tail).where(tables.Outcome.run_id == run.id))
        left = await session.scalar(select(tables.Artifact.content).where(tables.Artifact.run_id == run.id))
    return said, left


OUTPUTS = ("what the agent said", b"what it left")


async def test_pruning_preserves_other_runs_and_the_runs_results(database: Database) -> None:
    gone, kept = [await finished_run(database) for _ in range(2)]
    before = await counts(database, kept)
    assert await prune_run(database, gone.id) > 0
    assert await prune_run(database, gone.id) == 0
    assert await counts(database, gone) == [0, 0, 0, 0]
    assert await counts(database, kept) == before == [1, 1, 0, 1]
    async with database.read() as session:
        rows = await session.execute(
            select(tables.Outcome.reward, tables.Outcome.kind, tables.Outcome.stdout_tail != "").where(
                tables.Outcome.run_id.in_([gone.id, kept.id])
            )
        )
        assert sorted(map(tuple, rows)) == [(1.0, "succeeded", False), (1.0, "succeeded", True)]
        assert await session.scalar(select(tables.Rollout.reward).where(tables.Rollout.id == f"{gone.id}.0.0")) == 1.0


async def test_pruning_a_run_prunes_its_policies(database: Database) -> None:
    run = await finished_run(database, days_ago=9)
    checker = await builders.add_run(database, dataset_id=run.dataset_id, **policy_columns(run.id, "checker"))
    async with database.session() as session:
        columns = {"id": "s", "run_id": checker.id, "group_id": f"{run.id}.0", "rollout_id": f"{run.id}.0.0"}
        sample = await session.scalar(select(tables.Sample).where(tables.Sample.run_id == run.id))
        assert sample is not None
        others = {one.name for one in tables.Sample.__table__.columns} - columns.keys()
        session.add(tables.Sample(**columns, **{name: getattr(sample, name) for name in others}))
    # The error names the run, whose policies a user does not know as runs.
    with pytest.raises(ActionRefused, match=f"cannot prune run {run.id}: it has not ended"):
        await prune_run(database, run.id)
    assert (await counts(database, run), await outputs(database, run)) == ([1, 1, 0, 1], OUTPUTS)
    await builders.end_run(database, checker, days_ago=9)
    done = set[str]()
    assert await prune_old(database, timedelta(days=7), done) == [run.id]
    assert [await counts(database, one) for one in (run, checker)] == [[0, 0, 0, 0]] * 2
    assert await prune_old(database, timedelta(days=7), done) == []


async def test_pruning_an_outcome_empties_only_its_texts(database: Database) -> None:
    run = await finished_run(database)
    for change in ("reward = 0", "stdout_tail = 'other'", "stdout_tail = '', stderr_tail = '', exit_code = 1"):
        with pytest.raises(Refused, match="append-only"):
            async with database.session() as session:
                await session.execute(text(f"UPDATE outcomes SET {change} WHERE run_id = :run"), {"run": run.id})


async def test_a_run_that_has_not_ended_is_not_pruned(database: Database) -> None:
    run = await builders.add_run(database)
    _, (rollout, _) = await builders.add_group(database, run)
    await builders.finish_rollout(database, rollout, stdout_tail="what the agent said")
    await builders.add_call(database, rollout)
    with pytest.raises(ActionRefused, match="has not ended"):
        await prune_run(database, run.id)
    assert await counts(database, run) == [1, 0, 0, 0]
    async with database.read() as session:
        assert await session.scalar(select(tables.Outcome.stdout_tail)) != ""
    with pytest.raises(UnknownRun, match="no run has the id 'run-none'"):
        await prune_run(database, "run-none")


async def test_a_run_with_an_evaluation_to_do_is_not_pruned(database: Database) -> None:
    run = await finished_run(database)
    async with database.session() as session:
        session.add(
            tables.Evaluation(
                id=evaluation_id(run.id, 1),
                run_id=run.id,
                number=1,
                dataset_id=run.dataset_id,
                policy_version=0,
                rollouts_per_task=1,
            )
        )
    with pytest.raises(ActionRefused, match="has an evaluation to do"):
        await prune_run(database, run.id)
    assert (await counts(database, run), await outputs(database, run)) == ([1, 1, 0, 1], OUTPUTS)


async def test_a_run_is_not_pruned_before_each_of_its_agents_has_done_an_evaluation(database: Database) -> None:
    run = await finished_run(database)
    evaluation = evaluation_id(run.id, 1)
    columns = {"run_id": run.id, "number": 1, "dataset_id": run.dataset_id, "rollouts_per_task": 1}
    async with database.session() as session:
        session.add(tables.Evaluation(id=evaluation, policy_version=0, max_tasks=1, agents=2, **columns))
    done = {"evaluation_id": evaluation, "size": 1, "state": "complete"}
    await builders.add_group(database, run, 0, **done, agent="first")
    with pytest.raises(ActionRefused, match="has an evaluation to do"):
        await prune_run(database, run.id)
    await builders.add_group(database, run, 1, **done, agent="second")
    assert await prune_run(database, run.id) > 0


async def test_writers_of_other_runs_succeed_while_runs_are_pruned(database: Database) -> None:
    ended = [await finished_run(database) for _ in range(6)]
    busy = await builders.add_run(database)
    _, rollouts = await builders.add_group(database, busy)
    done = asyncio.Event()

    async def repeat(write: Callable[[int], Awaitable[Any]]) -> int:
        number = 0
        while not done.is_set():
            await write(number)
            number += 1
        return number

    async def call_then_sample(number: int) -> None:
        """In one transaction and in credit's order: reads of the first tables, writes to the last."""
        async with database.session() as session:
            await session.scalar(select(func.count()).select_from(tables.ModelCall))
            await session.execute(text("SELECT count(*) FROM spans WHERE run_id = :run"), {"run": busy.id})
        await builders.add_sample(database, rollouts[0], branch=number, id=f"{rollouts[0].id}:{number}")

    writers = [
        asyncio.create_task(repeat(lambda _: builders.add_call(database, rollouts[0]))),
        asyncio.create_task(repeat(lambda _: builders.add_tool_span(database, rollouts[1], "look"))),
        asyncio.create_task(repeat(call_then_sample)),
    ]
    for run in ended:
        assert await prune_run(database, run.id) > 0
    done.set()
    calls, spans, samples = await asyncio.gather(*writers)
    assert await counts(database, busy) == [calls, spans, 0, samples]


async def test_pruning_retries_instead_of_blocking_long_transactions(database: Database) -> None:
    run, busy = await finished_run(database), await builders.add_run(database)
    _, (rollout, _) = await builders.add_group(database, busy)
    async with database.session() as reading:
        await reading.execute(text("SELECT count(*) FROM model_calls"))
        with pytest.raises(RecordsInUse):
            await prune_run(database, run.id, tries=2)
        await builders.add_call(database, rollout)
    assert await counts(database, run) == [1, 1, 0, 1]
    assert await prune_run(database, run.id) > 0


async def test_a_pruning_that_is_killed_in_the_middle_dropped_nothing(database: Database) -> None:
    run = await finished_run(database)
    command = [sys.executable, "-c", PRUNE_AND_WAIT, database.dsn, run.id]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == "True\n"
        os.kill(process.pid, signal.SIGKILL)
    assert await counts(database, run) == [1, 1, 0, 1]
    assert await prune_run(database, run.id) > 0


async def test_outputs_that_a_killed_pruning_left_are_emptied_by_the_next(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await finished_run(database, days_ago=9)
    with monkeypatch.context() as patch:
        patch.setattr(retention, "_EMPTY_OUTPUTS", text("SELECT killed here"))
        with pytest.raises(Exception, match="killed"):
            await prune_run(database, run.id)
    assert (await counts(database, run), await outputs(database, run)) == ([0, 0, 0, 0], OUTPUTS)
    assert await prune_old(database, timedelta(days=7), set()) == []
    assert await outputs(database, run) == ("", None)


async def test_late_rows_of_a_pruned_run_are_refused(database: Database) -> None:
    run = await finished_run(database)
    await prune_run(database, run.id)
    with pytest.raises(Refused, match="no partition of relation"):
        await builders.add_call(database, await _rollout(database, run))
    await write_telemetry(database, [], [])


async def _rollout(database: Database, run: tables.Run) -> tables.Rollout:
    async with database.read() as session:
        return await session.get_one(tables.Rollout, f"{run.id}.0.0")


async def test_the_policy_prunes_ended_runs_of_that_age_once(database: Database) -> None:
    old = await finished_run(database, "failed", days_ago=8)
    older = await finished_run(database, days_ago=9)
    young = await finished_run(database, days_ago=6)
    done = set[str]()
    assert await prune_old(database, timedelta(days=7), done) == [older.id, old.id]
    assert await prune_old(database, timedelta(days=7), done) == []
    assert await counts(database, young) == [1, 1, 0, 1]


async def test_the_api_prunes_for_administrators(database: Database, api_http: httpx.AsyncClient) -> None:
    run = await finished_run(database)
    assert (await api_http.get(f"/v1/runs/{run.id}")).json()["pruned"] is False
    writer = (await api_http.post("/v1/tokens", json={"name": "w", "scopes": ["write"]})).json()["token"]
    refused = await api_http.post(f"/v1/runs/{run.id}/prune", headers={"authorization": f"Bearer {writer}"})
    assert refused.status_code == 403
    first, repeat = [(await api_http.post(f"/v1/runs/{run.id}/prune")).json() for _ in range(2)]
    assert first["freed_bytes"] > 0
    assert repeat == {"run_id": run.id, "freed_bytes": 0}
    shown = (await api_http.get(f"/v1/runs/{run.id}")).json()
    assert (shown["pruned"], shown["allowed_actions"]) == (True, [])
    assert (await api_http.post(f"/v1/runs/{run.id}/evaluations", json={})).status_code == 409
    assert (await api_http.get(f"/v1/rollouts/{run.id}.0.0/calls")).json()["items"] == []
    assert (await api_http.post("/v1/runs/run-none/prune")).status_code == 404


async def test_the_api_names_the_reason_for_not_pruning_a_run(database: Database, api_http: httpx.AsyncClient) -> None:
    run = await builders.add_run(database)
    answer = await api_http.post(f"/v1/runs/{run.id}/prune")
    assert answer.status_code == 409
    assert "it has not ended" in answer.json()["detail"]
