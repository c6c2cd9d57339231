"""The pod templates that an operator writes, and the platform's additions to them."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml
from kubernetes_asyncio import client

from leyden.libs.service.errors import Misconfigured

INSTANCE, COMPONENT = "app.kubernetes.io/instance", "app.kubernetes.io/component"
RUN, ROLLOUT, ATTEMPT = "leyden.dev/run", "leyden.dev/rollout", "leyden.dev/attempt"
RAN_IN = "leyden.dev/ran-in"
"""The annotation of an attempt's Job with the pod in which its agent ran."""


def load_template(api: client.ApiClient, path: Path, container: str) -> client.V1PodTemplateSpec:
    """Reads a PodTemplateSpec from a YAML file.

    Raises: Misconfigured: it cannot be read, a field in it is unknown, or no container has this name
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
        template = api.deserialize(SimpleNamespace(data=json.dumps(document)), "V1PodTemplateSpec")
        unknown = list(_unknown(document, api.sanitize_for_serialization(template), ""))
        names = [one.name for one in template.spec.containers]
    except (OSError, ValueError, AttributeError, TypeError, yaml.YAMLError) as error:
        raise Misconfigured(f"{path} must be a PodTemplateSpec in YAML: {error}") from error
    if unknown:
        raise Misconfigured(f"{path}: a pod has no field {', '.join(unknown)}")
    if container not in names:
        raise Misconfigured(f"{path} must have a container named {container!r}, not only {names}")
    return template


def completed(
    template: client.V1PodTemplateSpec,
    container: str,
    *,
    labels: Mapping[str, str],
    command: Sequence[str],
    environment: Sequence[client.V1EnvVar],
) -> tuple[client.V1PodTemplateSpec, client.V1Container]:
    """A copy of the template with the platform's part, and the container in it that does the work."""
    template = copy.deepcopy(template)
    template.metadata = template.metadata or client.V1ObjectMeta()
    template.metadata.labels = {**(template.metadata.labels or {}), **labels}
    pod = template.spec
    pod.restart_policy = "Never"
    pod.automount_service_account_token = False
    # Otherwise the pod's environment names every Service of the namespace.
    pod.enable_service_links = False
    work = next(one for one in pod.containers if one.name == container)
    work.command, work.args = list(map(verbatim, command)), None
    ours = {one.name for one in environment}
    work.env = [*(one for one in work.env or [] if one.name not in ours), *environment]
    return template, work


def verbatim(text: str) -> str:
    """Escapes a text, in which Kubernetes would replace `$(NAME)` by a variable."""
    return text.replace("$", "$$")


def variables(values: Mapping[str, str]) -> list[client.V1EnvVar]:
    """Environment variables with exactly these values."""
    return [client.V1EnvVar(name=name, value=verbatim(value)) for name, value in values.items()]


def selector(labels: Mapping[str, str]) -> str:
    """A label selector for objects that carry all of these."""
    return ",".join(f"{name}={value}" for name, value in labels.items())


def _unknown(document: Any, parsed: Any, path: str) -> list[str]:
    """Paths of values that the client's models dropped."""
    if isinstance(document, dict):
        parsed = parsed if isinstance(parsed, dict) else {}
        present = {name: value for name, value in document.items() if value is not None}
        missing = [f"{path}.{name}".lstrip(".") for name in present if name not in parsed]
        return missing + [
            deeper
            for name, value in present.items()
            if name in parsed
            for deeper in _unknown(value, parsed[name], f"{path}.{name}")
        ]
    if isinstance(document, list) and isinstance(parsed, list):
        return [
            deeper
            for number, (one, other) in enumerate(zip(document, parsed, strict=True))
            for deeper in _unknown(one, other, f"{path}[{number}]")
        ]
    return []
