"""An operator's `podTemplate` adds to the pods of agents, trainers and engines, and leaves their protection."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.contract.chart.chart import FULLNAME, ROOT, Object, containers, template

PARTS = {"rollouts": "agent", "trainer": "trainer", "engine": "engine"}


def pod_of(part: str, over: dict[str, Any], folder: Path) -> Object:
    file = folder / "values.yaml"
    file.write_text(yaml.safe_dump({part: {"podTemplate": over}}))
    done = template("--values", str(file))
    assert done.returncode == 0, done.stderr
    found = {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(done.stdout) if one}
    if part == "engine":
        pod: Object = found["StatefulSet", f"{FULLNAME}-engine"]["spec"]["template"]
        return pod
    text = found["ConfigMap", f"{FULLNAME}-pod-templates"]["data"][f"{PARTS[part]}.yaml"]
    templated: Object = yaml.safe_load(text)
    return templated


def added(pod: Object, container: Object) -> Object:
    """The same pod with more in its first container."""
    first, *others = pod["spec"]["containers"]
    return {**pod, "spec": {**pod["spec"], "containers": [{**first, **container}, *others]}}


@pytest.mark.parametrize("part", PARTS)
def test_one_more_source_of_variables_changes_nothing_else(part: str, tmp_path: Path) -> None:
    source = [{"secretRef": {"name": "tools"}}]
    over = {"spec": {"containers": [{"name": PARTS[part], "envFrom": source}]}}
    before = pod_of(part, {}, tmp_path)
    assert pod_of(part, over, tmp_path) == added(before, {"envFrom": source})
    assert containers(before)[-1]["securityContext"]["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("part", PARTS)
def test_things_of_a_name_are_merged_and_others_are_added(part: str, tmp_path: Path) -> None:
    over = {
        "metadata": {"labels": {"team": "blue"}},
        "spec": {
            "containers": [
                {
                    "name": PARTS[part],
                    "env": [{"name": "HOME", "value": "/elsewhere"}, {"name": "MORE", "value": "x"}],
                    "volumeMounts": [{"name": "extra", "mountPath": "/extra"}],
                    "securityContext": {"readOnlyRootFilesystem": True},
                },
                {"name": "sidecar", "image": "sidecar:1"},
            ],
            "volumes": [{"name": "extra", "emptyDir": {}}, {"name": "tmp", "hostPath": {"path": "/x"}}],
            "tolerations": [{"key": "more", "operator": "Exists"}],
        },
    }
    before, after = pod_of(part, {}, tmp_path), pod_of(part, over, tmp_path)
    assert after["metadata"]["labels"] == before["metadata"]["labels"] | {"team": "blue"}
    assert [one["name"] for one in after["spec"]["containers"]] == [PARTS[part], "sidecar"]
    old, new = before["spec"]["containers"][0], after["spec"]["containers"][0]
    variables = {one["name"]: one for one in old.get("env", ())} | {
        one["name"]: one for one in over["spec"]["containers"][0]["env"]
    }
    assert {one["name"]: one for one in new["env"]} == variables
    assert new["volumeMounts"] == [*old["volumeMounts"], {"name": "extra", "mountPath": "/extra"}]
    assert new["securityContext"] == old["securityContext"] | {"readOnlyRootFilesystem": True}
    volumes = {one["name"]: one for one in (*before["spec"]["volumes"], *over["spec"]["volumes"])}
    assert {one["name"]: one for one in after["spec"]["volumes"]} == volumes
    more = before["spec"].get("tolerations", [])
    assert after["spec"]["tolerations"] == [*more, {"key": "more", "operator": "Exists"}]


@pytest.mark.parametrize("part", PARTS)
def test_null_removes(part: str, tmp_path: Path) -> None:
    over = {"spec": {"containers": [{"name": PARTS[part], "resources": None}]}}
    assert "resources" not in containers(pod_of(part, over, tmp_path))[-1]


def test_the_how_tos_network_and_identity_reach_the_trainer(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "how-to" / "kubernetes.md").read_text()
    [values] = [
        one for one in re.findall(r"^```yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE) if "hostNetwork" in one
    ]
    own = yaml.safe_load(values)["trainer"]
    before, pod = pod_of("trainer", {}, tmp_path), pod_of("trainer", own["podTemplate"], tmp_path)
    assert pod["spec"]["hostNetwork"]
    assert pod["spec"]["serviceAccountName"] == "reads-the-bucket"
    (old,), (new,) = before["spec"]["containers"], pod["spec"]["containers"]
    assert new["securityContext"] == old["securityContext"]
    assert new["resources"]["limits"] == old["resources"]["limits"] | {"rdma/hca": "1"}
    file = tmp_path / "values.yaml"
    file.write_text(values)
    done = template("--values", str(file))
    assert done.returncode == 0, done.stderr
    # No selector of pods chooses a trainer in the nodes' network.
    found = {one["metadata"]["name"]: one for one in yaml.safe_load_all(done.stdout) if one and "Policy" in one["kind"]}
    for store, port in (("postgres", 5432), ("redis", 6379)):
        clients = found[f"{FULLNAME}-{store}"]["spec"]["ingress"][0]
        assert [peer for peer in clients["from"] if "ipBlock" in peer] == [{"ipBlock": {"cidr": "10.1.0.0/24"}}]
        assert [one["port"] for one in clients["ports"]] == [port]


@pytest.mark.parametrize(("size", "together"), [("1Gi", "100Gi"), ("1.5Gi", "150Gi"), ("0.25M", "25M"), ("1", "100")])
def test_attempts_that_share_a_pod_have_their_folders_size_each(size: str, together: str) -> None:
    text = template("--set", "rollouts.attemptsPerPod=100", "--set-string", f"rollouts.tmpSize={size}").stdout
    data = next(
        one for one in yaml.safe_load_all(text) if one and one["metadata"]["name"] == f"{FULLNAME}-pod-templates"
    )
    volumes = {
        one["name"]: one.get("emptyDir") for one in yaml.safe_load(data["data"]["shared.yaml"])["spec"]["volumes"]
    }
    assert str(volumes["attempts"]["sizeLimit"]) == together


def test_agents_pods_have_folders_of_all_users_of_their_own() -> None:
    text = template("--set", "rollouts.attemptsPerPod=2,rollouts.tmpSize=2Gi,rollouts.shmSize=3Gi").stdout
    data = next(
        one for one in yaml.safe_load_all(text) if one and one["metadata"]["name"] == f"{FULLNAME}-pod-templates"
    )
    for name in ("agent.yaml", "shared.yaml"):
        spec = yaml.safe_load(data["data"][name])["spec"]
        volumes = {one["name"]: one["emptyDir"] for one in spec["volumes"]}
        found = {one["mountPath"]: volumes[one["name"]] for one in spec["containers"][0]["volumeMounts"]}
        disk, memory = {"sizeLimit": "2Gi"}, {"medium": "Memory", "sizeLimit": "3Gi"}
        assert {"/tmp": disk, "/var/tmp": disk, "/dev/shm": memory}.items() <= found.items()
