"""Every combination of features renders, on both Helms, to objects that the API server's own schemas accept."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from leyden.services.controller.settings import Settings
from leyden.services.trainer.model.download import folder_name
from tests.contract.chart.chart import (
    CASES,
    CHART,
    FULLNAME,
    HELMS,
    VERSIONS,
    env_of,
    objects,
    of_kind,
    pod_templates,
    template,
    text_of,
)
from tests.support.tools import HELM

# Of custom resources; kubernetes-validate has no schemas for them.
CUSTOM = {"Cluster", "HTTPRoute", "LeaderWorkerSet", "PodMonitor", "PrometheusRule", "ScaledObject"}


@pytest.mark.parametrize("helm", HELMS)
def test_helm_lints_the_chart_without_a_warning(helm: str) -> None:
    done = subprocess.run([str(HELMS[helm]), "lint", "--strict", str(CHART)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("case", CASES)
def test_both_helms_render_the_same(case: str) -> None:
    def parsed(helm: str) -> list[object]:
        found = list(yaml.load_all(text_of(case, helm), Loader=yaml.CSafeLoader))
        return sorted((one for one in found if one and one["kind"] != "Secret"), key=yaml_key)

    assert "<no value>" not in text_of(case)
    assert parsed("helm4") == parsed("helm3")


def yaml_key(one: dict[str, dict[str, str]]) -> tuple[str, str, str]:
    return str(one["kind"]), one["metadata"]["name"], one["metadata"].get("namespace", "")


@pytest.mark.parametrize("case", CASES)
def test_every_object_is_valid(case: str) -> None:
    assert len(objects(case)) > 35
    names = [yaml_key(one) for one in objects(case)]
    assert len(set(names)) == len(names)
    for one in objects(case):
        if one["kind"] not in CUSTOM:
            kubernetes_validate.validate(one, "1.34", strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_defaults_are_valid_in_each_version_of_kubernetes(version: str) -> None:
    for one in yaml.load_all(text_of("minimal", version=version), Loader=yaml.CSafeLoader):
        if one:
            kubernetes_validate.validate(one, version, strict=True)


@pytest.mark.parametrize("case", CASES)
def test_the_pod_templates_are_valid_pods(case: str) -> None:
    found = pod_templates(case)
    assert set(found) == {"agent", "trainer", *(["shared", "verifier"] if case == "all-on" else [])}
    for name, pod in found.items():
        work = {"shared": "agent", "verifier": "collect"}.get(name, name)
        assert [container["name"] for container in pod["spec"]["containers"]] == [work]
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": {"template": pod}}
        kubernetes_validate.validate(job, "1.34", strict=True)


def test_an_older_kubernetes_is_refused() -> None:
    done = template("--kube-version", "1.29.0")
    assert done.returncode != 0
    assert "1.30" in done.stderr


def test_the_development_values_are_a_case_of_the_tests() -> None:
    assert (CHART / "values-dev.yaml").read_text() == (CHART / "ci" / "cpu-engine-values.yaml").read_text()


@pytest.mark.parametrize(
    "values",
    [
        "commonLabels.team=blue",
        "migrations.nodeSelector.pool=cpu,model.nodeSelector.pool=cpu",
        "imagePullPolicy=Always",
    ],
)
def test_an_upgrade_changes_no_job_in_place(values: str, tmp_path: Path) -> None:
    # A Job is immutable: a release that keeps its name and changes its pod cannot be applied.
    chart = shutil.copytree(CHART, tmp_path / "leyden")
    about = yaml.safe_load((chart / "Chart.yaml").read_text())
    (chart / "Chart.yaml").write_text(yaml.safe_dump(about | {"version": "99.0.0"}))
    before, after = _jobs(CHART), _jobs(chart, "--set", values)
    assert all(before[name] == after[name] for name in before.keys() & after.keys())
    assert _jobs(chart).keys() == before.keys()


def _jobs(chart: Path, *options: str) -> dict[str, object]:
    values = str(CHART / "values-dev.yaml")
    command = [str(HELM), "template", "trial", str(chart), "--values", values, *options]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = [one for one in yaml.safe_load_all(text) if one and one["kind"] == "Job"]
    return {one["metadata"]["name"]: one["spec"]["template"] for one in found}


def test_each_pool_has_engines_of_its_own_and_the_controller_lists_them() -> None:
    sets = {one["metadata"]["name"]: one["spec"] for one in of_kind("pools", "StatefulSet")}
    services = {one["metadata"]["name"]: one["spec"]["selector"] for one in of_kind("pools", "Service")}
    policies = {one["metadata"]["name"]: one["spec"] for one in of_kind("pools", "NetworkPolicy")}
    for pool, model, replicas in (("small", "/var/lib/leyden/models/small", 2), ("stand-in", None, 1)):
        name = f"{FULLNAME}-engine-{pool}"
        labels = sets[name]["selector"]["matchLabels"]
        assert (sets[name]["replicas"], sets[name]["serviceName"]) == (replicas, name)
        assert services[name] == labels == policies[name]["podSelector"]["matchLabels"]
        assert labels != sets[f"{FULLNAME}-engine"]["selector"]["matchLabels"]
        assert model is None or env_of(sets[name]["template"]["spec"]["containers"][0])["ENGINE_MODEL_PATH"] == {
            "name": "ENGINE_MODEL_PATH",
            "value": model,
        }
    [controller] = [one for one in of_kind("pools", "Deployment") if one["metadata"]["name"].endswith("-controller")]
    pools = json.loads(env_of(controller["spec"]["template"]["spec"]["containers"][0])["CONTROLLER_POOLS"]["value"])
    settings = Settings.model_validate({"pools": pools, "namespace": "platform"}).engine_pools()
    found = {
        name: (pool.engine_service, pool.context_length, pool.adapters, pool.max_adapter_rank, pool.embeddings)
        for name, pool in settings.items()
    }
    assert found == {
        "default": (f"{FULLNAME}-engine", None, None, None, False),
        "small": (f"{FULLNAME}-engine-small", 8192, None, None, False),
        "stand-in": (f"{FULLNAME}-engine-stand-in", None, None, None, False),
        "shared": (f"{FULLNAME}-engine-shared", None, 4, 32, False),
        "embedder": (f"{FULLNAME}-engine-embedder", None, None, None, True),
    }


def test_another_model_is_another_folder_and_replaces_the_pods_that_read_it() -> None:
    def readers(*options: str) -> dict[str, object]:
        text = template("--set", ",".join(["model.revision=main", *options])).stdout
        found = {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(text) if one}
        pods = {
            name: found[kind, f"{FULLNAME}-{name}"]["spec"]["template"]
            for kind, name in (("Deployment", "gateway"), ("StatefulSet", "engine"))
        }
        trainer = yaml.safe_load(found["ConfigMap", f"{FULLNAME}-pod-templates"]["data"]["trainer.yaml"])
        annotations = found["Deployment", f"{FULLNAME}-controller"]["spec"]["template"]["metadata"]["annotations"]
        paths = {
            one["value"]
            for pod in (*pods.values(), trainer)
            for container in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"])
            for one in container.get("env", ())
            if one["name"].endswith("MODEL_PATH")
        }
        assert len(paths) == 1
        job = next(name for kind, name in found if kind == "Job" and "-model-" in name)
        return {"path": paths.pop(), "job": job, "template": annotations["checksum/config"]} | pods

    before = readers("model.repository=Qwen/one")
    assert before["path"] == f"/var/lib/leyden/models/{folder_name('Qwen/one', 'main')}"
    for options in ("model.repository=Qwen/other", "model.repository=Qwen/one,model.revision=a1b2"):
        after = readers(options)
        assert [name for name, part in after.items() if part == before[name]] == []


def test_a_trainer_waits_for_each_model_of_its_run(tmp_path: Path) -> None:
    found = [one for one in yaml.safe_load_all(template().stdout) if one and one["kind"] == "ConfigMap"]
    texts = [one["data"]["trainer.yaml"] for one in found if "trainer.yaml" in one.get("data", {})]
    [wait] = yaml.safe_load(texts[0])["spec"]["initContainers"]
    base, critic = tmp_path / "base model", tmp_path / "critic"
    for folder in (base, critic):
        folder.mkdir()
    (base / "config.json").touch()
    with subprocess.Popen(
        wait["command"], env={"PATH": os.defpath, "MODEL_PATH": f"{base}\n{critic}"}, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"waiting: no model in {critic} yet\n"
        (critic / "config.json").touch()
        assert process.wait(timeout=30) == 0


def test_a_pod_waits_for_models_where_its_own_container_finds_them(tmp_path: Path) -> None:
    mount = {"name": "models", "mountPath": "/models", "readOnly": True}
    claim = {"name": "models", "persistentVolumeClaim": {"claimName": "models"}}
    extra = {"extraVolumes": [claim], "extraVolumeMounts": [mount]}
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(dict.fromkeys(("trainer", "engine", "gateway"), extra)))
    found = [one for one in yaml.safe_load_all(template("--values", str(tmp_path / "values.yaml")).stdout) if one]
    pods = [one["spec"]["template"] for one in found if one["kind"] in {"Deployment", "StatefulSet"}]
    texts = [one["data"]["trainer.yaml"] for one in found if "trainer.yaml" in (one.get("data") or {})]
    begins = [pod["spec"] for pod in [*pods, *map(yaml.safe_load, texts)] if "initContainers" in pod["spec"]]
    waits = [one for pod in begins for one in pod["initContainers"] if one["name"] == "wait-for-model"]
    assert [mount in one["volumeMounts"] for one in waits] == [True] * 3


def test_two_releases_of_one_name_share_no_namespace_of_agents() -> None:
    def namespace(release: str, place: str) -> str:
        command = [str(HELM), "template", release, str(CHART), "--namespace", place]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        [found] = [one for one in yaml.safe_load_all(text) if one and one["kind"] == "Namespace"]
        assert found["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
        return str(found["metadata"]["name"])

    assert namespace("leyden", "leyden") == "leyden-rollouts"
    assert namespace("leyden", "blue") == "blue-leyden-rollouts"
    long = [namespace("release", f"{'a' * 60}{end}") for end in "bc"]
    assert len(set(long)) == 2
    assert all(len(name) <= 63 for name in long)


def test_replicas_of_a_service_are_spread_over_nodes() -> None:
    for one in of_kind("minimal", "Deployment"):
        [spread] = one["spec"]["template"]["spec"]["topologySpreadConstraints"]
        assert spread["labelSelector"] == one["spec"]["selector"]
