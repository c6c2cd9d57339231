"""Combinations that can never train are refused, those that do not mean what they say are named, others pass."""

from __future__ import annotations

from typing import Any

import pytest

from leyden.libs.contracts.config import CPU, Device, DiscountedCredit, RunConfig, TemporalCredit
from leyden.libs.contracts.judgements import judge
from leyden.libs.contracts.overlay import overlay
from leyden.libs.contracts.recipes import RECIPES
from tests.support.builders import run_document

GSPO = {"type": "gspo"}
CRITIC = {"credit": {"baseline": {"type": "value"}}, "algorithm": {"type": "ppo_clip", "critic": {"warmup_steps": 9}}}
DECOUPLED = {"type": "decoupled"}
CASES: list[tuple[dict[str, Any], str, str]] = [
    ({"sampling": {"group_size": 1, "min_siblings": 1}}, "sampling.group_size", "cannot"),
    (
        {
            "sampling": {"group_size": 1, "min_siblings": 1},
            "algorithm": {"type": "reinforce", "distillation": {"model": "/models/teacher", "rewards": "add"}},
        },
        "sampling.group_size",
        "cannot",
    ),
    ({"sampling": {"temperature": 0.0}}, "sampling.temperature", "cannot"),
    ({**CRITIC, "training": {"steps": 9}}, "algorithm.critic.warmup_steps", "cannot"),
    ({"optimizer": {"warmup_steps": 10}, "training": {"steps": 9}}, "optimizer.warmup_steps", "warns"),
    ({"algorithm": {"type": "ppo_clip", "clip_high": 0.0}}, "algorithm.clip_high", "warns"),
    ({"algorithm": {"type": "ppo_clip", "clip_low": 0.0}}, "algorithm.clip_low", "warns"),
    ({"algorithm": {**GSPO, "clip_low": 0.0}}, "algorithm.clip_low", "warns"),
    ({"training": {"precision": "bfloat16", "max_logprob_gap": 0.02}}, "training.max_logprob_gap", "warns"),
    ({"algorithm": {**GSPO, "correction": {"type": "bypass"}}}, "algorithm.correction", "warns"),
    ({"algorithm": {"type": "reinforce"}, "sampling": {"max_policy_lag": 2}}, "algorithm.type", "warns"),
    ({"algorithm": {"type": "reinforce", "epochs": 2}}, "algorithm.type", "warns"),
    ({"algorithm": {"type": "importance_sampling"}, "sampling": {"max_policy_lag": 4}}, "algorithm.type", "warns"),
    ({"runner": {"stdout_reward": False}}, "runner.stdout_reward", "warns"),
    (
        {
            "sampling": {"refill_zero_variance": 1},
            "training": {"early_stopping": {"metric": "train_reward", "patience": 3, "average_over": 4}},
        },
        "training.early_stopping.metric",
        "warns",
    ),
    (
        {"training": {"early_stopping": {"metric": "train_reward", "patience": 3}}},
        "training.early_stopping.average_over",
        "warns",
    ),
    (
        {"sampling": {"curriculum": {}}, "training": {"early_stopping": {"metric": "train_reward", "target": 1.0}}},
        "training.early_stopping.metric",
        "warns",
    ),
]
TAUGHT = {"type": "importance_sampling", "distillation": {"model": "/models/teacher"}}
SOUND: list[dict[str, Any]] = [
    {},
    {"training": {"early_stopping": {"metric": "train_reward", "target": 1.0}}},
    {"sampling": {"group_size": 1, "min_siblings": 1}, "algorithm": TAUGHT},
    {"sampling": {"group_size": 1, "min_siblings": 1}, "credit": {"baseline": {"type": "ema"}}},
    {"sampling": {"temperature": 0.0, "override": {}}},
    {"sampling": {"temperature": 0.0}, "training": {"steps": 0}},
    {**CRITIC, "training": {"steps": 10}},
    {"optimizer": {"warmup_steps": 9}, "training": {"steps": 9}},
    {"algorithm": {**GSPO, "correction": DECOUPLED, "mini_batches": 2}, "sampling": {"groups_per_step": 2}},
    {"algorithm": {"type": "reinforce", "correction": DECOUPLED}, "sampling": {"max_policy_lag": 2}},
    {"algorithm": GSPO},
    {"training": {"lora": {}}},
    {"runner": {"stdout_reward": False, "grant_reward": True}},
    {"runner": {"stdout_reward": False}, "credit": {"air": {}}},
]


def run(changes: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate(overlay(run_document(), changes))


@pytest.mark.parametrize(("changes", "path", "severity"), CASES)
def test_a_combination_is_judged(changes: dict[str, Any], path: str, severity: str) -> None:
    document = run(changes)
    assert [(one.path, one.severity) for one in judge(document)] == [(path, severity)]
    # A stored run is read whatever is thought of it.
    assert RunConfig.stored(document.storable()) == document


@pytest.mark.parametrize("changes", SOUND)
def test_sound_documents_pass(changes: dict[str, Any]) -> None:
    assert judge(run(changes)) == []


def test_a_tight_gap_is_judged_by_the_precision_of_the_trainers_device() -> None:
    tight = run({"training": {"max_logprob_gap": 0.02}})
    for device, paths in ((Device("cuda", flex=True), ["training.max_logprob_gap"]), (CPU, [])):
        assert [one.path for one in judge(tight, tight.computation(device))] == paths
    # A correction that the device chooses is no choice of the document.
    for device in (Device("cuda", flex=True), CPU):
        assert judge(run({"algorithm": GSPO}), run({"algorithm": GSPO}).computation(device)) == []


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_pass(recipe: str) -> None:
    document = {name: value for name, value in run_document().items() if name != "sampling"}
    assert judge(RunConfig.model_validate({**document, "recipe": recipe})) == []


def test_further_policies_are_judged_with_their_own_settings() -> None:
    roles = [{"name": "checker", "system": "check", "policy": "small"}, {"name": "writer"}]
    policies = {"small": {"pool": "other", "algorithm": {**GSPO, "correction": {"type": "bypass"}}}}
    found = run({"roles": roles, "policies": policies})
    assert [one.path for one in judge(found)] == ["policies.small.algorithm.correction"]


def test_discounts_are_1_by_default_and_critics_of_before_are_read() -> None:
    assert (DiscountedCredit().gamma, TemporalCredit().gamma) == (1.0, 1.0)
    before = overlay(run(CRITIC).model_dump(mode="json"), {"credit": {"rule": {"type": "discounted", "gamma": 0.95}}})
    assert RunConfig.stored(before).algorithm.critic is not None
    # The version before reads no other rule beside a critic than its own default.
    assert "rule" not in run(CRITIC).storable()["credit"]


GRADED = {"components": [{"name": "answer", "grader": {"type": "token_f1", "reference": "{task.answer}"}}]}


@pytest.mark.parametrize(
    ("changes", "cannot"),
    [
        ({"reward": GRADED, "credit": {"baseline": {"min_spread": 1.0}}}, True),
        ({"reward": GRADED, "credit": {"baseline": {"min_spread": 0.9}}}, False),
        ({"reward": GRADED, "credit": {"baseline": {"min_spread": 1.0}, "shaping": {"scale": 2.0}}}, False),
        ({"reward": GRADED, "credit": {"baseline": {"min_spread": 1.0}}, "sampling": {"failure_reward": -1.0}}, False),
        ({"reward": {**GRADED, "clip": [0.5, 1.0]}, "credit": {"baseline": {"min_spread": 0.5}}}, True),
        ({"reward": GRADED, "credit": {"baseline": {"min_spread": 1.0}}, "algorithm": TAUGHT}, False),
        # The agent's own line may have any reward.
        ({"credit": {"baseline": {"min_spread": 1e6}}}, False),
    ],
)
def test_rewards_that_never_differ_by_more_than_the_spread_are_refused(changes: dict[str, Any], cannot: bool) -> None:
    assert [one.path for one in judge(run(changes))] == (["credit.baseline.min_spread"] if cannot else [])


def test_a_script_needs_the_folder_that_holds_it() -> None:
    for command, directory, judged in (
        (["python", "agent.py"], None, True),
        (["python", "agent.py"], "/agents", False),
        (["python", "/agents/agent.py"], None, False),
        (["python", "-m", "agent"], None, False),
    ):
        found = judge(run({"agent": {"command": command, "directory": directory}}))
        assert [one.path for one in found] == (["agent.directory"] if judged else [])
