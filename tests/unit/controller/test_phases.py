from __future__ import annotations

from datetime import UTC, datetime
from itertools import product
from typing import Any

import pytest

from leyden.libs.contracts.config import RunConfig
from leyden.libs.contracts.states import RUN_TRANSITIONS, RunIntent, RunPhase
from leyden.libs.store.engines import Assignment
from leyden.libs.store.groups import EvaluationFacts, RunFacts
from leyden.services.controller.phases import assign, due_evaluation, next_phase, target_version

CONFIG = RunConfig.model_validate({"name": "r", "dataset": "d", "agent": {"command": ["a"]}, "training": {"steps": 3}})

WITHOUT_STEPS = CONFIG.model_copy(update={"training": CONFIG.training.model_copy(update={"steps": 0})})


def run(run_id: str = "run-a", **changes: Any) -> RunFacts:
    latest = changes.get("latest_version", 1)
    values: dict[str, Any] = {
        "id": run_id,
        "config": CONFIG,
        "intent": RunIntent.RUNNING,
        "phase": RunPhase.RUNNING,
        "reason": None,
        "dataset_id": "d",
        "task_count": 10,
        "created_at": datetime(2026, 1, 1, tzinfo=UTC),
        "steps_done": 1,
        "latest_version": latest,
        "servable_versions": frozenset(() if latest is None else {0, latest}),
        "counting_groups": 0,
        "open_training_groups": 0,
        "next_group": 0,
        "live_attempts": 0,
    }
    return RunFacts(**{**values, **changes})


def line(runs: list[RunFacts], at_once: int = 1) -> tuple[str | None, tuple[str, ...]]:
    found = assign(runs, {"default": at_once})["default"]
    return " ".join(found.run_ids) or None, found.waiting


def evaluation(number: int = 1, version: int | None = 0, **changes: int) -> EvaluationFacts:
    values = {"rollouts_per_task": 1, "expected": 4, "groups": 0, "open_groups": 0, **changes}
    return EvaluationFacts(id=f"e{number}", number=number, dataset_id="d", policy_version=version, **values)


def test_every_phase_change_is_allowed_by_the_store() -> None:
    evaluations = ((), (evaluation(),), (evaluation(groups=4),))
    for intent, phase, steps, latest, found, active in product(
        RunIntent, RunPhase, (0, 3), (None, 0, 3), evaluations, (["run-a"], ["run-b"], [])
    ):
        facts = run(intent=intent, phase=phase, steps_done=steps, latest_version=latest, evaluations=found)
        moved, _ = next_phase(facts, active)
        assert moved is phase or moved in RUN_TRANSITIONS[phase], (intent, phase, moved)


@pytest.mark.parametrize(
    ("facts", "phase"),
    [
        (run(phase=RunPhase.PENDING), RunPhase.RUNNING),
        (run(phase=RunPhase.PENDING, evaluations=(evaluation(),)), RunPhase.EVALUATING),
        (run(evaluations=(evaluation(version=None),)), RunPhase.RUNNING),
        (run(intent=RunIntent.PAUSED), RunPhase.PAUSED),
        (run(intent=RunIntent.CANCELLED), RunPhase.CANCELLED),
        (run(steps_done=3, latest_version=3), RunPhase.COMPLETED),
        (run(steps_done=3, latest_version=3, evaluations=(evaluation(version=None),)), RunPhase.EVALUATING),
        (run(config=WITHOUT_STEPS, steps_done=0, latest_version=None, evaluations=(evaluation(),)), RunPhase.RUNNING),
        (run(config=WITHOUT_STEPS, steps_done=0, latest_version=0, evaluations=(evaluation(),)), RunPhase.EVALUATING),
        (run(config=WITHOUT_STEPS, steps_done=0, latest_version=0), RunPhase.COMPLETED),
        (run(phase=RunPhase.COMPLETED, steps_done=3, intent=RunIntent.PAUSED), RunPhase.COMPLETED),
        (run(phase=RunPhase.COMPLETED, steps_done=3, evaluations=(evaluation(),)), RunPhase.EVALUATING),
        (run(phase=RunPhase.FAILED, reason="broken"), RunPhase.FAILED),
    ],
)
def test_the_active_run_moves_on(facts: RunFacts, phase: RunPhase) -> None:
    assert next_phase(facts, ["run-a"])[0] is phase


def test_a_waiting_run_names_the_run_that_uses_the_engines() -> None:
    assert next_phase(run(phase=RunPhase.PENDING), ["run-b"]) == (
        RunPhase.PENDING,
        "waiting for an engine of pool default: run-b has them",
    )


def test_one_run_has_the_engines_the_oldest_first_and_paused_ones_until_their_attempts_end() -> None:
    older = datetime(2025, 1, 1, tzinfo=UTC)
    pending, old = run("run-p", phase=RunPhase.PENDING), run("run-o", phase=RunPhase.PENDING, created_at=older)
    paused = {"phase": RunPhase.PAUSED, "intent": RunIntent.PAUSED}
    assert line([]) == (None, ())
    assert line([pending, old]) == ("run-o", ("run-p",))
    assert line([pending, old, run("run-r")]) == ("run-r", ("run-o", "run-p"))
    assert line([pending, run("run-x", **paused, live_attempts=1)]) == ("run-x", ("run-p",))
    assert line([pending, run("run-x", **paused)]) == ("run-p", ())
    assert line([run("run-c", phase=RunPhase.COMPLETED, steps_done=3)]) == (None, ())
    assert line([run("run-c", phase=RunPhase.COMPLETED, evaluations=(evaluation(),))]) == ("run-c", ())


def test_as_many_runs_as_a_pool_has_adapters_share_its_engines() -> None:
    older = datetime(2025, 1, 1, tzinfo=UTC)
    pending, old = run("run-p", phase=RunPhase.PENDING), run("run-o", phase=RunPhase.PENDING, created_at=older)
    assert line([pending, old, run("run-r")], at_once=2) == ("run-r run-o", ("run-p",))
    assert next_phase(pending, ["run-r", "run-o"])[1] == (
        "waiting for an engine of pool default: run-r, run-o have them"
    )


def test_every_pool_has_a_run_of_its_own() -> None:
    small = CONFIG.model_copy(update={"pool": "small"})
    runs = [run("run-a"), run("run-b", config=small), run("run-c", phase=RunPhase.PENDING, config=small)]
    assert assign(runs, {"default": 1, "small": 1, "idle": 1}) == {
        "default": Assignment(("run-a",)),
        "small": Assignment(("run-b",), ("run-c",)),
        "idle": Assignment(),
    }


def test_evaluations_are_due_in_order_once_their_version_can_be_served() -> None:
    first, second = evaluation(1, version=0, groups=4), evaluation(2, version=1)
    assert due_evaluation(run(evaluations=(second, first))) == (second, 1)
    assert due_evaluation(run(evaluations=(evaluation(version=2),))) is None
    assert due_evaluation(run(evaluations=(evaluation(version=None),))) is None
    assert due_evaluation(run(steps_done=3, latest_version=3, evaluations=(evaluation(version=None),))) is not None
    # Its files were removed: nobody can serve it any more.
    assert due_evaluation(run(latest_version=1, servable_versions=frozenset({1}), evaluations=(evaluation(),))) is None


@pytest.mark.parametrize(
    ("facts", "version"),
    [
        (run(latest_version=None), None),
        (run(), 1),
        (run(evaluations=(evaluation(version=0),)), 0),
        # The newest, which is not left for the next one either.
        (run(evaluations=(evaluation(version=1),)), 1),
        (run(evaluations=(evaluation(version=2),)), 1),
        (run(evaluations=(evaluation(version=0),), open_training_groups=1), 1),
        # Begun: the engines stay, whatever the trainer makes meanwhile.
        (run(evaluations=(evaluation(version=0, groups=1, open_groups=1),), open_training_groups=1), 0),
    ],
)
def test_engines_serve_the_newest_version_or_that_of_an_evaluation(facts: RunFacts, version: int | None) -> None:
    assert target_version(facts) == version
