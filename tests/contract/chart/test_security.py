"""Pods are restricted, rights are those of a short list, and no secret stands outside a Secret."""

from __future__ import annotations

import base64
import json

import pytest
import yaml

from leyden.libs.sandbox.pod_server import PORT
from tests.contract.chart.chart import (
    CASES,
    CHART,
    FULLNAME,
    NAMESPACE,
    containers,
    objects,
    of_kind,
    pod_templates,
    pods,
    template,
)

RIGHTS = {
    (f"{FULLNAME}-test", NAMESPACE): {("deployments", "list"), ("statefulsets", "list")},
    (f"{FULLNAME}-controller", NAMESPACE): {
        ("jobs", "create get list watch delete"),
        ("pods", "get list watch"),
        ("events", "list"),
        ("endpointslices", "list watch"),
        ("roles", "get", f"{FULLNAME}-controller"),
    },
    (f"{FULLNAME}-runner", "platform-trial-rollouts"): {
        ("jobs", "create get list watch patch delete"),
        ("pods", "get list watch"),
        ("pods/log", "get"),
        ("secrets", "create"),
        ("events", "list"),
        ("roles", "get", f"{FULLNAME}-runner"),
    },
}
COMPONENTS = {"api", "controller", "runner", "gateway", "collector", "credit", "grader", "engine", "postgres", "redis"}


@pytest.mark.parametrize("case", CASES)
def test_every_pod_is_restricted(case: str) -> None:
    for name, pod in pods(case):
        if name == "shared":
            continue
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        assert spec["enableServiceLinks"] is False, name
        assert all(
            set(volume) - {"name"} <= {"emptyDir", "secret", "configMap", "persistentVolumeClaim"}
            for volume in spec["volumes"]
        )
        for container in containers(pod):
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert "memory" in container["resources"]["limits"], name


def test_a_pod_that_attempts_share_has_four_capabilities_and_the_agents_namespace_the_level_for_it() -> None:
    spec = pod_templates("all-on")["shared"]["spec"]
    [agent] = spec["containers"]
    context = agent["securityContext"]
    assert context["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN", "KILL", "SETGID", "SETUID"]}
    assert (context["runAsUser"], context["allowPrivilegeEscalation"]) == (0, False)
    assert spec["securityContext"] == {"seccompProfile": {"type": "RuntimeDefault"}}
    for one in spec["initContainers"]:
        assert one["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    levels = {
        case: next(of_kind(case, "Namespace"))["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
        for case in ("all-on", "minimal")
    }
    assert levels == {"all-on": "baseline", "minimal": "restricted"}
    assert "shared" not in pod_templates("minimal")


def test_the_runner_alone_reaches_the_server_of_a_shared_pod() -> None:
    policies = {one["metadata"]["name"]: one["spec"] for one in of_kind("all-on", "NetworkPolicy")}
    [rule] = policies[f"{FULLNAME}-agents"]["ingress"]
    [peer] = rule["from"]
    assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "runner"
    assert rule["ports"] == [{"port": PORT, "protocol": "TCP"}]
    assert rule["ports"] in [one.get("ports") for one in policies[f"{FULLNAME}-runner"]["egress"]]


@pytest.mark.parametrize("case", CASES)
def test_services_that_make_jobs_and_the_chart_test_alone_may_call_the_api_server(case: str) -> None:
    mounted = {
        pod["metadata"]["labels"]["app.kubernetes.io/component"]
        for _, pod in pods(case)
        if pod["spec"]["automountServiceAccountToken"]
    }
    assert mounted - {"grader"} == {"controller", "runner", "test"}
    # With graders that are containers.
    assert ("grader" in mounted) == (case == "all-on")
    assert not list(of_kind(case, "ClusterRole", "ClusterRoleBinding"))


def rights(case: str) -> dict[tuple[str, str], set[tuple[str, ...]]]:
    return {
        (role["metadata"]["name"], role["metadata"]["namespace"]): {
            (resource, " ".join(rule["verbs"]), *rule.get("resourceNames", []))
            for rule in role["rules"]
            for resource in rule["resources"]
        }
        for role in of_kind(case, "Role")
    }


def test_a_grader_of_containers_has_the_rights_of_a_runner_and_patches_no_job() -> None:
    other = {("jobs", "create get list watch patch delete"), ("roles", "get", f"{FULLNAME}-runner")}
    own = {("jobs", "create get list watch delete"), ("roles", "get", f"{FULLNAME}-grader")}
    runner = RIGHTS[f"{FULLNAME}-runner", "platform-trial-rollouts"]
    assert rights("all-on") == RIGHTS | {(f"{FULLNAME}-grader", "platform-trial-rollouts"): (runner - other) | own}


def test_rights_are_those_of_the_list() -> None:
    found = rights("minimal")
    assert found == RIGHTS
    for binding in of_kind("all-on", "RoleBinding"):
        assert binding["subjects"] == [
            {"kind": "ServiceAccount", "name": binding["roleRef"]["name"], "namespace": NAMESPACE}
        ]


def test_accounts_read_the_role_that_owns_their_jobs() -> None:
    for deployment in of_kind("all-on", "Deployment"):
        [container] = deployment["spec"]["template"]["spec"]["containers"]
        if container["name"] in {"controller", "runner", "grader"}:
            variable = f"{container['name'].upper()}_OWNER_ROLE"
            assert {"name": variable, "value": deployment["metadata"]["name"]} in container["env"]


def test_selectors_never_change() -> None:
    # Kubernetes refuses to change them: an upgrade would fail.
    found = {
        one["metadata"]["name"].removeprefix(f"{FULLNAME}-"): one["spec"]["selector"]["matchLabels"]
        for one in of_kind("all-on", "Deployment", "StatefulSet")
    }
    assert found == {
        component: {
            "app.kubernetes.io/name": "leyden",
            "app.kubernetes.io/instance": "trial",
            "app.kubernetes.io/component": component,
        }
        for component in COMPONENTS
    }


def test_secrets_stand_in_secrets_alone() -> None:
    secret = next(of_kind("minimal", "Secret"))
    texts = {key: base64.b64decode(value).decode() for key, value in secret["data"].items()}
    tokens = {"admin-token", "engine-api-key", "engine-admin-key", "postgres-password", "redis-password"}
    assert set(texts) == {"capability-keys.json"} | tokens
    keys = json.loads(texts.pop("capability-keys.json"))
    assert all(len(key) >= 32 for key in keys.values())
    # Alphanumeric, because passwords become parts of addresses.
    assert all(len(text) >= 32 and text.isalnum() for text in texts.values())
    others = yaml.safe_dump([one for one in objects("minimal") if one["kind"] != "Secret"])
    assert not [key for key, text in texts.items() if text in others]


def test_agents_reach_gateway_and_collector_alone() -> None:
    policy = next(
        one for one in of_kind("minimal", "NetworkPolicy") if one["metadata"]["namespace"] == "platform-trial-rollouts"
    )
    assert policy["spec"]["podSelector"] == {}
    assert policy["spec"]["ingress"] == []
    dns, gateway, collector = policy["spec"]["egress"]
    assert {port["port"] for port in dns["ports"]} == {53}
    for rule, component, ports in ((gateway, "gateway", {8001}), (collector, "collector", {8003, 4317})):
        (peer,) = rule["to"]
        assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == component
        assert peer["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": NAMESPACE}
        assert {port["port"] for port in rule["ports"]} == ports


def test_containers_that_grade_reach_no_internet_without_the_operators_word() -> None:
    for allowed in (False, True):
        rendered = template(
            *("-f", str(CHART / "ci" / "all-on-values.yaml")),
            *("--set", f"grader.containers.allowInternet={str(allowed).lower()}"),
        ).stdout
        found = [one for one in yaml.safe_load_all(rendered) if one]
        policies = {one["metadata"]["name"] for one in found if one["kind"] == "NetworkPolicy"}
        assert f"{FULLNAME}-verifier" in policies
        assert (f"{FULLNAME}-verifier-network" in policies) is allowed
        [api] = [one for one in found if one["kind"] == "Deployment" and one["metadata"]["name"] == f"{FULLNAME}-api"]
        variables = api["spec"]["template"]["spec"]["containers"][0]["env"]
        assert {"name": "API_CONTAINER_INTERNET", "value": str(allowed).lower()} in variables


def test_containers_that_grade_reach_nothing_but_the_internet_where_a_run_asks_for_it() -> None:
    policies = {
        one["metadata"]["name"]: one["spec"]
        for one in of_kind("all-on", "NetworkPolicy")
        if one["metadata"]["namespace"] == "platform-trial-rollouts"
    }
    closed, opened = policies[f"{FULLNAME}-verifier"], policies[f"{FULLNAME}-verifier-network"]
    labels = closed["podSelector"]["matchLabels"]
    assert labels["app.kubernetes.io/component"] == "verifier"
    assert (closed["ingress"], closed["egress"]) == ([], [])
    assert opened["podSelector"]["matchLabels"] == {**labels, "leyden.dev/network": "true"}
    dns, internet = opened["egress"]
    assert {port["port"] for port in dns["ports"]} == {53}
    assert "10.0.0.0/8" in internet["to"][0]["ipBlock"]["except"]
    # Policies add up: that of agents must not hold for these pods.
    assert policies[f"{FULLNAME}-rollouts"]["podSelector"] == {
        "matchExpressions": [{"key": "app.kubernetes.io/component", "operator": "NotIn", "values": ["verifier"]}]
    }


@pytest.mark.parametrize("case", CASES)
def test_every_pod_has_a_policy(case: str) -> None:
    chosen = {
        policy["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
        for policy in of_kind(case, "NetworkPolicy")
        if policy["metadata"]["namespace"] == NAMESPACE
    }
    components = {pod["metadata"]["labels"]["app.kubernetes.io/component"] for _, pod in pods(case)}
    assert components - {"agent", "agents", "verifier"} <= chosen


def test_what_an_uninstallation_keeps() -> None:
    kept = {
        (one["kind"], one["metadata"]["name"])
        for one in objects("minimal")
        if one["metadata"].get("annotations", {}).get("helm.sh/resource-policy") == "keep"
    }
    assert kept == {
        ("Secret", f"{FULLNAME}-secrets"),
        ("PersistentVolumeClaim", f"{FULLNAME}-storage"),
        ("Namespace", "platform-trial-rollouts"),
    }


def test_a_change_of_the_pod_templates_restarts_runner_and_controller() -> None:
    def checksum(*arguments: str) -> set[str]:
        found = yaml.safe_load_all(template(*arguments).stdout)
        return {
            one["spec"]["template"]["metadata"]["annotations"]["checksum/config"]
            for one in found
            if one and one["kind"] == "Deployment" and one["metadata"]["name"].endswith(("-runner", "-controller"))
        }

    assert checksum() == checksum()
    assert checksum() != checksum("--set", "rollouts.tmpSize=2Gi")


def test_other_keys_restart_the_engines() -> None:
    def checksum(*arguments: str) -> str:
        found = yaml.safe_load_all(template(*arguments).stdout)
        engine = next(
            one
            for one in found
            if one and one["metadata"]["name"] == f"{FULLNAME}-engine" and "template" in one.get("spec", ())
        )
        return str(engine["spec"]["template"]["metadata"]["annotations"]["checksum/keys"])

    assert checksum() == checksum("--set", "engine.replicas=3")
    assert checksum() != checksum("--set", "secrets.engineAdminKey.value=another")


def test_the_api_reaches_the_addresses_of_external_agents() -> None:
    values = "gatewayUrl=https://g.example:8443/,collectorUrl=http://c.example"
    pairs = [f"api.externalAgents.{pair}" for pair in ("enabled=true", *values.split(","))]
    found = yaml.safe_load_all(template("--set", ",".join(pairs)).stdout)
    policies = {one["metadata"]["name"]: one["spec"] for one in found if one and one["kind"] == "NetworkPolicy"}
    doors = {"ports": [{"port": port, "protocol": "TCP"} for port in (8443, 80)]}
    assert [name for name, spec in policies.items() if doors in spec["egress"]] == [f"{FULLNAME}-api"]


def test_the_migration_is_named_by_what_it_runs() -> None:
    def name(*arguments: str) -> str:
        found = yaml.safe_load_all(template("--show-only", "templates/migrations/job.yaml", *arguments).stdout)
        return next(one["metadata"]["name"] for one in found if one)

    assert name() == name("--set", "engine.replicas=3")
    assert name() != name("--set", "api.image.tag=0.3.0")


@pytest.mark.parametrize("case", CASES)
def test_engines_have_no_key_to_the_store(case: str) -> None:
    for name, pod in pods(case):
        if "engine" in name and "postgres" not in name:
            for container in containers(pod):
                variables = [variable["name"] for variable in container.get("env", ())]
                assert not [one for one in variables if one.startswith(("LEYDEN_DATABASE", "LEYDEN_REDIS"))], name
                assert "postgres-password" not in str(container) and "redis-password" not in str(container)
