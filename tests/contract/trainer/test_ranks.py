"""A trainer of two real processes under `torchrun`: one is killed in a step, one alone is asked to stop."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import BinaryIO

import pytest

from leyden.libs.faults import FaultInjector
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.services.controller.trainers.backend import last_line
from tests.contract.trainer.test_kills import STEPS, prepared, with_own_critic
from tests.contract.trainer.test_steps import Case
from tests.support.long import long_only

SECONDS = 150

POINTS = (STEP, SHARDS) = ("trainer.follower_step", "trainer.follower_shards_written")

EXHAUSTED = """
import os, runpy, torch
from leyden.services.trainer.state import assembly
from leyden.services.trainer.step import step
if os.environ["RANK"] == "1":
    {part} = lambda *_: torch.empty(2**50)
runpy.run_module("leyden.services.trainer", run_name="__main__", alter_sys=True)
"""
"""A trainer whose second process runs out of memory."""


@asynccontextmanager
async def trainer(
    case: Case, injector: FaultInjector, *, program: Path | None = None, output: BinaryIO | None = None, **changes: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """`torchrun` with two processes of a run's trainer, or of a program that becomes one.

    Args: output: of both processes and `torchrun`
    """
    settings = case.settings()
    module = ("-m", "leyden.services.trainer") if program is None else (str(program),)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        *(*module, "--run-id", case.run.id),
        stdout=output,
        stderr=output,
        cwd=Path(__file__).parents[3],
        env={
            "PATH": os.environ["PATH"],
            "OMP_NUM_THREADS": "1",
            "LEYDEN_DATABASE_URL": settings.database_url,
            "LEYDEN_REDIS_URL": settings.redis_url,
            "LEYDEN_LOG_LEVEL": "warning",
            "TRAINER_FOLDER": str(case.folder),
            "TRAINER_MODEL_PATH": str(case.model),
            "TRAINER_THREADS": "1",
            "TRAINER_DEVICE": "cpu",
            "TRAINER_RANK_TIMEOUT_SECONDS": "60",
            **injector.environment,
            **changes,
        },
    )
    try:
        async with asyncio.timeout(SECONDS):
            yield process
            await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def train(case: Case, injector: FaultInjector) -> int | None:
    async with trainer(case, injector) as process:
        pass
    return process.returncode


def rank_1(parent: int) -> int | None:
    """The process id of a torchrun's second worker."""
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        if b"\0RANK=1\0" in b"\0" + Path(f"/proc/{child}/environ").read_bytes():
            return int(child)
    return None


@long_only
@pytest.mark.timeout(600)
@pytest.mark.parametrize("prepare", [prepared, with_own_critic])
async def test_a_trainer_of_which_one_process_dies_ends_and_resumes_with_the_weights_of_an_undisturbed_one(
    database: Database,
    postgres_dsn: str,
    tiny_model: Path,
    tmp_path: Path,
    redis_url: str,
    prepare: Callable[[Database, str, Path, Path, str], Awaitable[Case]],
) -> None:
    injector = FaultInjector(tmp_path / "faults")
    undisturbed = await prepare(database, postgres_dsn, tiny_model, tmp_path / "undisturbed", redis_url)
    assert await train(undisturbed, injector) == 0
    wanted = {number: one.content_sha256 for number, one in (await undisturbed.versions()).items()}
    assert len(wanted) == STEPS + 1

    killed = await prepare(database, postgres_dsn, tiny_model, tmp_path / "killed", redis_url)
    injector.arm(STEP)
    assert await train(killed, injector) == 1
    assert injector.fired(STEP, 0.0)
    injector.arm(SHARDS)
    assert await train(killed, injector) == 1
    assert injector.fired(SHARDS, 0.0)
    # The step is recorded, and its checkpoint has no name: a part may be there, and rank 0 did not know it.
    assert [step.number for step in await killed.rows(tables.Step)] == [1]  # type: ignore[attr-defined]
    assert not [path for path in (killed.folder / killed.run.id / "checkpoints").iterdir() if path.name.isdecimal()]
    injector.arm("trainer.saved")
    assert await train(killed, injector) == 1
    assert injector.fired("trainer.saved", 0.0)
    assert await train(killed, injector) == 0
    assert {number: one.content_sha256 for number, one in (await killed.versions()).items()} == wanted
    assert sorted(step.number for step in await killed.rows(tables.Step)) == list(range(1, STEPS + 1))  # type: ignore[attr-defined]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("step._prepare", "the step needs too much memory: lower training.micro_batch_tokens (4096)"),
        ("assembly.place_policy", "the learner needs too much memory: train adapters with training.lora"),
    ],
)
async def test_the_settings_that_a_process_without_memory_names_are_the_trainers_last_words(
    database: Database, postgres_dsn: str, tiny_model: Path, tmp_path: Path, redis_url: str, part: str, words: str
) -> None:
    case = await Case(database, postgres_dsn, tiny_model, tmp_path / "runs", redis_url).open(steps=1)
    for number in range(2):
        await case.add_group(number)
    program, injector = tmp_path / "program.py", FaultInjector(tmp_path / "faults")
    program.write_text(EXHAUSTED.format(part=part))
    with (tmp_path / "output").open("w+b") as output:
        changes = {"TRAINER_RANK_TIMEOUT_SECONDS": "600"}
        async with trainer(case, injector, program=program, output=output, **changes) as process:
            pass
        output.seek(0)
        line = last_line(output.read().decode())
    assert process.returncode == 1
    assert words in line


@long_only
@pytest.mark.timeout(300)
async def test_processes_wait_for_groups_longer_than_for_each_other_and_leave_together(
    database: Database, postgres_dsn: str, tiny_model: Path, tmp_path: Path, redis_url: str
) -> None:
    case = await Case(database, postgres_dsn, tiny_model, tmp_path / "runs", redis_url).open(steps=2)
    injector = FaultInjector(tmp_path / "faults")
    async with trainer(case, injector, TRAINER_RANK_TIMEOUT_SECONDS="12") as process:
        while not await case.versions():
            await asyncio.sleep(0.5)
        await asyncio.sleep(15)
        assert process.returncode is None
        for number in range(2):
            await case.add_group(number)
        while 1 not in await case.versions():
            await asyncio.sleep(0.2)
        follower = rank_1(process.pid)
        assert follower is not None
        os.kill(follower, signal.SIGTERM)
    assert process.returncode == 0

    # One process continues what two have written.
    for number in range(2, 4):
        await case.add_group(number, version=1)
    await case.train()
    assert sorted(await case.versions()) == [0, 1, 2]
