"""Removes what an optimisation made on the platform: runs of versions, and datasets of examples."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress

from leyden.libs.client import Client, Conflict, NotFound
from leyden.libs.prompts.journal import Journal

POLL_SECONDS = 0.5
DELETION_SECONDS = 60.0
"""The controller deletes a run within seconds."""


def remove_made(leyden: Client, journal: Journal, best: str | None) -> list[str]:
    """Deletes the runs and datasets that the journal names; a repeat does the rest. Datasets of other runs stay.

    Args:    best: the run that stays
    Returns: reasons for which runs were not deleted
    Raises:  LeydenError
    """
    runs = {str(one["run"]) for one in journal.all("evaluation").values()}
    runs |= {str(one["id"]) for one in journal.all("run").values()}
    # One that was dropped has another one in its place.
    runs |= {one.partition(".")[0] for one in journal.all("dropped")}
    left = [reason for one in sorted(runs - {best}) if (reason := _refusal(leyden, one))]
    if not left:
        left = _still_there(leyden, runs - {best})
    for dataset in journal.all("dataset"):
        with suppress(NotFound, Conflict):
            leyden.delete_dataset(dataset)
    return left


def _refusal(leyden: Client, run_id: str) -> str | None:
    try:
        leyden.delete_run(run_id)
    except NotFound:
        return None
    except Conflict as error:
        return str(error)
    return None


def _still_there(leyden: Client, runs: Iterable[str]) -> list[str]:
    """Waits until the controller has deleted the runs, whose datasets are free then."""
    until, left = time.monotonic() + DELETION_SECONDS, sorted(runs)
    while left:
        with suppress(NotFound):
            while time.monotonic() < until:
                leyden.run(left[0])
                time.sleep(POLL_SECONDS)
            return [f"the controller has not deleted {', '.join(left)} within {DELETION_SECONDS:g} s"]
        left.pop(0)
    return []
