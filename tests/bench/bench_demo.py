"""The demo, once: how long it takes, and where its time goes. `make demo` beside a clock, with its records counted."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psycopg

from leyden.libs.cli.demo import DemoOptions
from leyden.libs.store.embedded import EmbeddedPostgres
from tests.bench.rows import Goal, Row

ASKED_FOR = True
ROOT = Path(__file__).parents[2]
AGENTS_PYTHON = ROOT / ".venv-agents" / "bin" / "python"
GOAL_SECONDS = 600
STOP_SECONDS = 120
COUNTS = """
    SELECT (SELECT count(*) FROM steps),
           (SELECT count(*) FROM outcomes WHERE kind = 'succeeded'),
           (SELECT count(DISTINCT rollout_id) FROM model_calls WHERE status = 'completed')"""


def rows(repeats: int) -> list[Row]:
    """One run of many minutes, however many repeats are asked for."""
    with tempfile.TemporaryDirectory(prefix="leyden-demo-") as folder:
        told = _demo(Path(folder))
        _check(Path(folder), told)
    seconds = told["seconds"]
    phases = ", ".join(f"{name} {spent:.0f} s" for name, spent in told["phases"].items())
    first, success = told["memory_first"], told["success"]
    return [
        Row(
            part="demo",
            name="the demo, 7 steps and two evaluations",
            unit="s",
            repeats=[seconds],
            baseline_name="ten minutes",
            baseline=[GOAL_SECONDS],
            goal=Goal(at_most=GOAL_SECONDS),
            note=f"Measured once. {phases}. Memory first {first[0]:.0%} to {first[1]:.0%}, success {success[0]:.0%} to"
            f" {success[1]:.0%}; steps, outcomes and calls counted in Postgres.",
        )
    ]


def _demo(home: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "leyden.libs.cli", "demo", "--home", str(home), "--fresh", "--require-rise"]
    if AGENTS_PYTHON.exists():
        command += ["--agent-python", str(AGENTS_PYTHON)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            said, _ = process.communicate()
        except BaseException:
            # Killed, it would leave its Postgres behind.
            process.terminate()
            process.communicate(timeout=STOP_SECONDS)
            raise
    assert process.returncode == 0, f"the demo ended with status {process.returncode}"
    told: dict[str, Any] = json.loads(said.splitlines()[-1])
    return told


def _check(home: Path, told: dict[str, Any]) -> None:
    """Raises AssertionError unless the store holds what the demo told."""
    options = DemoOptions()
    server = EmbeddedPostgres(home / "postgres")
    try:
        with psycopg.connect(server.start()) as connection:
            found = connection.execute(COUNTS).fetchone()
    finally:
        server.stop()
    rollouts = options.steps * options.groups_per_step * options.group_size + 2 * options.evaluation_tasks
    assert found is not None and found[0] == told["steps"] == options.steps, found
    assert found[1] >= rollouts and found[2] >= rollouts, found
    assert told["memory_first"][1] > told["memory_first"][0]
