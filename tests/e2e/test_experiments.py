"""Experiments at the smallest size, through a platform of their own: figures come out; a tiny model need not learn."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.campaigns.experiments.__main__ import experiment
from tests.campaigns.experiments.choices import Choices, Experiment
from tests.campaigns.experiments.flight import Flight
from tests.campaigns.experiments.page import page
from tests.campaigns.experiments.sql import Sql
from tests.support.tiny_model import make_tiny_model

FLIGHT_PYTHON = Path(__file__).parents[2] / ".venv-agents" / "bin" / "python"
NIGHTLY = "TEST_LANGGRAPH"
"""The interpreter of `make test-experiments`, which has LangGraph."""


@pytest.mark.timeout(1800)
@pytest.mark.skipif(NIGHTLY not in os.environ, reason="make test-experiments runs it: it takes minutes")
@pytest.mark.parametrize(
    ("one", "python", "labels"),
    [
        (Flight(), str(FLIGHT_PYTHON), ["base model", "trained"]),
        (Sql(), os.environ.get(NIGHTLY, ""), ["base model", "after the warm start", "trained"]),
    ],
    ids=["flight", "sql"],
)
def test_three_steps_have_figures_and_a_second_command_finds_them(
    one: Experiment, python: str, labels: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEYDEN_MODEL_PATH", str(make_tiny_model(tmp_path / "tiny")))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    choices = Choices(steps=3, warm_steps=3, solutions=16, held_out=4, python=python)
    (found,) = experiment(one, tmp_path / "home", range(1), choices)
    assert (list(found.held_out), found.tasks, len(found.curve)) == (labels, 4, 3)
    assert all(step is not None for step in found.curve)
    assert experiment(one, tmp_path / "home", range(1), choices) == [found]
    assert found.runs[-1] in page(one.title(choices), one.purpose, "make experiment", [found])
