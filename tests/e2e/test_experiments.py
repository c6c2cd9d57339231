"""Experiments at the smallest size, through a platform of their own: figures come out; a tiny model need not learn."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.campaigns.experiments.__main__ import EXPERIMENTS, experiment
from tests.campaigns.experiments.choices import Choices, Experiment
from tests.campaigns.experiments.page import page
from tests.campaigns.experiments.taught import Taught
from tests.support.silent_model import make_silent_model
from tests.support.tiny_model import make_tiny_model

FLIGHT_PYTHON = Path(__file__).parents[2] / ".venv-agents" / "bin" / "python"
NIGHTLY = "TEST_EXAMPLES"
"""The folder of `make test-experiments` with an environment for each taught example."""
WARM = ["base model", "after the warm start"]
SCORED = [f"{version}{part}" for version in ("base model", "trained") for part in ("", ", judge", ", true", ", brief")]
ALONE = ["writer trained alone", "checker trained alone"]
CASES: dict[str, tuple[list[str], list[str], dict[str, Any]]] = {
    **{name: (["base model", "trained"], ["trained"], {}) for name in EXPERIMENTS},
    **{name: ([*WARM, "trained"], ["trained"], {}) for name, one in EXPERIMENTS.items() if isinstance(one, Taught)},
    "open-ended": (SCORED, [one for one in SCORED if one.startswith("trained")], {}),
    "external service": (["base model", "trained"], ["trained"], {"client": "service"}),
    "sql": (
        [*WARM, "trained, step 2", "trained", *(f"{one}, another database" for one in (*WARM, "trained"))],
        ["trained"],
        {"every": 2},
    ),
    "coordination apart": ([*WARM, *ALONE, "both, each trained alone"], ALONE, {"team": "apart"}),
}
"""The labels of evaluations and curves, and the choices."""


def interpreter(one: Experiment) -> str:
    if not isinstance(one, Taught):
        return str(FLIGHT_PYTHON)
    return str(Path(os.environ[NIGHTLY]) / one.agent.name / "bin" / "python")


@pytest.mark.timeout(1800)
@pytest.mark.skipif(NIGHTLY not in os.environ, reason="make test-experiments runs it: it takes minutes")
@pytest.mark.parametrize("case", list(CASES))
def test_three_steps_have_figures_and_a_second_command_finds_them(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An empty query runs, so that the checker has calls, and one of random bytes fails, so that the rewriter has.
    make = make_silent_model if case.startswith("coordination") else make_tiny_model
    monkeypatch.setenv("LEYDEN_MODEL_PATH", str(make(tmp_path / "tiny")))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    one = EXPERIMENTS[case.partition(" ")[0]]
    measured, trained, chosen = CASES[case]
    choices = Choices(steps=3, warm_steps=3, solutions=16, held_out=4, python=interpreter(one), **chosen)
    (found,) = experiment(one, tmp_path / "home", range(1), choices)
    assert (list(found.held_out), set(found.tasks), list(found.curves)) == (measured, {4}, trained)
    assert all(len(curve) == 3 and None not in curve for curve in found.curves.values())
    assert experiment(one, tmp_path / "home", range(1), choices) == [found]
    assert found.runs[-1] in page(one.title(choices), one.purpose, "make experiment", [found])
