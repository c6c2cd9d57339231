"""skaffold.yaml builds what `make images` builds and sets values that the chart has; a pod is ready for its copies."""

from __future__ import annotations

import re
from functools import reduce
from typing import Any

import pytest
import yaml

from tests.contract.chart.chart import CHART, ROOT, template

CONFIG = yaml.safe_load((ROOT / "skaffold.yaml").read_text())
PROFILES = {profile["name"]: profile for profile in CONFIG["profiles"]}
SERVICES = {"api", "controller", "runner", "gateway", "collector", "credit", "grader"}
ENDINGS = {"registry": "IMAGE_DOMAIN", "repository": "IMAGE_REPO_NO_DOMAIN", "tag": "IMAGE_TAG"}


def artifacts(profile: str) -> list[dict[str, Any]]:
    added = [one["value"] for one in PROFILES[profile]["patches"] if one["path"] == "/build/artifacts/-"]
    return [*CONFIG["build"]["artifacts"], *added]


def set_values(profile: str) -> dict[str, str]:
    prefix = "/deploy/helm/releases/0/setValueTemplates/"
    patches = {one["path"]: one["value"] for one in PROFILES[profile]["patches"]}
    added = {path.removeprefix(prefix): value for path, value in patches.items() if path.startswith(prefix)}
    templates: dict[str, str] = CONFIG["deploy"]["helm"]["releases"][0]["setValueTemplates"]
    return templates | added


def test_the_file_is_of_the_version_that_it_was_written_for() -> None:
    assert (CONFIG["apiVersion"], CONFIG["kind"]) == ("skaffold/v4beta10", "Config")
    # The schema's SkaffoldConfig, HelmRelease, DockerArtifact and Sync have these keys.
    assert set(CONFIG) <= {"apiVersion", "kind", "metadata", "build", "deploy", "portForward", "profiles"}
    for artifact in [*artifacts("cpu"), *artifacts("gpu")]:
        assert set(artifact) <= {"image", "context", "docker", "sync", "requires"}
        assert set(artifact["docker"]) <= {"dockerfile", "buildArgs"}
        assert set(artifact.get("sync", {})) <= {"manual", "hooks"}


@pytest.mark.parametrize(("profile", "last"), [("cpu", "-cpu"), ("gpu", "")])
def test_every_image_is_built_from_a_dockerfile(profile: str, last: str) -> None:
    built = {one["image"]: one for one in artifacts(profile)}
    names = SERVICES | {"agent", "flight-agent", f"trainer{last}", f"engine{last}"}
    assert set(built) == {f"leyden/{name}" for name in names}
    for one in built.values():
        text = (ROOT / one["docker"]["dockerfile"]).read_text()
        assert all(re.search(rf"^ARG {name}\b", text, re.MULTILINE) for name in one["docker"].get("buildArgs", {}))
        for required in one.get("requires", []):
            assert required["image"] in built
            assert f"ARG {required['alias']}" in text
        if one["image"].removeprefix("leyden/") in SERVICES:
            assert one["docker"]["buildArgs"]["SERVICE"] == one["image"].removeprefix("leyden/")


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_every_image_reaches_its_value(profile: str) -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    images = {re.sub(r"[/.-]", "_", one["image"]) for one in artifacts(profile)}
    found = set()
    for path, text in set_values(profile).items():
        *parts, ending = path.split(".")
        assert "repository" in reduce(lambda value, part: value[part], parts, values), path
        matched = re.fullmatch(rf"{{{{\.{ENDINGS[ending]}_(\w+)}}}}", text)
        assert matched, text
        assert matched.group(1) in images
        found.add(matched.group(1))
    assert images - found == {"leyden_agent", "leyden_flight_agent"}


def test_code_is_copied_where_a_service_imports_it_from() -> None:
    done = template("--set", "developer.sync=true", "-f", str(CHART / "values-dev.yaml"))
    assert done.returncode == 0, done.stderr
    deployments = [one for one in yaml.safe_load_all(done.stdout) if one and one["kind"] == "Deployment"]
    assert {one["metadata"]["labels"]["app.kubernetes.io/component"] for one in deployments} == SERVICES
    rules = CONFIG["build"]["artifacts"][0]["sync"]["manual"]
    for deployment in deployments:
        spec = deployment["spec"]["template"]["spec"]
        mounts = {one["mountPath"] for one in spec["containers"][0]["volumeMounts"] if one["name"] == "code"}
        assert {rule["dest"] for rule in rules} == mounts
        [copy] = [one for one in spec["initContainers"] if one["name"] == "copy-code"]
        assert copy["command"][2].removesuffix("/.") in mounts
    assert all((ROOT / rule["src"].partition("/")[0]).is_dir() for rule in rules)
    assert "copy-code" not in template().stdout
