"""Runs that the same command finds again."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rich.console import Console

from leyden.libs.cli.view.watch import watch_run
from leyden.libs.client import Client
from leyden.libs.contracts.api.runs import Run


def named(name: str, document: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the document with a name that depends on all of it."""
    digest = hashlib.sha256(json.dumps(document, sort_keys=True, default=str).encode()).hexdigest()[:8]
    return {**document, "name": f"{name}-{digest}"}


def completed(
    client: Client,
    name: str,
    create: Callable[[], Run],
    agents: Callable[[Run], AbstractContextManager[object]] = nullcontext,
) -> Run:
    """Returns the run of this name when it has completed; creates it where there is none.

    Args:   agents: plays the attempts of a run in its block, where the platform does not
    Raises: RuntimeError: it has ended otherwise
    """
    alive = [run for run in client.runs(name=name) if run.phase not in ("failed", "cancelled")]
    run = alive[0] if alive else create()
    if run.intent == "paused":
        run = client.resume_run(run.id)
    report(f"{name}: {'found' if alive else 'created'} {run.id}")
    with agents(run):
        run = watch_run(client, run.id, Console(quiet=True))
    if run.phase != "completed":
        raise RuntimeError(f"run {run.id} is {run.phase}: {run.reason}")
    report(f"{name}: completed after {run.progress.step} steps")
    return run


def newest(client: Client, run_id: str) -> str:
    """Returns the folder of the newest version of a run."""
    return list(client.policies(run_id))[-1].path


def report(line: str) -> None:
    """Prints a line of progress."""
    print(line, file=sys.stderr, flush=True)
