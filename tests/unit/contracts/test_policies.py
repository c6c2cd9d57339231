from typing import Any

import pytest
from pydantic import ValidationError

from leyden.libs.contracts.config import RunConfig

PAIR: dict[str, Any] = {
    "name": "pair",
    "dataset": "d",
    "agent": {"command": ["x"]},
    "optimizer": {"learning_rate": 0.5},
    "training": {"steps": 7, "lora": {"rank": 4}},
    "evaluation": {"dataset": "held-out"},
    "roles": [{"name": "writer", "agent_name": "w"}, {"name": "checker", "policy": "judge"}],
    "policies": {"judge": {"pool": "second", "model": "/models/judge"}},
}


def test_a_policy_has_the_settings_of_its_run_except_its_own() -> None:
    run = RunConfig.model_validate(PAIR)
    assert RunConfig.stored(run.model_dump(mode="json")) == run
    judge = run.policy_document("judge")
    assert (judge.name, judge.pool, judge.model) == ("pair:judge", "second", "/models/judge")
    assert (judge.training.steps, judge.training.lora, judge.optimizer) == (7, None, run.optimizer)
    assert (judge.policies, judge.evaluation) == ({}, None)


def test_a_version_before_reads_a_run_without_embeddings() -> None:
    run, own = RunConfig.model_validate(PAIR), {"provider": "embedder", "provider_model": None}
    assert "embeddings" not in run.storable()
    assert RunConfig.model_validate({**PAIR, "embeddings": {"provider": "embedder"}}).storable()["embeddings"] == own


def test_frozen_parameters_are_those_of_the_runs_own_model() -> None:
    run = RunConfig.model_validate({**PAIR, "training": {"steps": 7, "frozen": ["lm_head.weight"]}})
    assert run.training.frozen == ["lm_head.weight"]
    assert run.policy_document("judge").training.frozen == []


def test_routers_train_in_the_runs_own_model_alone() -> None:
    policies = {"judge": {"pool": "second", "lora": {}}}
    run = RunConfig.model_validate({**PAIR, "training": {"steps": 7, "router": "trained"}, "policies": policies})
    judge = run.policy_document("judge").training
    assert (run.training.router, judge.router, judge.lora is not None) == ("trained", "frozen", True)


def test_a_run_of_evaluations_needs_no_call_of_its_own_model() -> None:
    roles = [{"name": "checker", "policy": "judge"}]
    RunConfig.model_validate({**PAIR, "roles": roles, "training": {"steps": 0}})


def test_the_name_of_a_policy_may_be_any_word() -> None:
    roles = [{"name": "checker", "agent_name": "c", "policy": "org/judge"}]
    run = RunConfig.model_validate({**PAIR, "roles": roles, "policies": {"org/judge": {"pool": "second"}}})
    assert run.policy_document("org/judge").name == "pair:org-judge"


def test_a_frozen_policy_has_no_steps() -> None:
    run = RunConfig.model_validate({**PAIR, "policies": {"judge": {"pool": "second", "frozen": True}}})
    assert run.policy_document("judge").training.steps == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"policies": {}}, "['judge'] are none of the policies []: add them to policies"),
        ({"roles": []}, "no role names ['judge']: set roles[].policy, or remove them"),
        (
            {"policies": {"judge": {"pool": "s", "frozen": True, "lora": {}, "optimizer": {}}}},
            "a frozen policy trains nothing: remove optimizer",
        ),
        (
            {"policies": {"judge": {"pool": "s", "frozen": True}}, "train": ["checker"]},
            "the policy of ['checker'] does not train",
        ),
        ({"policies": {"judge": {"pool": "s", "provider": "openai"}}}, "either pool or provider"),
        ({"policies": {"judge": {"provider": "openai", "lora": {}}}}, "a provider's model trains nothing: remove lora"),
        ({"policies": {"judge": {"pool": "s", "provider_model": "gpt"}}}, "provider_model needs provider"),
        (
            {"roles": [{"name": "checker", "policy": "judge"}]},
            "no call trains the run's own model: give a role without a policy its calls",
        ),
        ({"train": ["checker"]}, "no call trains the run's own model"),
        (
            {"train": ["writer"]},
            "no role of the policies ['judge'] trains: add one to train, or set their frozen to true",
        ),
        (
            {"policies": {"judge": {"pool": "s", "algorithm": {"type": "ppo_clip", "critic": {}}}}},
            "credit.baseline.type is 'mean': write 'value', or remove the critic",
        ),
    ],
)
def test_contradictions_are_refused_with_the_remedy(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as refused:
        RunConfig.model_validate({**PAIR, **changes})
    assert words in str(refused.value)
