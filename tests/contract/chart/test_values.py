"""Every value of the chart is read: setting any leaf of the schema changes what the chart renders."""

from __future__ import annotations

import copy
import functools
import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.contract.chart.chart import CHART, NAMESPACE, RELEASE
from tests.support.long import long_only
from tests.support.tools import HELM

Schema = dict[str, Any]
Values = dict[str, Any]
ROOT: Schema = json.loads((CHART / "values.schema.json").read_text())
POOL = "small"
FIXED = {"value": "fixed"}
SECRETS = {
    "secrets": dict.fromkeys(("adminToken", "engineApiKey", "engineAdminKey"), FIXED)
    | {"capabilityKeys": {"value": '{"k": "fixed"}'}},
    "postgres": {"password": FIXED},
    "redis": {"password": FIXED},
}
"""A generated secret would differ in each render."""
SCALED = ("api", "runner", "gateway", "collector", "credit", "grader")
EXPOSED = {
    "ingress": {"enabled": True, "host": "x.example"},
    "httpRoute": {"enabled": True, "parentRefs": [{"name": "x"}], "hostnames": ["x.example"]},
}


def merged(*parts: Values) -> Values:
    found: Values = {}
    for part in parts:
        for name, value in part.items():
            both = isinstance(value, dict) and isinstance(found.get(name), dict)
            found[name] = merged(found[name], value) if both else copy.deepcopy(value)
    return found


PLAIN = merged(
    SECRETS,
    {
        "api": EXPOSED,
        "gateway": EXPOSED,
        "networkPolicy": {"gatewayFrom": [{"namespaceSelector": {}}]},
        "grader": {"containers": {"enabled": True}},
        "runner": {"warmPool": {"enabled": True, "image": {"repository": "agents", "tag": "1"}}},
        "objectStore": {"url": "s3://bucket/prefix"},
        "engine": {"pools": {POOL: {"model": "/var/lib/leyden/m", "adapters": 2, "extraArgs": ["--enable-lora"]}}},
        "monitoring": {name: {"enabled": True} for name in ("podMonitor", "prometheusRule", "dashboards")},
    },
)  # fmt: skip
CPU = {"engine": {"backend": "cpu", "pools": {POOL: {"model": "/var/lib/leyden/m", "backend": "cpu"}}}}
CASES: dict[str, Values] = {
    "plain": PLAIN,
    "scaled": merged(PLAIN, {name: {"autoscaling": {"enabled": True}} for name in SCALED}),
    "keda": merged(PLAIN, {name: {"keda": {"enabled": True}} for name in ("runner", "credit")}),
    "external": merged(
        PLAIN, {store: {"mode": "external", "external": {"host": "h"}} for store in ("postgres", "redis")}
    ),
    "addresses": merged(
        PLAIN,
        {store: {"mode": "external", "external": {"urlSecret": {"name": "s"}}} for store in ("postgres", "redis")},
    ),
    "existing": merged(
        PLAIN,
        {"secrets": {name: {"existingSecret": "mine"} for name in SECRETS["secrets"]}},
        {store: {"password": {"existingSecret": "mine"}} for store in ("postgres", "redis")},
        {"model": {"token": {"existingSecret": "mine"}}},
        {"api": {"externalAgents": {"enabled": True}}},
    ),
    "cnpg": merged(PLAIN, {"postgres": {"mode": "cnpg"}}),
    "cpu": merged(SECRETS, CPU, {"model": {"source": "demo"}}),
    "none": merged(PLAIN, {"model": {"source": "none", "path": "/var/lib/leyden/models/mine"}}),
}


def resolved(schema: Schema) -> Schema:
    return ROOT["$defs"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def leaves(schema: Schema, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Schema]]:
    schema = resolved(schema)
    if path == ("engine", "pools"):
        yield from leaves(schema["additionalProperties"], (*path, POOL))
    elif children := schema.get("properties"):
        for name, child in children.items():
            yield from leaves(child, (*path, name))
    else:
        yield path, schema


LEAVES = {".".join(path): (path, schema) for path, schema in leaves(ROOT) if path != ("global",)}

PEER = [{"namespaceSelector": {"matchLabels": {"a": "b"}}}]
LISTS: dict[str, list[Any]] = {
    "tolerations": [{"key": "x", "operator": "Exists"}],
    "topologySpreadConstraints": [{"maxSkew": 7, "topologyKey": "x", "whenUnsatisfiable": "ScheduleAnyway"}],
    "extraEnv": [{"name": "X_Y", "value": "z"}],
    "extraVolumes": [{"name": "x", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "tmp", "mountPath": "/x"}],
    "extraArgs": ["--enable-lora", "--x=1"],
    "imagePullSecrets": [{"name": "x"}],
    "claims": [{"name": "x"}],
    "accessModes": ["ReadWriteOnce"],
    "ports": [7443],
    "extraObjects": [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x"}}],
    "apiFrom": PEER,
    "gatewayFrom": PEER,
    "metricsFrom": PEER,
    "kedaFrom": PEER,
    "storesFrom": PEER,
    "extraEgress": [{"ports": [{"port": 7}]}],
    "parentRefs": [{"name": "y"}],
    "hostnames": ["y.example"],
}
OBJECTS: dict[str, Values] = {
    "podTemplate": {"metadata": {"annotations": {"x": "y"}}},
    "requests": {"cpu": "7m"},
    "limits": {"cpu": "77"},
    "quota": {"pods": "77"},
    "affinity": {"podAffinity": {}},
    "volume": {"hostPath": {"path": "/x"}},
}
TEXTS = {
    "digest": "sha256:" + "a" * 64,
    "cidr": "10.1.0.0/16",
    "model": "/var/lib/leyden/models/other",
    "path": "/var/lib/leyden/models/other",
    "otlpEndpoint": "http://other:4318",
    "interval": "77s",
    "timeout": "77s",
    "parameters": "sslmode=require",
    "canary": "10.0.0.1:443",
    "url": "s3://other/prefix",
    "endpoint": "http://other:9000",
}


def another(name: str, schema: Schema, before: Any) -> Any:
    """A value that the schema allows and that is not the one before."""
    if "enum" in schema:
        return next(one for one in schema["enum"] if one != before)
    kind = schema["type"] if isinstance(schema["type"], str) else schema["type"][0]
    if kind == "array":
        words = schema.get("items", {}).get("type") == "string"
        return ["x"] if words else LISTS[name]
    if kind == "object":
        return OBJECTS.get(name, {"x": "y"})
    if kind == "boolean":
        return not before
    if kind in {"integer", "number"}:
        return max((before or 2) + 1, schema.get("minimum", 0))
    return TEXTS.get(name, "7Gi" if schema.get("pattern", "").startswith("^[0-9.]+(") else "other")


def value_at(values: Values, path: tuple[str, ...]) -> Any:
    return functools.reduce(lambda part, name: (part or {}).get(name), path, values)


def with_value(path: tuple[str, ...], value: Any) -> Values:
    return functools.reduce(lambda inner, name: {name: inner}, reversed(path), value)


DEFAULTS: Values = yaml.safe_load((CHART / "values.yaml").read_text())


def render(values: Values, folder: Path) -> str | None:
    """The rendered chart, or the refusal of its templates; None where the schema refuses the values."""
    file = folder / f"{abs(hash(json.dumps(values, sort_keys=True)))}.yaml"
    file.write_text(json.dumps(values))
    command = [str(HELM), "template", RELEASE, str(CHART), "--namespace", NAMESPACE, "--values", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "validations.yaml" in done.stderr:
        return done.stderr
    return done.stdout if done.returncode == 0 else None


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("before")
    found = {name: render(values, folder) for name, values in CASES.items()}
    refused = [name for name, text in found.items() if text is None or text.startswith("Error")]
    assert refused == []
    return {name: text for name, text in found.items() if text}


def is_read(path: tuple[str, ...], schema: Schema, before: dict[str, str], folder: Path) -> bool:
    """Whether the value changes the render of a combination of features in which it matters."""
    for name, values in CASES.items():
        present = merged(DEFAULTS, values)
        value = another(path[-1], schema, value_at(present, path))
        text = render(merged(values, with_value(path, value)), folder)
        if text is not None and text != before[name]:
            return True
    return False


@long_only
@pytest.mark.timeout(600)
def test_every_value_changes_what_is_rendered(before: dict[str, str], tmp_path: Path) -> None:
    assert len(LEAVES) > 400
    with ThreadPoolExecutor(4) as pool:
        found = {name: pool.submit(is_read, *leaf, before, tmp_path) for name, leaf in LEAVES.items()}
    unread = [name for name, read in found.items() if not read.result()]
    assert unread == []
