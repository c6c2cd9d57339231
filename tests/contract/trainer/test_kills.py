"""The trainer process, killed at every fault point of a step: its weights equal those of an undisturbed trainer."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from leyden.libs.faults import FaultInjector
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.services.trainer.checkpoint import describe
from tests.contract.trainer.test_steps import Case

POINTS = (
    "trainer.updated",
    "trainer.weights_written",
    "trainer.version_unnamed",
    "trainer.exported",
    "trainer.step_written",
    "trainer.replays_written",
    "trainer.committed",
    "trainer.state_written",
    "trainer.checkpoint_unnamed",
    "trainer.saved",
    "trainer.versions_marked",
)
STEPS = 4


async def prepared(database: Database, dsn: str, model: Path, folder: Path, redis_url: str) -> Case:
    case = await Case(database, dsn, model, folder, redis_url).open(
        steps=STEPS,
        algorithm={"mini_batches": 2, "epochs": 2},
        sampling={"replay": {"share": 0.5}},
        keep_checkpoints=1,
    )
    for number in range(2 * STEPS):
        await case.add_group(number, version=number // 2)
    return case


async def train(case: Case, injector: FaultInjector) -> int:
    """The exit status of one trainer process."""
    settings = case.settings()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "leyden.services.trainer", "--run-id", case.run.id),
        cwd=Path(__file__).parents[3],
        env={
            "PATH": os.environ["PATH"],
            "LEYDEN_DATABASE_URL": settings.database_url,
            "LEYDEN_REDIS_URL": settings.redis_url,
            "LEYDEN_LOG_LEVEL": "warning",
            "TRAINER_PORT": "0",
            "TRAINER_FOLDER": str(case.folder),
            "TRAINER_MODEL_PATH": str(case.model),
            "TRAINER_THREADS": "1",
            "TRAINER_DEVICE": "cpu",
            **injector.environment,
        },
    )
    try:
        async with asyncio.timeout(120):
            return await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.timeout(900)
async def test_a_step_killed_at_every_point_is_recorded_once_with_the_weights_of_an_undisturbed_one(
    database: Database, postgres_dsn: str, tiny_model: Path, tmp_path: Path, redis_url: str
) -> None:
    undisturbed = await prepared(database, postgres_dsn, tiny_model, tmp_path / "undisturbed", redis_url)
    await undisturbed.train()
    killed = await prepared(database, postgres_dsn, tiny_model, tmp_path / "killed", redis_url)
    injector = FaultInjector(tmp_path / "faults")
    for point in POINTS:
        injector.arm(point)
        assert (point, await train(killed, injector)) == (point, -signal.SIGKILL)
        assert injector.fired(point, 0.0)
    assert await train(killed, injector) == 0

    wanted, found = await undisturbed.versions(), await killed.versions()
    assert {number: one.content_sha256 for number, one in found.items()} == {
        number: one.content_sha256 for number, one in wanted.items()
    }
    assert sorted(step.number for step in await killed.rows(tables.Step)) == list(range(1, STEPS + 1))  # type: ignore[attr-defined]
    samples = await killed.consumed()
    assert samples == {
        f"{killed.run.id}.{number}.{sibling}:0": 1 + number // 2 for number in range(2 * STEPS) for sibling in (0, 1)
    }
    # Each step from the second uses one group of the step before again, once.
    assert await killed.replays() == {step: [(f"{killed.run.id}.{2 * step - 3}", 1)] for step in range(2, STEPS + 1)}
    folder = killed.folder / killed.run.id
    assert describe(Path(found[STEPS].path)).content_sha256 == found[STEPS].content_sha256
    assert sorted(path.name for path in folder.glob("*/*")) == [str(STEPS)] * 2
