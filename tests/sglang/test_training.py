"""The flight agent's model trains on a real SGLang, which a platform starts as `leyden up --engine sglang` does.

New weights come by disk, or over the network from a trainer that is killed while it sends the first of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import psycopg
import pytest
from rich.console import Console

from leyden.libs.cli.commands.demo import DemoOptions, dataset_names, run_document, write_tasks
from leyden.libs.cli.local.platform import Options, Platform
from leyden.libs.cli.local.services import ENGINE_KEY, LOGS, Sglang
from leyden.libs.cli.view.watch import watch_run
from leyden.libs.client import Client
from leyden.libs.faults import FaultInjector
from tests.fakes import real_sglang
from tests.invariants import violations
from tests.support.shared import ROOT

STEPS = 3
KILLED_AT = "trainer.tensor_sent"
AGENT_PYTHON = ROOT / ".venv-agents" / "bin" / "python"
LARGEST_GAP = 1e-3
"""Bound on the largest gap of log-probabilities between engine and trainer, natural logarithm."""


@contextmanager
def started(home: Path, **environment: Mapping[str, str]) -> Iterator[Platform]:
    """A platform whose engine is SGLang with the demo's model."""
    sglang = Sglang(real_sglang.PYTHON, real_sglang.ON_CPU)
    running = Platform(home, Options(environment, free_ports=True, sglang=sglang))
    running.start()
    try:
        running.ready(real_sglang.START_SECONDS)
        yield running
    finally:
        running.stop()


@pytest.mark.parametrize("way", ["disk", "network"])
def test_the_flight_agents_model_trains_on_sglang(tmp_path: Path, way: str) -> None:
    faults = FaultInjector(tmp_path / "faults")
    if way == "network":
        faults.arm(KILLED_AT)
    controller = {"CONTROLLER_WEIGHTS": way, **faults.environment}
    with started(tmp_path / "home", controller=controller) as platform:
        train(platform, tmp_path)
        if way == "network":
            assert faults.fired(KILLED_AT, 0.0)
            logs = "".join(log.read_text() for log in (platform.home / LOGS).glob("*.log"))
            assert (logs.count("transfer failed"), "version sent" in logs) == (1, True)


def train(platform: Platform, folder: Path) -> None:
    options = DemoOptions(steps=STEPS, groups_per_step=2, group_size=4, agent_python=str(AGENT_PYTHON))
    with Client(platform.facts.url("api"), platform.token) as client:
        for name, path in zip(dataset_names(options.seed), write_tasks(folder / "tasks", options), strict=True):
            client.upload_dataset(name, path)
        created = client.create_run(run_document(options).model_copy(update={"evaluation": None}))
        run = watch_run(client, created.id, Console(quiet=True))
        steps, versions = list(client.steps(run.id)), list(client.policies(run.id))

    assert (run.phase, run.reason) == ("completed", None)
    assert [version.version for version in versions] == list(range(1 + STEPS))
    # A step whose groups all have equal rewards computes no log-probabilities.
    gaps = [step.metrics["logprob_gap_max"] for step in steps if "logprob_gap_max" in step.metrics]
    assert gaps
    assert gaps == pytest.approx([0.0] * len(gaps), abs=LARGEST_GAP)
    assert violations(platform.facts.database_url, run.id) == {}
    # One rollout after another begins with the weights of the step before it.
    assert sampled_versions(platform, run.id) == set(range(STEPS))
    assert served_version(platform) in {f"{run.id}:{version}" for version in range(1 + STEPS)}


def sampled_versions(platform: Platform, run_id: str) -> set[int]:
    """The policy versions that sampled the run's calls."""
    with psycopg.connect(platform.facts.database_url) as connection:
        statement = "SELECT DISTINCT max_policy_version FROM model_calls WHERE run_id = %s AND status = 'completed'"
        return {version for (version,) in connection.execute(statement, (run_id,))}


def served_version(platform: Platform) -> str:
    """The label of the weights that SGLang serves."""
    key = (platform.home / ENGINE_KEY).read_text().strip()
    headers = {"authorization": f"Bearer {key}"}
    label: str = httpx.get(f"{platform.facts.url('engine')}/model_info", headers=headers).json()["weight_version"]
    return label
