"""Does the flight agent train, with agents and trainer as Jobs, and does the store say what the promises say?"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from leyden.libs.client import Client
from leyden.libs.contracts.api.runs import Run
from tests.cluster.node import PREFIX
from tests.cluster.release import NAMESPACE, ROLLOUTS, Release
from tests.invariants import violations
from tests.support.shared import ROOT

AGENT = ROOT / "examples" / "flight_agent"
AGENT_IMAGE = f"{PREFIX}/flight-agent:0.2.0"
ENDED = {"completed", "failed", "cancelled"}


def upload(client: Client) -> None:
    """The tasks of the flight agent."""
    with tempfile.TemporaryDirectory() as folder:
        generator = [sys.executable, str(AGENT / "tasks.py"), "--out", folder, "--train", "64", "--heldout", "16"]
        subprocess.run(generator, check=True)
        client.upload_dataset("flights", Path(folder) / "train.jsonl")


def document(name: str, steps: int, image: str = AGENT_IMAGE) -> dict[str, Any]:
    """A run of eight rollouts a step."""
    return {
        "name": name,
        "dataset": "flights",
        "agent": {"command": ["python", "agent.py"]},
        "runner": {"type": "kubernetes", "image": image, "timeout_seconds": 300},
        "sampling": {"group_size": 4, "groups_per_step": 2, "max_policy_lag": 1, "max_attempts": 20},
        "credit": {
            "rule": {"type": "discounted"},
            "air": {"weights": {"memory": 0.3, "search": 0.2}},
            "baseline": {"type": "mean", "per": "state"},
        },
        "optimizer": {"learning_rate": 1e-5},
        "training": {"steps": steps, "micro_batch_tokens": 1024},
    }


def finish(release: Release, client: Client, run_id: str, steps: int, seconds: float) -> None:
    """Waits for the run's end, and asks what became of it."""
    ended, seen = watch(release, client, run_id, seconds)
    report(client, ended, seen)
    assert ended.phase == "completed", (ended.phase, ended.reason)
    assert len(list(client.policies(ended.id))) == steps + 1
    check_promises(release, run_id)


def check_promises(release: Release, run_id: str) -> None:
    """Every question of tests/invariants.sql has an empty answer."""
    with release.database() as dsn:
        broken = violations(dsn, run_id)
    assert not broken, broken


def watch(release: Release, client: Client, run_id: str, seconds: float) -> tuple[Run, Counter[str]]:
    """The run at its end or at the deadline, and how many pods of each component it had."""
    deadline, seen, printed = time.monotonic() + seconds, set[tuple[str, str]](), ""
    while True:
        for pod in [*release.pods(), *release.pods(namespace=ROLLOUTS)]:
            labels = pod["metadata"].get("labels", {})
            seen.add((labels.get("app.kubernetes.io/component", "?"), pod["metadata"]["name"]))
        found = client.run(run_id)
        counts = Counter(component for component, _ in seen)
        line = f"{found.phase}, step {found.progress.step}, {counts['agent']} agents, {counts['trainer']} trainers"
        if line != printed:
            print(f"  {line} {found.reason or ''}", flush=True)
            printed = line
        if found.phase in ENDED or time.monotonic() > deadline:
            return found, counts
        time.sleep(1)


def report(client: Client, ended: Run, seen: Counter[str]) -> None:
    """Prints what the run was."""
    steps = [(one.number, one.reward_mean) for one in client.steps(ended.id)]
    states = Counter(one.state for one in client.rollouts(run=ended.id))
    engines = [(one.url, one.policy_version) for one in client.engines()]
    print(f"run {ended.phase} {ended.reason or ''}\nsteps and rewards: {steps}\nrollouts: {dict(states)}")
    print(f"pods seen in {NAMESPACE} and {ROLLOUTS}: {dict(seen)}\nengines: {engines}", flush=True)
