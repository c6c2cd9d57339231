"""Runners for trusted agents, beside those that make Jobs."""

from __future__ import annotations

import json

from tests.contract.chart.chart import FULLNAME, NAMESPACE, Object, containers, env_of, of_kind


def deployment(name: str) -> Object:
    found = {one["metadata"]["name"]: one for one in of_kind("warm-pool", "Deployment")}
    return found[f"{FULLNAME}-{name}"]


def policy(component: str) -> Object:
    return next(
        one["spec"]
        for one in of_kind("warm-pool", "NetworkPolicy")
        if one["metadata"]["namespace"] == NAMESPACE
        and one["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == component
    )


def components(rules: list[Object], side: str) -> set[str]:
    return {
        peer["podSelector"]["matchLabels"].get("app.kubernetes.io/component")
        for rule in rules
        for peer in rule.get(side, ())
        if "podSelector" in peer
    }


def test_it_is_a_second_deployment_of_the_runner_with_processes() -> None:
    pool = deployment("warm-runner")["spec"]
    (container,) = pool["template"]["spec"]["containers"]
    assert pool["replicas"] == 2
    assert container["image"] == "docker.io/research/agents:7"
    assert container["command"] == ["python", "-m", "leyden.services.runner"]
    env = env_of(container)
    assert (env["RUNNER_BACKEND"]["value"], env["RUNNER_CONCURRENCY"]["value"]) == ("process", "8")
    assert env["TOOL_URL"]["value"] == "http://tool"
    assert json.loads(env["RUNNER_HIDDEN_PATHS"]["value"]) == ["/etc/leyden"]
    drain, shutdown = (int(env[f"RUNNER_{name}_SECONDS"]["value"]) for name in ("DRAIN", "SHUTDOWN"))
    pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert drain < shutdown < pool["template"]["spec"]["terminationGracePeriodSeconds"] - pause
    assert pool["template"]["spec"]["serviceAccountName"] == "default"
    jobs = env_of(containers(deployment("runner")["spec"]["template"])[-1])
    assert jobs["RUNNER_BACKEND"]["value"] == "kubernetes"


def test_the_api_takes_runs_of_both_types() -> None:
    env = env_of(containers(deployment("api")["spec"]["template"])[-1])
    assert json.loads(env["API_RUNNER_TYPES"]["value"]) == ["kubernetes", "process"]


def test_it_reaches_stores_gateway_and_collector_and_no_api_server() -> None:
    own = policy("warm-runner")
    assert [(rule["from"][0]["podSelector"]["matchLabels"], rule["ports"]) for rule in own["ingress"]] == [
        ({"app.kubernetes.io/name": "prometheus"}, [{"port": 9090, "protocol": "TCP"}])
    ]
    assert components(own["egress"], "to") == {"postgres", "redis", "gateway", "collector"}
    assert not [peer for rule in own["egress"] for peer in rule.get("to", ()) if "ipBlock" in peer]
    for component in ("postgres", "redis", "gateway", "collector"):
        assert "warm-runner" in components(policy(component)["ingress"], "from"), component
