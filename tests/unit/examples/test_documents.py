"""The documents of taught examples: one for a CPU, and one of the same experiment for a model of 3B on one GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from docs.shapes import PUBLISHED
from leyden.libs.cli.__main__ import app
from tests.campaigns.experiments.__main__ import EXPERIMENTS
from tests.campaigns.experiments.taught import Taught

TAUGHT = [one for one in EXPERIMENTS.values() if isinstance(one, Taught)]
OF_THE_TASK = ("dataset", "agent", "runner", "roles", "train", "reward", "credit", "evaluation")
ONE_GPU = ("--gpus", "1", "--gpu-memory", "24GB", "--host-memory", "32GB", "--shared")


@pytest.mark.parametrize("one", TAUGHT, ids=lambda one: one.name)
def test_the_document_for_one_gpu_is_the_same_experiment_and_fits(one: Taught, tmp_path: Path) -> None:
    usual, larger = (json.loads((one.agent / name).read_text()) for name in ("run.json", "run-gpu.json"))
    assert {name: larger.get(name) for name in OF_THE_TASK} == {name: usual.get(name) for name in OF_THE_TASK}
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Qwen2.5-3B"][0]))
    words = ["run", "check", str(one.agent / "run-gpu.json"), "--set", f"agent.directory={one.agent}"]
    result = CliRunner().invoke(app, [*words, "--model", str(tmp_path), "--json", *ONE_GPU])
    found = json.loads(result.stdout)
    assert (result.exit_code, found["can_run"], found["findings"]) == (0, True, [])
    # The engine that the README starts takes what this check counts.
    assert found["engine_arguments"] == "--max-total-tokens 32768"
    assert f'--engine-args "{found["engine_arguments"]}"' in (one.agent / "README.md").read_text()
    assert {"weights", "engine weights"} <= {need["name"] for need in found["memory"] if need["place"] == "gpu"}
