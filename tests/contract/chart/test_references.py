"""Nothing dangles: whatever an object names is rendered, or is the user's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from leyden.libs.service.startup import variable
from leyden.services.api.settings import Settings as ApiSettings
from leyden.services.collector.settings import Settings as CollectorSettings
from leyden.services.controller.fetcher.settings import Settings as FetcherSettings
from leyden.services.controller.settings import Settings as ControllerSettings
from leyden.services.credit.settings import Settings as CreditSettings
from leyden.services.engine.settings import Settings as EngineSettings
from leyden.services.gateway.settings import Settings as GatewaySettings
from leyden.services.grader.settings import Settings as GraderSettings
from leyden.services.runner.settings import Settings as RunnerSettings
from leyden.services.trainer.settings import Settings as TrainerSettings
from tests.contract.chart.chart import (
    CASES,
    FULLNAME,
    NAMESPACE,
    Object,
    containers,
    env_of,
    of_kind,
    pod_templates,
    pods,
)

# Made outside the release.
GIVEN = {
    "mine",
    "database",
    "database-ca",
    "redis-address",
    "leyden-tls",
    "models",
    "registry",
    f"{FULLNAME}-postgres-app",
}
SETTINGS = {
    "api": ApiSettings, "controller": ControllerSettings, "runner": RunnerSettings, "gateway": GatewaySettings,
    "warm-runner": RunnerSettings,
    "collector": CollectorSettings, "credit": CreditSettings, "grader": GraderSettings,
    "fetcher": FetcherSettings, "engine": EngineSettings, "trainer": TrainerSettings,
}  # fmt: skip
# Of SGLang's start script.
OTHERS = {"ENGINE_TENSOR_PARALLEL"}


def named(value: Any, key: str) -> Iterator[Any]:
    """Every value of a key, however deep."""
    if isinstance(value, dict):
        if key in value:
            yield value[key]
        for one in value.values():
            yield from named(one, key)
    elif isinstance(value, list):
        for one in value:
            yield from named(one, key)


def rendered(case: str, kind: str) -> set[str]:
    return {one["metadata"]["name"] for one in of_kind(case, kind)}


@pytest.mark.parametrize("case", CASES)
def test_secrets_configmaps_claims_and_accounts_exist(case: str) -> None:
    for name, pod in pods(case):
        secrets = [one["name"] for one in named(pod, "secretKeyRef")] + [
            one["secretName"] for one in named(pod, "secret")
        ]
        secrets += [one["name"] for one in named(pod, "secretRef")]
        assert set(secrets) <= rendered(case, "Secret") | GIVEN, name
        assert {one["name"] for one in named(pod, "configMap")} <= rendered(case, "ConfigMap"), name
        claims = {one["claimName"] for one in named(pod, "persistentVolumeClaim")}
        assert claims <= rendered(case, "PersistentVolumeClaim") | GIVEN, name
        accounts = set(named(pod, "serviceAccountName"))
        assert accounts <= rendered(case, "ServiceAccount") | {"default"}, name


@pytest.mark.parametrize("case", CASES)
def test_deployments_name_their_account_since_kubernetes_keeps_one_that_is_left_out(case: str) -> None:
    for deployment in of_kind(case, "Deployment"):
        pod = deployment["spec"]["template"]["spec"]
        assert pod.get("serviceAccountName"), deployment["metadata"]["name"]


@pytest.mark.parametrize("case", CASES)
def test_keys_of_the_charts_secret_exist(case: str) -> None:
    own = {key for secret in of_kind(case, "Secret") for key in secret["data"]}
    for name, pod in pods(case):
        used = {one["key"] for one in named(pod, "secretKeyRef") if one["name"] == f"{FULLNAME}-secrets"}
        assert used <= own, name


@pytest.mark.parametrize("case", CASES)
def test_selectors_find_pods_and_ports_have_names(case: str) -> None:
    labels = [pod["metadata"]["labels"] for _, pod in pods(case)]

    def selected(selector: dict[str, str]) -> list[dict[str, str]]:
        return [one for one in labels if selector.items() <= one.items()]

    for workload in of_kind(case, "Deployment", "StatefulSet"):
        assert len(selected(workload["spec"]["selector"]["matchLabels"])) == 1
    for service in of_kind(case, "Service"):
        component = service["spec"]["selector"]["app.kubernetes.io/component"]
        found = [
            pod for _, pod in pods(case) if service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        ]
        assert len(found) == 1, component
        names = {port["name"] for container in containers(found[0]) for port in container.get("ports", ())}
        assert {port["targetPort"] for port in service["spec"].get("ports", ())} <= names
    for policy in of_kind(case, "NetworkPolicy"):
        selector = policy["spec"]["podSelector"].get("matchLabels", {})
        # The grader adds this one to a pod's labels.
        selector = {name: value for name, value in selector.items() if name != "leyden.dev/network"}
        optional = selector.get("app.kubernetes.io/component") in {"model", "test"}
        assert optional or selected(selector), policy["metadata"]["name"]
    for scaler in of_kind(case, "HorizontalPodAutoscaler"):
        target = next(
            one
            for one in of_kind(case, "Deployment")
            if one["metadata"]["name"] == scaler["spec"]["scaleTargetRef"]["name"]
        )
        assert "replicas" not in target["spec"]


@pytest.mark.parametrize("case", CASES)
def test_mounts_name_volumes(case: str) -> None:
    for name, pod in pods(case):
        volumes = {one["name"] for one in pod["spec"].get("volumes", ())} | {"data"}
        assert {mount["name"] for one in containers(pod) for mount in one.get("volumeMounts", ())} <= volumes, name


@pytest.mark.parametrize("case", CASES)
def test_variables_are_settings_of_the_service(case: str) -> None:
    for name, pod in pods(case):
        component = pod["metadata"]["labels"]["app.kubernetes.io/component"]
        if component not in SETTINGS:
            continue
        settings = SETTINGS[component]
        known = {variable(settings, field) for field in settings.model_fields} | OTHERS
        ours = {
            one
            for one in env_of(containers(pod)[-1])
            if one.startswith((settings.model_config["env_prefix"], "LEYDEN_")) and not one.endswith("_PASSWORD")
        }
        assert ours <= known, name


@pytest.mark.parametrize("case", CASES)
def test_addresses_of_services_are_services(case: str) -> None:
    services = {
        f"{one['metadata']['name']}.{one['metadata']['namespace']}.svc": {
            port["port"] for port in one["spec"].get("ports", ())
        }
        for one in of_kind(case, "Service")
    }
    runner = next(one for one in of_kind(case, "Deployment") if one["metadata"]["name"] == f"{FULLNAME}-runner")
    env = env_of(containers(runner["spec"]["template"])[-1])
    for name in ("RUNNER_GATEWAY_URL", "RUNNER_COLLECTOR_URL", "RUNNER_COLLECTOR_GRPC_URL"):
        host, _, port = env[name]["value"].removeprefix("http://").partition(":")
        assert int(port) in services[host]
    controller = next(one for one in of_kind(case, "Deployment") if one["metadata"]["name"] == f"{FULLNAME}-controller")
    env = env_of(containers(controller["spec"]["template"])[-1])
    for name in {"CONTROLLER_ENGINE_SERVICE", "CONTROLLER_TRAINER_SERVICE"} & env.keys():
        assert f"{env[name]['value']}.{NAMESPACE}.svc" in services


def test_trainer_and_engines_see_weights_under_one_path() -> None:
    def mounts(pod: Object) -> set[str]:
        return {one["mountPath"] for one in containers(pod)[-1]["volumeMounts"] if one["name"] == "storage"}

    found = dict(pods("minimal"))
    assert mounts(found[f"{FULLNAME}-engine"]) == mounts(pod_templates("minimal")["trainer"]) == {"/var/lib/leyden"}
