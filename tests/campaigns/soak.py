"""`make soak KILLS=300 SEED=1`: trainings of a bandit while everything around it is killed at seeded random moments.

Services and trainers, Postgres and Redis get SIGKILL, at any moment and at the named points where it hurts most; others
are paused for longer than their leases last, and Redis is wiped. After each run `tests.invariants` checks the
store, what agents say they received is compared with its record, and the policy is made again from the recorded
samples, bit for bit. The last line is one JSON object. Exit status 1 when any promise was broken; the home then stays.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from leyden.libs.cli.local.platform import Options, Platform
from leyden.libs.client import Client
from leyden.libs.faults import FaultInjector
from tests.invariants import lost_calls, violations
from tests.replay import differing_versions
from tests.support.chaos import VICTIMS, Chaos, RunWatch, kill, trainer_pid
from tests.support.shared import open_to_agents
from tests.support.tiny_model import make_tiny_model

__all__ = ["VICTIMS", "bandit_run", "kill", "running_platform", "small_platform", "trainer_pid"]

BANDIT = Path(__file__).parents[1] / "agents" / "bandit.py"
QUICK: dict[str, dict[str, Any]] = {"optimizer": {"learning_rate": 0.02}, "sampling": {"groups_per_step": 2}}
"""Sections with which the bandit has learned after eight steps of 16 rollouts."""
RUN_SECONDS = 900.0
LEASE_SECONDS = 6.0


def bandit_run(log: Path, name: str, steps: int, **sections: dict[str, Any]) -> dict[str, Any]:
    """A run document of the two-armed bandit; sections given extend the defaults."""
    document: dict[str, dict[str, Any]] = {
        "agent": {
            "command": ["{python}", "-I", "-S", str(BANDIT)],
            "environment": {"BANDIT_LOG": str(open_to_agents(log))},
        },
        "runner": {"timeout_seconds": 120},
        "sampling": {"group_size": 8, "groups_per_step": 4, "max_attempts": 20},
        "optimizer": {"learning_rate": 0.01},
        "training": {"steps": steps},
    }
    merged = {key: document.get(key, {}) | sections.get(key, {}) for key in document | sections}
    return {"name": name, "dataset": "bandit", **merged}


@contextmanager
def small_platform(folder: Path, **environment: str) -> Iterator[Platform]:
    """A platform on free ports that serves a tiny random model; every service gets the given variables."""
    model = make_tiny_model(folder / "tiny")
    threads = {"OMP_NUM_THREADS": "1"}
    variables = dict.fromkeys(VICTIMS, environment) | dict.fromkeys(("engine", "trainer"), threads | environment)
    with running_platform(
        folder / "home", Options(model_path=model, free_ports=True, environment=variables)
    ) as platform:
        yield platform


@contextmanager
def running_platform(home: Path, options: Options) -> Iterator[Platform]:
    """A platform that is ready; it stops in the end."""
    platform = Platform(home, options)
    platform.start()
    try:
        platform.ready(300)
        yield platform
    finally:
        platform.stop()


@dataclass
class Found:
    """Findings about every run so far."""

    runs: int = 0
    runs_completed: int = 0
    calls_lost: int = 0
    samples_doubled: int = 0
    steps_without_samples: int = 0
    violations: int = 0
    versions_not_reproduced: int = 0
    words: list[str] = field(default_factory=list)

    def examine(self, platform: Platform, client: Client, run_id: str, log: Path) -> None:
        """Asks everything about a run that should have completed."""
        dsn, run = platform.facts.database_url, client.run(run_id)
        lost = lost_calls(dsn, run_id, log)
        broken = violations(dsn, run_id)
        differing = differing_versions(dsn, run_id, platform.facts.model_path)
        self.runs += 1
        self.runs_completed += run.phase == "completed"
        self.calls_lost += len(lost)
        self.samples_doubled += len(broken.get("samples in two steps", []))
        self.steps_without_samples += len(broken.get("steps without samples or groups", []))
        self.violations += sum(map(len, broken.values()))
        self.versions_not_reproduced += len(differing)
        if run.phase != "completed":
            self.words.append(f"{run.id} is {run.phase}: {run.reason}")
        self.words += [f"{run.id}: {line}" for line in lost]
        self.words += [f"{run.id}: {words}: {row}" for words, rows in broken.items() for row in rows[:5]]
        self.words += [f"{run.id}: version {version} is not what its samples make" for version in differing]


def disturb(
    chaos: Chaos, watch: RunWatch, run_id: str, dice: random.Random, kills: int, most_rollouts: int = 12
) -> None:
    """Trouble after every few rollouts, at most so many, until the run has ended or so many kills were made in all."""
    while not watch.is_over and chaos.kills.total() < kills:
        watch.wait(more_rollouts=dice.randint(1, most_rollouts), seconds=20)
        time.sleep(dice.uniform(0, 0.5))
        if watch.is_over:
            break
        done = chaos.strike(run_id)
        chaos.collect()
        _print_event(f"{chaos.kills.total():4} kills, {watch.ended_rollouts:5} rollouts of {run_id}: {done}")
    chaos.calm()


Campaign = Callable[[Path, int, int, int], tuple["Found", dict[str, Any]]]
"""Args: its folder, kills, seed, steps of each run. Returns: what was found, and what was done."""


def soak(folder: Path, kills: int, seed: int, steps: int) -> tuple[Found, dict[str, Any]]:
    """Runs, one after another, until so many processes were killed: what the store says of them, and what was done."""
    dice, log, began, found = random.Random(seed), folder / "received.log", time.monotonic(), Found()
    log.touch()
    injector = FaultInjector(folder / "faults")
    with (
        small_platform(folder, **injector.environment, RUNNER_LEASE_SECONDS=str(LEASE_SECONDS)) as platform,
        Client(platform.facts.url("api"), platform.token, patience_seconds=120) as client,
    ):
        client.upload_dataset("bandit", [{"number": number} for number in range(16)])
        chaos, disturbed = Chaos(platform, dice, injector, 1.5 * LEASE_SECONDS), time.monotonic()
        while chaos.kills.total() < kills:
            run = client.create_run(bandit_run(log, f"soak-{found.runs}", steps))
            watch = RunWatch(platform, run.id)
            disturb(chaos, watch, run.id, dice, kills)
            ended = watch.wait_for_end(RUN_SECONDS)
            found.examine(platform, client, run.id, log)
            _print_event(
                f"{run.name} {run.id}: {watch.phase}, {chaos.kills.total()} kills, {time.monotonic() - began:.0f} s"
            )
            if not ended:
                break
        minutes = (time.monotonic() - disturbed) / 60
    return found, {
        "seed": seed,
        "kills": chaos.kills.total(),
        "pauses": chaos.pauses,
        "flushes": chaos.flushes,
        "kills_per_minute": round(chaos.kills.total() / minutes, 1),
        "seconds": round(time.monotonic() - began),
        "kills_by_victim": dict(_by_victim(chaos.kills)),
        "kills_by_point": {victim: times for victim, times in sorted(chaos.kills.items()) if "." in victim},
    }


def _by_victim(kills: Counter[str]) -> Counter[str]:
    victims: Counter[str] = Counter()
    for victim, times in sorted(kills.items()):
        victims[victim.split(".")[0]] += times
    return victims


def _print_event(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def run_campaign(campaign: Campaign, description: str | None) -> int:
    """Runs a campaign with the options of the command line. Returns the exit status, 1 when a promise was broken."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=12, help="optimiser steps of each run")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="leyden-soak-"))
    found, done = campaign(folder, arguments.kills, arguments.seed, arguments.steps)
    counted = {name: value for name, value in vars(found).items() if name != "words"}
    print(json.dumps({**done, **counted}))
    if not found.words:
        shutil.rmtree(folder)
        return 0
    _print_event("\n".join([*found.words, f"its home stays in {folder}"]))
    return 1


def main() -> int:
    """Exit status 1 when a call was lost, a sample doubled, or a run did not complete."""
    return run_campaign(soak, __doc__)


if __name__ == "__main__":
    sys.exit(main())
