from __future__ import annotations

from datetime import UTC, datetime
from itertools import product
from typing import Any

import pytest

from leyden.libs.contracts.config import RunConfig
from leyden.libs.contracts.states import RUN_TRANSITIONS, RunIntent, RunPhase
from leyden.libs.store.engines import Assignment
from leyden.libs.store.runs.facts import EvaluationFacts, RunFacts
from leyden.services.controller.runs.phases import (
    Team,
    assign,
    due_evaluation,
    next_phase,
    target_version,
    teams_of,
    waiting_reason,
)

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
    found = assign(teams_of(runs), {"default": at_once})["default"]
    return " ".join(found.run_ids) or None, found.waiting


def evaluation(number: int = 1, version: int | None = 0, **changes: int) -> EvaluationFacts:
    values = {"rollouts_per_task": 1, "expected": 4, "groups": 0, "open_groups": 0, **changes}
    return EvaluationFacts(id=f"e{number}", number=number, dataset_id="d", policy_version=version, **values)


def test_every_phase_change_is_allowed_by_the_store() -> None:
    evaluations = ((), (evaluation(),), (evaluation(groups=4),))
    for intent, phase, steps, latest, found, waiting in product(
        RunIntent, RunPhase, (0, 3), (None, 0, 3), evaluations, (None, "waiting for an engine")
    ):
        facts = run(intent=intent, phase=phase, steps_done=steps, latest_version=latest, evaluations=found)
        moved, _ = next_phase(Team(facts), waiting)
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
    assert next_phase(Team(facts), None)[0] is phase


def test_a_waiting_run_names_the_run_that_uses_the_engines() -> None:
    reason = waiting_reason(Team(run()), {"default": Assignment(("run-b",), ("run-a",))}, {"default": 1})
    assert reason == "waiting for an engine of pool default: run-b has them"
    assert next_phase(Team(run(phase=RunPhase.PENDING)), reason) == (RunPhase.PENDING, reason)


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
    assert waiting_reason(Team(pending), {"default": Assignment(("run-r", "run-o"), ("run-p",))}, {"default": 2}) == (
        "waiting for an engine of pool default: run-r, run-o have them"
    )


def test_every_pool_has_a_run_of_its_own() -> None:
    small = CONFIG.model_copy(update={"pool": "small"})
    runs = [run("run-a"), run("run-b", config=small), run("run-c", phase=RunPhase.PENDING, config=small)]
    assert assign(teams_of(runs), {"default": 1, "small": 1, "idle": 1}) == {
        "default": Assignment(("run-a",)),
        "small": Assignment(("run-b",), ("run-c",)),
        "idle": Assignment(),
    }


def team(run_id: str, *pools: str, **changes: Any) -> Team:
    """A run of the first pool with a policy in each other one."""
    configs = [CONFIG.model_copy(update={"pool": pool}) for pool in pools]
    others = [
        run(f"{run_id}-{number}", config=config, of_run=run_id, **changes)
        for number, config in enumerate(configs[1:], 1)
    ]
    return Team(run(run_id, config=configs[0], **changes), tuple(others))


def test_a_run_that_lacks_one_of_its_pools_reserves_none() -> None:
    pools = {"a": 1, "b": 1}
    waiting = {"phase": RunPhase.PENDING}
    first, both, last = team("run-1", "a"), team("run-2", "a", "b", **waiting), team("run-3", "b", **waiting)
    found = assign([first, both, last], pools)
    assert found == {"a": Assignment(("run-1",), ("run-2",)), "b": Assignment(("run-3",), ("run-2-1",))}
    assert waiting_reason(last, found, pools) is None
    assert waiting_reason(both, found, pools) == (
        "waiting for an engine of pool a: run-1 has them; its 2 policies begin at the same time, so that later runs may"
        " begin before"
    )
    # Both are free: the older run comes first, and has both while it is at work.
    assert assign([both, last], pools) == {
        "a": Assignment(("run-2",)),
        "b": Assignment(("run-2-1",), ("run-3",)),
    }
    older = team("run-0", "b", **waiting)
    working = team("run-2", "a", "b")
    assert assign([older, working], pools)["b"] == Assignment(("run-2-1",), ("run-0",))


def test_a_run_with_more_policies_than_its_pool_takes_lets_others_pass() -> None:
    pools = {"a": 1, "b": 1}
    waiting = {"phase": RunPhase.PENDING}
    three, missing = team("run-1", "a", "b", "b", **waiting), team("run-2", "a", "gone", **waiting)
    last = team("run-3", "a", **waiting)
    found = assign([three, missing, last], pools)
    assert (found["a"].run_ids, found["b"].run_ids) == (("run-3",), ())
    assert waiting_reason(three, found, pools) == (
        "waiting for engines of pool b, which takes too few runs at a time for the run's policies (1): raise its"
        " `adapters` in CONTROLLER_POOLS, or cancel the run"
    )
    assert waiting_reason(missing, found, pools) == (
        "there is no pool 'gone': add it to CONTROLLER_POOLS, or cancel the run"
    )


def test_evaluations_are_due_in_order_once_their_version_can_be_served() -> None:
    first, second = evaluation(1, version=0, groups=4), evaluation(2, version=1)
    assert due_evaluation(Team(run(evaluations=(second, first)))) == (second, 1)
    assert due_evaluation(Team(run(evaluations=(evaluation(version=2),)))) is None
    assert due_evaluation(Team(run(evaluations=(evaluation(version=None),)))) is None
    assert (
        due_evaluation(Team(run(steps_done=3, latest_version=3, evaluations=(evaluation(version=None),)))) is not None
    )
    # Its files were removed: nobody can serve it any more.
    assert (
        due_evaluation(Team(run(latest_version=1, servable_versions=frozenset({1}), evaluations=(evaluation(),))))
        is None
    )


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
    assert target_version(Team(facts), facts) == version
