"""`leyden prompts optimise` as a real process that is killed, beside the real API and an agent in processes.

The stand-in for controller and runner starts the agent that a run's document names, with its environment.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from leyden.libs.client import Client
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from tests.fakes.judge import ScriptedJudge, judge_beside
from tests.fakes.rewriter import KEY, TASKS, document, optimising, rewritten
from tests.fakes.served_api import TOKEN
from tests.support import builders
from tests.support.waiting import eventually


@pytest.fixture
def rewriter() -> Iterator[ScriptedJudge]:
    with judge_beside() as scripted:
        scripted.answer = rewritten
        yield scripted


async def work_once(database: Database) -> int:
    """Finishes the rollouts of new evaluations; the number of agents that it started."""
    async with database.read() as session:
        done = select(tables.Group.evaluation_id).where(tables.Group.evaluation_id.is_not(None))
        new = (await session.scalars(select(tables.Evaluation).where(tables.Evaluation.id.not_in(done)))).all()
        runs = {one.id: await session.get_one(tables.Run, one.run_id) for one in new}
        tasks = {
            one.id: (await session.scalars(select(tables.Task).where(tables.Task.dataset_id == one.dataset_id))).all()
            for one in new
        }
    for one in new:
        for task in sorted(tasks[one.id], key=lambda task: task.number):
            columns = {"evaluation_id": one.id, "dataset_id": one.dataset_id, "task_number": task.number}
            _, [rollout] = await builders.add_group(database, runs[one.id], task.number, size=1, **columns)
            said = await asyncio.to_thread(started, runs[one.id].config["agent"], task.payload)
            reward = json.loads(said.splitlines()[-1])["reward"]
            await builders.finish_rollout(database, rollout, reward=reward, stdout_tail=said)
    return sum(map(len, tasks.values()))


def started(agent: dict[str, Any], task: dict[str, Any]) -> str:
    """The output of an agent."""
    environment = agent["environment"] | {"LEYDEN_TASK": json.dumps(task)}
    arguments = [sys.executable, *agent["command"][1:]]
    return subprocess.run(arguments, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


@asynccontextmanager
async def working(database: Database) -> AsyncIterator[list[int]]:
    """A stand-in for controller and runner. Gives the numbers of agents that it started."""
    counts = list[int]()

    async def work() -> None:
        while True:
            counts.append(await work_once(database))
            await asyncio.sleep(0.05)

    task = asyncio.create_task(work())
    try:
        yield counts
    finally:
        task.cancel()


@pytest.mark.timeout(600)
async def test_a_killed_optimisation_goes_on_and_finds_the_prompt(
    api_url: str, database: Database, rewriter: ScriptedJudge, tmp_path: Path
) -> None:
    (tmp_path / "run.json").write_text(json.dumps(document(PROMPTED_OFFLINE="1")))
    with Client(api_url, TOKEN) as leyden:
        await asyncio.to_thread(leyden.upload_dataset, "words", TASKS)
        async with working(database) as counts:
            with optimising(api_url, TOKEN, rewriter, tmp_path):
                await eventually(lambda: rewriter.bodies, "a reflection", 240.0)
            with optimising(api_url, TOKEN, rewriter, tmp_path) as process:
                said, _ = await asyncio.to_thread(process.communicate, None, 240)
        runs = await asyncio.to_thread(lambda: list(leyden.runs()))
    assert process.returncode == 0
    # A placeholder that the rewriter makes up stands for itself.
    text = "Answer in capital letters. {{task.secret}}"
    shown = json.loads(said)
    assert shown["score"] == 1.0 and shown["prompts"] == {"SYSTEM_PROMPT": text}
    assert (tmp_path / "out/SYSTEM_PROMPT.txt").read_text() == text
    # One run a version, and no task of a version's evaluation twice: 4 and 2 and 2 of the first, 2 of the second,
    # 2 and 4 of the third, at most.
    versions = json.loads((tmp_path / "out/versions.json").read_text())["versions"]
    assert {one["run"] for one in versions} == {one.id for one in runs}
    assert [one["score"] for one in versions] in ([0.0, None, 1.0], [0.0, 1.0])
    assert sum(counts) <= 16
    assert set(rewriter.keys) == {f"Bearer {KEY}"}
