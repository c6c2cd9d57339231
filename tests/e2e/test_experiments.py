"""Experiments at the smallest size, through a platform of their own: figures come out; a tiny model need not learn."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.campaigns.experiments.__main__ import EXPERIMENTS, experiment
from tests.campaigns.experiments.choices import Choices
from tests.campaigns.experiments.page import page
from tests.campaigns.experiments.taught import Taught
from tests.support.tiny_model import make_tiny_model

FLIGHT_PYTHON = Path(__file__).parents[2] / ".venv-agents" / "bin" / "python"
NIGHTLY = "TEST_EXAMPLES"
"""The folder of `make test-experiments` with an environment for each taught example."""


def interpreter(name: str) -> str:
    if not isinstance(EXPERIMENTS[name], Taught):
        return str(FLIGHT_PYTHON)
    return str(Path(os.environ[NIGHTLY]) / name / "bin" / "python")


@pytest.mark.timeout(1800)
@pytest.mark.skipif(NIGHTLY not in os.environ, reason="make test-experiments runs it: it takes minutes")
@pytest.mark.parametrize("name", list(EXPERIMENTS))
def test_three_steps_have_figures_and_a_second_command_finds_them(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEYDEN_MODEL_PATH", str(make_tiny_model(tmp_path / "tiny")))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    one = EXPERIMENTS[name]
    choices = Choices(steps=3, warm_steps=3, solutions=16, held_out=4, python=interpreter(name))
    (found,) = experiment(one, tmp_path / "home", range(1), choices)
    labels = ["base model", *(["after the warm start"] if isinstance(one, Taught) else []), "trained"]
    assert (list(found.held_out), found.tasks, len(found.curve)) == (labels, 4, 3)
    assert all(step is not None for step in found.curve)
    assert experiment(one, tmp_path / "home", range(1), choices) == [found]
    assert found.runs[-1] in page(one.title(choices), one.purpose, "make experiment", [found])
