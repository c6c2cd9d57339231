"""Engines over several nodes: a LeaderWorkerSet with the fields of its API alone, whose leaders answer."""

from __future__ import annotations

import kubernetes_validate

from tests.contract.chart.chart import FULLNAME, Object, of_kind

# The fields of leaderworkerset.x-k8s.io/v1: https://lws.sigs.k8s.io/docs/reference/leaderworkerset.v1/
SPEC = {"replicas", "startupPolicy", "rolloutStrategy", "leaderWorkerTemplate"}
TEMPLATE = {"size", "restartPolicy", "leaderTemplate", "workerTemplate"}


def group() -> Object:
    (found,) = of_kind("gpu-multinode", "LeaderWorkerSet")
    return found


def test_it_has_the_fields_of_the_api_and_valid_pods() -> None:
    spec = group()["spec"]
    assert set(spec) == SPEC
    assert set(spec["leaderWorkerTemplate"]) == TEMPLATE
    assert (spec["replicas"], spec["leaderWorkerTemplate"]["size"]) == (3, 2)
    for role in ("leader", "worker"):
        pod = spec["leaderWorkerTemplate"][f"{role}Template"]
        labels = pod["metadata"]["labels"]
        deployment = {"replicas": 1, "selector": {"matchLabels": labels}, "template": pod}
        workload = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "pods"}, "spec": deployment}
        kubernetes_validate.validate(workload, "1.34", strict=True)
    assert not [one for one in of_kind("gpu-multinode", "StatefulSet") if "engine" in one["metadata"]["name"]]


def test_pods_find_their_group_and_the_leader_alone_answers() -> None:
    template = group()["spec"]["leaderWorkerTemplate"]
    (leader,), (worker,) = (template[f"{role}Template"]["spec"]["containers"] for role in ("leader", "worker"))
    rendezvous = [
        "--dist-init-addr=$(LWS_LEADER_ADDRESS):20000", "--nnodes=$(LWS_GROUP_SIZE)", "--node-rank=$(LWS_WORKER_INDEX)",
    ]  # fmt: skip
    for container in (leader, worker):
        assert container["args"] == [*rendezvous, "--mem-fraction-static=0.8"]
        assert {"name": "ENGINE_TENSOR_PARALLEL", "value": "8"} in container["env"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert "readinessProbe" in leader
    assert not {"startupProbe", "readinessProbe", "livenessProbe"} & set(worker)
    service = next(
        one for one in of_kind("gpu-multinode", "Service") if one["metadata"]["name"] == f"{FULLNAME}-engine"
    )
    assert service["spec"]["selector"].items() <= template["leaderTemplate"]["metadata"]["labels"].items()
    assert not service["spec"]["selector"].items() <= template["workerTemplate"]["metadata"]["labels"].items()
    # The operator makes a headless Service of the group's name.
    assert group()["metadata"]["name"] not in {one["metadata"]["name"] for one in of_kind("gpu-multinode", "Service")}


def open_to(case: str, component: str) -> list[set[str]]:
    """The components that reach a component on every port, and those that it reaches so."""
    (policy,) = [one for one in of_kind(case, "NetworkPolicy") if one["metadata"]["name"] == f"{FULLNAME}-{component}"]
    found = []
    for side, rules in (("from", policy["spec"]["ingress"]), ("to", policy["spec"]["egress"])):
        peers = [peer for rule in rules if "ports" not in rule for peer in rule[side]]
        found.append({peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for peer in peers})
    return found


def test_nodes_of_a_group_and_a_trainer_that_sends_weights_reach_each_other_on_every_port() -> None:
    assert open_to("gpu-multinode", "engine") == [{"engine", "trainer"}] * 2
    # The controller connects to it before it asks the engine.
    assert open_to("gpu-multinode", "trainer") == [{"engine", "trainer", "controller"}, {"engine", "trainer"}]
    assert open_to("gpu-multinode", "controller") == [set(), {"trainer"}]
    assert open_to("pools", "controller") == [set(), set()]
    assert open_to("pools", "engine") == [set(), set()]
    assert open_to("pools", "trainer") == [{"trainer"}] * 2
