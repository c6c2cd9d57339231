"""One line trains the model inside an agent, and stops before training where the agent could not be trained."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from leyden.libs.cli.local.platform import Options, Platform
from leyden.libs.client import Client
from tests.campaigns.soak import BANDIT, running_platform
from tests.invariants import violations
from tests.support.long import long_only
from tests.support.shared import ROOT
from tests.support.tiny_model import make_tiny_model

AGENT = ["{python}", "-I", "-S", "bandit.py", "{task.question}"]
SILENT = [
    *("--set", "agent.environment.BANDIT_SILENT=yes", "--set", 'agent.environment.BANDIT_TEMPERATURE="0"'),
    *("--set", "sampling.groups_per_step=2", "--set", "training.precision=float32"),
]


@pytest.fixture
def platform(tmp_path: Path) -> Iterator[Platform]:
    options = Options(model_path=make_tiny_model(tmp_path / "tiny"), free_ports=True, agents=(BANDIT.parent,))
    with running_platform(tmp_path / "home", options) as running:
        yield running


def train(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    tasks = tmp_path / "tasks.jsonl"
    rows = ({"question": f"heads or tails {number}?", "answer": "odd"} for number in range(4))
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["--tasks", str(tasks), "--directory", str(BANDIT.parent), *SILENT, *words, "--", *AGENT]
    command = [sys.executable, "-m", "leyden.libs.cli", "--home", str(tmp_path / "home"), "train", *given]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    return subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400, check=False
    )


@long_only
@pytest.mark.timeout(900)
def test_one_line_tries_the_agent_and_trains_it(platform: Platform, tmp_path: Path) -> None:
    reward = ("--reward", 'regex:"answer": "odd"')
    greedy = train(tmp_path, *reward)
    assert (greedy.returncode, "sampled with temperature 0" in greedy.stderr) == (1, True), greedy
    assert "to have it do so, add --override temperature=1" in greedy.stderr
    assert f"leyden run create {tmp_path}/bandit.run.json --watch" in greedy.stderr

    trained = train(tmp_path, *reward, "--override", "temperature=1", "--steps", "2")
    assert trained.returncode == 0, trained.stderr
    assert f"{platform.facts.url('api')}/#sign-in=" in trained.stdout
    with Client(platform.facts.url("api"), platform.token) as client:
        run = client.find_run("bandit")
        assert (run.phase, run.progress.step, len(list(client.steps(run.id)))) == ("completed", 2, 2)
        assert f"leyden run show {run.id}" in trained.stdout
        # The document that stays is the run's, and the one that it replaced is kept.
        again = client.create_run(json.loads((tmp_path / "bandit.run.json").read_text()))
        assert again.config == run.config
        client.cancel_run(again.id)
    assert (tmp_path / "bandit.run.json~").exists()
    assert violations(platform.facts.database_url, run.id) == {}
