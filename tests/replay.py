"""Recomputes a run's policy from its record: `python -m tests.replay DSN RUN BASE_MODEL`.

An undisturbed learner trains on the recorded samples of each step, in order. Its weights must have the hash that the
store recorded for each version. Equal hashes prove, whatever was killed meanwhile, that every step saw the samples on
its record, and that no sample was lost or applied twice. Prints the versions that differ, as a JSON list.

The bits are equal only on the machine and with the number of threads (one) that trained.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from leyden.libs.contracts.config import RunConfig
from leyden.libs.store import training
from leyden.libs.store.database import Database, ReadSession
from leyden.libs.store.runs.teachers import read_teacher
from tests.support.shared import ROOT

if TYPE_CHECKING:
    from leyden.services.trainer.step.learner import Learner


def differing_versions(dsn: str, run_id: str, base: Path) -> list[int]:
    """Versions of a run whose weights differ from those recomputed from the base model and the recorded samples."""
    command = [sys.executable, "-m", "tests.replay", dsn, run_id, str(base)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    replay = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if replay.returncode != 0:
        raise RuntimeError(f"the policy of {run_id} could not be recomputed:\n{replay.stderr[-3000:]}")
    versions: list[int] = json.loads(replay.stdout.splitlines()[-1])
    return versions


async def _replay(dsn: str, run_id: str, base: Path) -> list[int]:
    # Imported in the replaying process alone: its caller need not load torch.
    from leyden.services.trainer.state.assembly import assemble_learner, make_accelerator

    database = Database(dsn)
    try:
        async with database.read() as session:
            config = await training.read_run_config(session, run_id)
            computation = await training.read_computation(session, run_id)
            config = config.computed_as(computation) if computation else config
            place = make_accelerator("cpu", config.training.precision or "float32")
            learner = assemble_learner(base, config, place, teacher=await _teacher(session, config, run_id))
            last = await training.last_committed_step(session, run_id)
            steps = range(1, 1 + (last.number if last else 0))
            return [step for step in steps if not await _reproduces(session, run_id, config, learner, step, base)]
    finally:
        await database.close()


async def _teacher(session: ReadSession, config: RunConfig, run_id: str) -> Path | None:
    named = config.algorithm.distillation
    if named is None:
        return None
    if named.model is not None:
        return Path(named.model)
    found = await read_teacher(session, named.run or run_id, named.version or 0)
    assert found is not None
    return Path(found.path)


async def _reproduces(
    session: ReadSession, run_id: str, config: RunConfig, learner: Learner, step: int, base: Path
) -> bool:
    """Makes one step and returns whether its weights are those on record."""
    from leyden.services.trainer.state.hints import with_hints
    from leyden.services.trainer.state.resume import recorded_samples
    from leyden.services.trainer.state.versions import export_version
    from leyden.services.trainer.step.step import optimizer_step

    samples, zero_variance = await recorded_samples(session, run_id, step, config)
    samples = await with_hints(session, samples, config, base)
    optimizer_step(learner, samples, config, zero_variance=zero_variance)
    recorded = await training.read_version(session, run_id, step)
    with tempfile.TemporaryDirectory() as folder:
        export = export_version(learner, base, Path(folder) / "version")
    return recorded is not None and export.content_sha256 == recorded.content_sha256


def main() -> int:
    """Prints the versions that differ."""
    dsn, run_id, base = sys.argv[1:]
    print(json.dumps(asyncio.run(_replay(dsn, run_id, Path(base)))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
