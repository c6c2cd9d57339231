"""`make soak KILLS=300 SEED=1`: trainings of a bandit while services are killed at seeded random moments.

The last line is one JSON object, counted in the store by SQL: kills, calls_lost, samples_doubled,
steps_without_samples, runs_completed, runs. Exit status 1 when any promise was broken.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from libs.cli.platform import Options, Platform
from libs.cli.services import PORTS
from libs.client import Leyden
from services.engine.tiny import make_tiny_model
from tests.truth import lost_calls, violations

BANDIT = Path(__file__).parent / "agents" / "bandit.py"
VICTIMS = ("gateway", "runner", "collector", "credit", "controller", "api", "engine", "trainer")
ENDED = {"completed", "failed", "cancelled"}
RUN_SECONDS = 900.0


def bandit_run(log: Path, name: str, steps: int, **sections: dict[str, Any]) -> dict[str, Any]:
    """A run document of the two-armed bandit; sections given extend the defaults."""
    document: dict[str, dict[str, Any]] = {
        "agent": {"command": ["{python}", "-I", "-S", str(BANDIT)], "environment": {"BANDIT_LOG": str(log)}},
        "runner": {"timeout_seconds": 120},
        "sampling": {"group_size": 8, "groups_per_step": 4, "max_attempts": 20},
        "optimizer": {"learning_rate": 0.01},
        "training": {"steps": steps},
    }
    merged = {key: document.get(key, {}) | sections.get(key, {}) for key in document | sections}
    return {"name": name, "dataset": "bandit", **merged}


def trainer_pid(run_id: str) -> int | None:
    """The process that trains a run."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "services.trainer" in words and run_id in words:
            return int(process.pid)
    return None


def kill(platform: Platform, victim: str, run_id: str) -> bool:
    """Whether there was a process to kill."""
    pid = trainer_pid(run_id) if victim == "trainer" else platform.pids().get(victim)
    if pid is None:
        return False
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def disturb(platform: Platform, client: Leyden, run_id: str, dice: random.Random, kills: int) -> int:
    """Kills until the run has ended or enough were killed, then waits for its end: how many were killed."""
    killed, deadline = 0, time.monotonic() + RUN_SECONDS
    while client.run(run_id).phase not in ENDED and time.monotonic() < deadline:
        time.sleep(dice.uniform(0.3, 3.0))
        if killed < kills and kill(platform, dice.choice(VICTIMS), run_id):
            killed += 1
    return killed


@contextmanager
def small_platform(folder: Path, **environment: str) -> Iterator[Platform]:
    """A platform on free ports that serves a tiny random model; every service gets the given variables."""
    model = make_tiny_model(folder / "tiny")
    threads = {"OMP_NUM_THREADS": "1"}
    variables = dict.fromkeys(PORTS, environment) | {"engine": threads | environment, "trainer": threads}
    platform = Platform(folder / "home", Options(model_path=model, free_ports=True, environment=variables))
    platform.start()
    try:
        platform.ready(120)
        yield platform
    finally:
        platform.stop()


def soak(folder: Path, kills: int, seed: int, steps: int) -> dict[str, int]:
    """Runs, one after another, until that many processes were killed: what the store says of all of them."""
    dice, log = random.Random(seed), folder / "received.log"
    log.touch()
    totals = dict.fromkeys(
        ("kills", "calls_lost", "samples_doubled", "steps_without_samples", "violations", "runs_completed", "runs"), 0
    )
    with (
        small_platform(folder) as platform,
        Leyden(platform.facts.url("api"), platform.token, patience_seconds=60) as client,
    ):
        client.upload_dataset("bandit", [{"number": number} for number in range(16)])
        while totals["kills"] < kills:
            run = client.create_run(bandit_run(log, f"soak-{totals['runs']}", steps))
            totals["kills"] += disturb(platform, client, run.id, dice, kills - totals["kills"])
            found = violations(platform.facts.database_url, run.id)
            totals["calls_lost"] += len(lost_calls(platform.facts.database_url, run.id, log))
            log.write_text("")
            totals["samples_doubled"] += len(found.get("samples in two steps", []))
            totals["steps_without_samples"] += len(found.get("steps without samples or groups", []))
            totals["violations"] += sum(map(len, found.values()))
            ended = client.run(run.id)
            totals["runs_completed"] += ended.phase == "completed"
            totals["runs"] += 1
            print(f"{ended.name}: {ended.phase} {ended.reason or ''}, {totals['kills']} kills so far", file=sys.stderr)
            for name, rows in found.items():
                print(f"  {name}: {rows[:5]}", file=sys.stderr)
    return totals


def main() -> int:
    """Exit status 1 when a call was lost, a sample doubled, or a run did not complete."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=12, help="optimiser steps of each run")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="leyden-soak-") as folder:
        totals = soak(Path(folder), arguments.kills, arguments.seed, arguments.steps)
    print(json.dumps(totals))
    broken = totals["calls_lost"] + totals["violations"] + (totals["runs"] - totals["runs_completed"])
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
