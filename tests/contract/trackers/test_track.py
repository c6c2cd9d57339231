"""`leyden run track` as a real process that is killed: a tracker has each point of a run once."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from leyden.libs.client import Client
from leyden.libs.contracts import ids
from leyden.libs.contracts.api.runs import Run
from leyden.libs.contracts.config import RunConfig
from leyden.libs.contracts.states import RunPhase
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.libs.store.engines import record_swap
from leyden.libs.store.runs import actions
from leyden.libs.trackers import follow as follow_module
from leyden.libs.trackers.follow import follow
from leyden.libs.trackers.tensorboard import TensorBoard
from tests.fakes.served_api import TOKEN
from tests.support import builders
from tests.support.event_files import shown
from tests.support.waiting import eventually

STARTED = datetime(2026, 1, 1, tzinfo=UTC)


async def add_step(database: Database, run: tables.Run, number: int) -> None:
    metrics = {"loss": number / 4, "entropy": None, "kl_reference": 0.0, "learning_rate": 1e-6}
    moment = STARTED + timedelta(seconds=number)
    columns = {"metrics": metrics, "checkpoint": "", "started_at": moment, "created_at": moment}
    async with database.session() as session:
        session.add(tables.Step(run_id=run.id, number=number, **columns))


async def add_evaluation(
    database: Database, run: tables.Run, version: int, reward: float, *, number: int = 1, tasks: int = 1
) -> None:
    async with database.session() as session:
        evaluation = ids.evaluation_id(run.id, number)
        columns = {"dataset_id": run.dataset_id, "policy_version": version, "rollouts_per_task": 1, "max_tasks": tasks}
        session.add(tables.Evaluation(id=evaluation, run_id=run.id, number=number, **columns))
    columns = {"size": 1, "evaluation_id": evaluation, "dataset_id": run.dataset_id, "admitted_version": version}
    for task in range(tasks):
        _, [rollout] = await builders.add_group(database, run, task, task_number=task, **columns)
        await builders.finish_rollout(database, rollout, reward=reward)


def command(url: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "leyden.libs.cli", "--url", url, "--token", TOKEN, "run", "track", *arguments]


@contextmanager
def tracking(url: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that follows; killed at the block's end."""
    process = subprocess.Popen(command(url, *arguments))
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def followed(url: str, folder: Path, *runs: tables.Run) -> list[str]:
    """Writes what there is now, in this process; the lines that it tells."""
    told: list[str] = []

    def work() -> None:
        with Client(url, TOKEN) as leyden:
            follow(leyden, [run.id for run in runs], TensorBoard(folder), told.append, once=True)

    await asyncio.to_thread(work)
    return told


async def to_its_end(client: Client, folder: Path, run: tables.Run, told: list[str]) -> None:
    """Follows a run in this process until it has ended."""

    def work() -> None:
        with client as leyden:
            follow(leyden, [run.id], TensorBoard(folder), told.append, poll_seconds=0.05)

    await asyncio.to_thread(work)


def steps_of(folder: Path, name: str) -> list[int]:
    return [step for path in folder.glob("*/") for tag, step, _ in shown(path) if tag == name]


async def test_a_killed_tracker_loses_and_doubles_no_point(api_url: str, database: Database, tmp_path: Path) -> None:
    run = await builders.add_run(database)
    given = (run.id, "--to", f"tensorboard:{tmp_path}")
    for start in (1, 4):
        with tracking(api_url, *given) as process:
            for number in range(start, start + 3):
                await add_step(database, run, number)
                # Killed between two points: at the first one that is seen, or at a later one.
                await eventually(lambda seen=start: max(steps_of(tmp_path, "loss"), default=0) >= seen)
            process.send_signal(signal.SIGKILL)
            process.wait()
    await add_step(database, run, 7)
    await add_evaluation(database, run, 5, 0.5)
    await builders.end_run(database, run)
    with tracking(api_url, *given) as process:
        assert await asyncio.to_thread(process.wait, 120) == 0
    assert await followed(api_url, tmp_path, run) == []
    [folder] = tmp_path.iterdir()
    async with database.read() as session:
        dataset = await session.get_one(tables.Dataset, run.dataset_id)
    evaluation = f"evaluation.{dataset.name}.reward_mean"
    of_steps = {"loss": 7, "learning_rate": 7, "groups_stale": 7, "queued_rollouts": 7, "wait_seconds": 6}
    assert Counter(tag for tag, *_ in shown(folder)) == {**of_steps, evaluation: 1}
    assert steps_of(tmp_path, "loss") == list(range(1, 8))
    assert [(step, value) for tag, step, value in shown(folder) if tag == evaluation] == [(5, 0.5)]


async def test_a_resumed_run_goes_on_and_a_continued_one_has_a_folder_of_its_own(
    api_url: str, database: Database, tmp_path: Path
) -> None:
    first, other = await builders.add_run(database), await builders.add_run(database)
    for numbers in ((1, 2), (3,)):
        for number in numbers:
            await add_step(database, first, number)
        assert len(await followed(api_url, tmp_path, first)) == 1
    for number in (1, 2):
        await add_step(database, other, number)
    [told] = await followed(api_url, tmp_path, first, other)
    assert told == f"test run ({other.id}): 9 points, up to step 2"
    folders = {run.id: tmp_path / f"test_run.{run.id}" for run in (first, other)}
    found = {run: [step for tag, step, _ in shown(folder) if tag == "loss"] for run, folder in folders.items()}
    assert found == {first.id: [1, 2, 3], other.id: [1, 2]}


async def swap(database: Database, run: tables.Run, version: int, seconds: float) -> None:
    async with database.session() as session:
        await record_swap(session, run.id, version, f"http://engine-{seconds:g}", seconds)


async def test_the_pause_of_engines_is_written_once_it_grows_no_more(
    api_url: str, database: Database, tmp_path: Path
) -> None:
    run = await builders.add_run(database)
    await add_step(database, run, 1)
    await swap(database, run, 1, 2.0)
    await followed(api_url, tmp_path, run)
    await add_step(database, run, 2)
    await followed(api_url, tmp_path, run)
    # Another engine was loading version 1 while step 2 was made.
    await swap(database, run, 1, 4.0)
    await swap(database, run, 2, 1.0)
    await add_step(database, run, 3)
    await followed(api_url, tmp_path, run)
    assert pauses(tmp_path) == [(1, 3.0)]
    await swap(database, run, 3, 1.5)
    await add_step(database, run, 4)
    await swap(database, run, 4, 5.0)
    await builders.end_run(database, run)
    await followed(api_url, tmp_path, run)
    assert pauses(tmp_path) == [(1, 3.0), (2, 1.0), (3, 1.5), (4, 5.0)]


async def test_engines_that_load_the_last_version_after_their_run_count(
    api_url: str, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow_module, "LATE_SECONDS", 3600.0)
    run, phases = await builders.add_run(database), list[RunPhase]()
    await add_step(database, run, 1)
    await swap(database, run, 1, 2.0)

    class Watched(Client):
        def run(self, run_id: str) -> Run:
            found = super().run(run_id)
            phases.append(found.phase)
            return found

    following = asyncio.create_task(to_its_end(Watched(api_url, TOKEN), tmp_path, run, []))
    await eventually(lambda: phases)
    await builders.end_run(database, run)
    # The second of them comes after all that the first one had written.
    await eventually(lambda: phases.count(RunPhase.COMPLETED) >= 2)
    assert pauses(tmp_path) == []
    await swap(database, run, 1, 4.0)
    monkeypatch.setattr(follow_module, "LATE_SECONDS", 0.0)
    await following
    assert pauses(tmp_path) == [(1, 3.0)]


async def test_a_run_whose_engines_never_load_its_last_version_is_not_waited_for_long(
    api_url: str, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow_module, "LATE_SECONDS", 0.5)
    run, told = await builders.add_run(database), list[str]()
    await add_step(database, run, 1)
    following = asyncio.create_task(to_its_end(Client(api_url, TOKEN), tmp_path, run, told))
    await eventually(lambda: told)
    await builders.end_run(database, run)
    await following
    assert (steps_of(tmp_path, "loss"), pauses(tmp_path)) == ([1], [])


def pauses(folder: Path) -> list[tuple[int, float]]:
    return [
        (step, value) for path in folder.glob("*/") for tag, step, value in shown(path) if tag == "swap_seconds_mean"
    ]


async def test_an_evaluation_of_fewer_tasks_than_the_first_one_is_no_point(
    api_url: str, database: Database, tmp_path: Path
) -> None:
    run = await builders.add_run(database)
    for number, (tasks, reward) in enumerate([(2, 0.25), (1, 1.0), (2, 0.5)], 1):
        await add_evaluation(database, run, number, reward, number=number, tasks=tasks)
    await followed(api_url, tmp_path, run)
    [folder] = tmp_path.iterdir()
    assert [(step, value) for _, step, value in shown(folder)] == [(1, 0.25), (3, 0.5)]


async def test_a_further_policy_has_a_folder_of_its_own(api_url: str, database: Database, tmp_path: Path) -> None:
    await builders.add_dataset(database)
    roles = [{"name": "writer", "agent_name": "writer"}, {"name": "checker", "policy": "checker"}]
    document = builders.run_document(roles=roles, policies={"checker": {"pool": "second"}})
    async with database.session() as session:
        made = await actions.create_run(session, RunConfig.model_validate(document))
        rows = [await session.get_one(tables.Run, one) for one in (made.id, made.policies["checker"].id)]
    for row, steps in zip(rows, (2, 1), strict=True):
        for number in range(1, steps + 1):
            await add_step(database, row, number)
    await followed(api_url, tmp_path, rows[0])
    folders = [tmp_path / f"test_run.{rows[0].id}", tmp_path / f"test_run_checker.{rows[1].id}"]
    assert sorted(tmp_path.iterdir()) == sorted(folders)
    assert [[step for tag, step, _ in shown(folder) if tag == "loss"] for folder in folders] == [[1, 2], [1]]
