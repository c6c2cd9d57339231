"""Renders the chart, once per values file and Helm, and finds parts of its objects."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.support.tools import HELM, HELM_3

ROOT = Path(__file__).parents[3]
CHART = ROOT / "helm" / "leyden"
RELEASE, NAMESPACE = "trial", "platform"
FULLNAME = "trial-leyden"
CASES = sorted(path.name.removesuffix("-values.yaml") for path in (CHART / "ci").glob("*-values.yaml"))
VERSIONS = ("1.32.0", "1.34.0", "1.36.0")
HELMS = {"helm4": HELM, "helm3": HELM_3}

Object = dict[str, Any]


def template(*arguments: str, helm: Path = HELM) -> subprocess.CompletedProcess[str]:
    command = [str(helm), "template", RELEASE, str(CHART), "--namespace", NAMESPACE, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@functools.cache
def text_of(case: str, helm: str = "helm4", version: str = "1.34.0") -> str:
    done = template("-f", str(CHART / "ci" / f"{case}-values.yaml"), "--kube-version", version, helm=HELMS[helm])
    assert done.returncode == 0, done.stderr
    return done.stdout


@functools.cache
def objects(case: str) -> tuple[Object, ...]:
    return tuple(one for one in yaml.load_all(text_of(case), Loader=yaml.CSafeLoader) if one)


def of_kind(case: str, *kinds: str) -> Iterator[Object]:
    return (one for one in objects(case) if one["kind"] in kinds)


def pod_templates(case: str) -> dict[str, Object]:
    """The pods that runner, controller and grader start, by name: agent, trainer, verifier."""
    data = next(one for one in of_kind(case, "ConfigMap") if one["metadata"]["name"] == f"{FULLNAME}-pod-templates")[
        "data"
    ]
    return {name.removesuffix(".yaml"): yaml.safe_load(text) for name, text in data.items()}


def pods(case: str) -> Iterator[tuple[str, Object]]:
    """Name and template of every pod that the release starts, now or later."""
    for one in of_kind(case, "Deployment", "StatefulSet", "Job"):
        yield one["metadata"]["name"], one["spec"]["template"]
    for one in of_kind(case, "LeaderWorkerSet"):
        for role in ("leader", "worker"):
            yield f"{one['metadata']['name']}-{role}", one["spec"]["leaderWorkerTemplate"][f"{role}Template"]
    for one in of_kind(case, "Pod"):
        yield one["metadata"]["name"], one
    yield from pod_templates(case).items()


def containers(pod: Object) -> list[Object]:
    spec = pod["spec"]
    return [*spec.get("initContainers", ()), *spec["containers"]]


def env_of(container: Object) -> dict[str, Object]:
    return {one["name"]: one for one in container.get("env", ())}
