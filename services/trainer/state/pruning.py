"""Removes a run's old files: those that no resumed trainer, engine, comparison or evaluation reads again."""

from __future__ import annotations

import asyncio
from pathlib import Path

from leyden.libs.contracts.config import RunConfig
from leyden.libs.faults import fault_point
from leyden.libs.store import training
from leyden.libs.store.database import Database
from leyden.services.trainer.state.folders import remove_folder


async def prune(database: Database, run_id: str, folder: Path, config: RunConfig, step: int, whole: int) -> None:
    """Removes old files, a killed trainer's too. Rows are marked first, so that nobody reads a vanishing file.

    The newest step whose files are complete stays with all that restores it: the steps after it might have to be made
    again.

    Args: folder: the run's; step: the last recorded one; whole: the newest one whose files are complete
    """
    oldest = max(0, min(step - config.training.keep_checkpoints + 1, whole))
    # Later steps have a later one as their KL reference.
    reference = config.algorithm.reference_version(oldest)
    # The oldest that may have sampled a token of the next step, a replayed one too.
    sampled = step - config.sampling.max_policy_lag if step < config.training.steps else oldest
    asked = run_id, oldest, reference, sampled
    async with database.read() as session:
        retained = await training.retained_steps(session, *asked)
    # Marked rows need no commit: a trainer whose commits lose their answers would try it for ever.
    if retained.unmarked:
        async with database.session() as session:
            retained = await training.prune_versions(session, *asked)
    fault_point("trainer.versions_marked")
    gone = _others(folder / "versions", retained.versions) + _others(folder / "checkpoints", retained.checkpoints)
    for found in gone:
        if int(found.name) < oldest:
            await asyncio.to_thread(remove_folder, found)


def _others(parent: Path, retained: set[int]) -> list[Path]:
    """The folders of other steps than these."""
    return [found for found in parent.glob("[0-9]*") if found.name.isdecimal() and int(found.name) not in retained]
