"""An operator's rules refuse each part of a run's pod that they do not allow, and name the value to change."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from leyden.libs.contracts.agent_rules import AgentRules, quantity
from leyden.libs.contracts.config import ContainerRunner, KubernetesRunner

RULES = AgentRules(
    secrets=("tools", "team-*"),
    images=("registry.example/agents/*",),
    nodes=("pool=agents", "kubernetes.io/arch=*"),
    tolerations=("agents",),
    limits={"cpu": "2", "memory": "1Gi", "nvidia.com/gpu": "0"},
    attempts_per_pod=20,
)


def runner(**changes: Any) -> KubernetesRunner:
    return KubernetesRunner(**{"image": "registry.example/agents/a:1", **changes})


ALLOWED: list[dict[str, Any]] = [
    {},
    {"secrets": {"A": {"name": "tools", "key": "a"}, "B": {"name": "team-blue", "key": "b"}}},
    {"attempts_per_pod": 20},
    {"node_selector": {"pool": "agents", "kubernetes.io/arch": "arm64"}},
    {"tolerations": [{"key": "agents", "operator": "Exists"}]},
    {"resources": {"limits": {"cpu": "2000m", "memory": "1024Mi", "ephemeral-storage": "900Gi"}}},
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"secrets": {"A": {"name": "leyden-secrets", "key": "a"}}}, "rollouts.allow.secrets: tools, team-"),
    ({"image": "docker.io/other:1"}, "rollouts.allow.images"),
    ({"node_selector": {"pool": "gpus"}}, "pool=gpus is not among the nodes"),
    ({"tolerations": [{"operator": "Exists"}]}, "rollouts.allow.tolerations"),
    ({"attempts_per_pod": 21}, "attempts_per_pod 21 is above 20 (rollouts.attemptsPerPod)"),
    ({"resources": {"limits": {"cpu": "2001m"}}}, "2001m of cpu is above 2"),
    ({"resources": {"requests": {"nvidia.com/gpu": "1"}}}, "1 of nvidia.com/gpu is above 0"),
]


@pytest.mark.parametrize("changes", ALLOWED)
def test_an_allowed_pod_has_no_refusal(changes: dict[str, Any]) -> None:
    assert RULES.refusals(runner(**changes)) == []


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_another_pod_is_refused_with_the_value_to_change(changes: dict[str, Any], words: str) -> None:
    [refusal] = RULES.refusals(runner(**changes))
    assert words in refusal


def test_the_images_of_containers_keep_the_same_rule() -> None:
    assert RULES.refusals(ContainerRunner(image="registry.example/agents/a:1")) == []
    [refusal] = RULES.refusals(ContainerRunner(image="docker.io/other:1"))
    assert "docker.io/other:1 is not among the images that runs may name (API_AGENT_RULES.images: " in refusal
    assert AgentRules().refusals(ContainerRunner(image="docker.io/other:1")) == []


def test_by_default_a_run_names_everything_but_secrets_and_shares_no_pod() -> None:
    everything = runner(image="any:1", node_selector={"a": "b"}, tolerations=[{}], resources={"limits": {"cpu": "900"}})
    assert AgentRules().refusals(everything) == []
    assert AgentRules().refusals(runner(secrets={"A": {"name": "tools", "key": "a"}}))
    assert AgentRules().refusals(runner(attempts_per_pod=2))


def test_a_secret_replaces_no_variable_of_the_platform() -> None:
    with pytest.raises(ValidationError, match="OPENAI_API_KEY"):
        runner(secrets={"OPENAI_API_KEY": {"name": "tools", "key": "a"}})


@pytest.mark.parametrize(
    ("text", "number"), [("500m", 0.5), ("2", 2), ("1k", 1000), ("1Ki", 1024), ("1.5Gi", 1.5 * 2**30), ("1E", 1e18)]
)
def test_quantities_are_those_of_kubernetes(text: str, number: float) -> None:
    assert quantity(text) == number
