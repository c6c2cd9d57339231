"""Contradictions of schedule, evaluation and early stopping are refused with their path and the remedy."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from leyden.libs.contracts.config import EvaluationPlan, RunConfig
from tests.support.builders import run_document


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        (
            {"optimizer": {"schedule": "cosine", "warmup_steps": 20}, "training": {"steps": 20}},
            "optimizer.warmup_steps 20 leaves none of training.steps 20",
        ),
        ({"training": {"early_stopping": {"metric": "train_reward"}}}, "set target, patience or both"),
        ({"training": {"early_stopping": {"target": 1.0}}}, "set evaluation.every, or write metric 'train_reward'"),
        (
            {"sampling": {"refill_zero_variance": 2}, "algorithm": {"type": "ppo_clip", "kl_coefficient": 0.1}},
            "sampling.refill_zero_variance replaces groups",
        ),
        (
            {"sampling": {"max_policy_lag": 0, "replay": {}}},
            "sampling\n  Value error, replay trains tokens of versions",
        ),
        ({"sampling": {"max_policy_lag": 0, "replay": {}}}, "write max_policy_lag 1 or more, or remove replay"),
        ({"sampling": {"groups_per_step": 4, "replay": {"share": 0.2}}}, "write at least 0.25"),
        (
            {"training": {"steps": 50_000}, "evaluation": {"dataset": "held-out", "every": 10}},
            "write at least 50",
        ),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ValidationError) as refused:
        RunConfig.model_validate(run_document(**changes))
    assert remedy in str(refused.value)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("optimizer.minimum_share", 0.1),
        ("training.early_stopping.min_improvement", 0.1),
        ("sampling.curriculum.type", "solve_rate"),
        ("sampling.curriculum.solved_at", 1.0),
        ("sampling.replay.solved_at", 1.0),
        ("credit.air.default_weight", 0.5),
        ("credit.air.max_reward", 2.0),
        ("algorithm.mask_ratio_above", 2.0),
        ("algorithm.drift_coefficient", 0.1),
    ],
)
def test_a_removed_field_is_refused_by_its_path_and_read_from_stored_documents(path: str, value: object) -> None:
    changes = {
        "training": {"early_stopping": {"metric": "train_reward", "patience": 2}},
        "sampling": {"curriculum": {}, "replay": {}},
        "credit": {"air": {}},
        "algorithm": {"type": "dppo_tv"},
    }
    document = run_document(**changes)
    config = RunConfig.model_validate(document)
    *parents, field = path.split(".")
    part = document
    for name in parents:
        part = part.setdefault(name, {})
    part[field] = value
    assert RunConfig.stored(document) == config
    with pytest.raises(ValidationError) as refused:
        RunConfig.model_validate(document)
    (error,) = refused.value.errors()
    assert ".".join(str(name) for name in error["loc"] if name != "dppo_tv") == path
    assert error["type"] == "extra_forbidden"


@pytest.mark.parametrize(
    ("plan", "versions"),
    [
        ({}, [0, None]),
        ({"every": 10}, [0, 10, 20, None]),
        ({"every": 10, "at_end": False}, [0, 10, 20, 30]),
        ({"every": 10, "at_start": False, "at_end": False}, [10, 20, 30]),
        ({"every": 50}, [0, None]),
    ],
)
def test_planned_versions(plan: dict[str, Any], versions: list[int | None]) -> None:
    assert EvaluationPlan.model_validate({"dataset": "held-out", **plan}).planned_versions(30) == versions
