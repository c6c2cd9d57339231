"""A release of the chart: found by its labels, whatever its values."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from leyden.libs.cli.cluster.kubectl import Kubectl, KubectlError, Object
from leyden.libs.cli.errors import CommandError, Exit

COMPONENT = "app.kubernetes.io/component"
RUN = "leyden.dev/run"
ADMIN_VARIABLE = "API_ADMIN_TOKEN"
API_PORT = 8000
LASTING = frozenset(
    {"api", "controller", "runner", "gateway", "collector", "credit", "grader", "engine", "postgres", "redis"}
)
"""Components whose pods must always be ready, with the runners of the warm pool and further pools of engines."""
API = "/apis/apps/v1{}/deployments?labelSelector=" + quote(f"app.kubernetes.io/name=leyden,{COMPONENT}=api")


@dataclass(frozen=True)
class Release:
    """Args: api: the name of the API's Deployment and Service; rollouts: the agents' namespace."""

    kubectl: Kubectl
    name: str
    namespace: str
    api: str
    rollouts: str
    token_secret: tuple[str, str] | None
    """Name and key of the Secret with the administrator's token."""

    def token(self) -> str:
        """Returns the administrator's token. Raises: CommandError: the remedy"""
        remedy = "pass --token or LEYDEN_TOKEN"
        if self.token_secret is None:
            raise CommandError(f"{self.api} has no {ADMIN_VARIABLE} from a Secret: {remedy}", Exit.NOT_ALLOWED)
        name, key = self.token_secret
        try:
            secret = self.kubectl.get(f"/api/v1/namespaces/{self.namespace}/secrets/{name}")
        except KubectlError as error:
            raise CommandError(f"the Secret {name} is not readable ({error}): {remedy}", error.status) from error
        if key not in secret.get("data", {}):
            raise CommandError(f"the Secret {name} has no key {key}: {remedy}", Exit.NOT_FOUND)
        return base64.b64decode(secret["data"][key]).decode().strip()

    def selector(self, *parts: str) -> str:
        """The labels of the release's objects, and further ones."""
        return ",".join((f"app.kubernetes.io/instance={self.name}", *parts))

    def listed(self, prefix: str, kind: str, *parts: str) -> list[Object]:
        """Lists objects of the release in its namespace and in the agents'. Raises: KubectlError

        Args: prefix: such as `/api/v1`
        """
        query = quote(self.selector(*parts))
        return [
            found
            for namespace in self.namespaces
            for found in self.kubectl.items(f"{prefix}/namespaces/{namespace}/{kind}?labelSelector={query}")
        ]

    def pods(self) -> list[Object]:
        """Lists the release's pods, agents and trainers included. Raises: KubectlError"""
        return self.listed("/api/v1", "pods")

    @property
    def namespaces(self) -> list[str]:
        """The release's namespace, and the agents' where it is another one."""
        return list(dict.fromkeys((self.namespace, self.rollouts)))


def find_release(kubectl: Kubectl, namespace: str | None, name: str | None) -> Release:
    """Returns the one release that matches: of the namespace, else of the context's, else of the cluster.

    Raises: CommandError: there is none, or there are several
    """
    place = namespace or kubectl.default_namespace()
    found = list(_releases(kubectl, place, name))
    if not found and namespace is None:
        found = list(_everywhere(kubectl, name))
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(f"{one.name} in {one.namespace}" for one in found)
        raise CommandError(f"several releases of Leyden: choose one with --release and --namespace: {names}")
    others = ", ".join(f"{one.name} in {one.namespace}" for one in _everywhere(kubectl, None))
    wanted = f"no release {name!r}" if name else "no release of Leyden"
    raise CommandError(
        f"{wanted} in the namespace {place}; there are: {others or 'none (helm install leyden helm/leyden)'}",
        Exit.NOT_FOUND,
    )


def _everywhere(kubectl: Kubectl, name: str | None) -> Iterator[Release]:
    """The releases of all namespaces; none where the caller may not list them."""
    try:
        yield from _releases(kubectl, None, name)
    except KubectlError as error:
        if error.status != Exit.NOT_ALLOWED:
            raise


def _releases(kubectl: Kubectl, namespace: str | None, name: str | None) -> Iterator[Release]:
    for deployment in kubectl.items(API.format("" if namespace is None else f"/namespaces/{namespace}")):
        labels, place = deployment["metadata"]["labels"], deployment["metadata"]["namespace"]
        instance = labels["app.kubernetes.io/instance"]
        if name in (None, instance):
            api = deployment["metadata"]["name"]
            rollouts = _rollouts_namespace(kubectl, place, api.removesuffix("api") + "runner") or place
            yield Release(kubectl, instance, place, api, rollouts, _token_secret(deployment))


def _token_secret(deployment: Object) -> tuple[str, str] | None:
    for variable in _environment(deployment):
        reference = variable.get("valueFrom", {}).get("secretKeyRef")
        if variable["name"] == ADMIN_VARIABLE and reference:
            return reference["name"], reference["key"]
    return None


def _rollouts_namespace(kubectl: Kubectl, namespace: str, runner: str) -> str | None:
    try:
        deployment = kubectl.get(f"/apis/apps/v1/namespaces/{namespace}/deployments/{runner}")
    except KubectlError:
        return None
    return next((one.get("value") for one in _environment(deployment) if one["name"] == "RUNNER_NAMESPACE"), None)


def _environment(deployment: Object) -> Iterator[Object]:
    for container in deployment["spec"]["template"]["spec"]["containers"]:
        yield from container.get("env", [])


def copy_from_storage(release: Release, folder: str, to: Path) -> None:
    """Copies a folder of the release's storage out of the controller, which mounts it.

    Raises: CommandError: no controller runs, or kubectl failed
    """
    states = map(pod_state, release.pods())
    controller = next((one.name for one in states if one.component == "controller" and one.running), None)
    if controller is None:
        raise CommandError("no controller runs that could read the storage: see `leyden status`", Exit.UNREACHABLE)
    # Its contents: kubectl leaves out a folder that is a link, as version 0 to the base model.
    source = f"{release.namespace}/{controller}:{folder}/."
    release.kubectl.run("cp", "--container", "controller", "--retries=10", source, str(to), timed=False)


def lasts(component: str) -> bool:
    """Whether the pods of a component must always be ready; the others end."""
    return component in LASTING or component == "warm-runner" or component.startswith("engine-")


@dataclass(frozen=True)
class PodState:
    """Args: reason: why it is not ready; empty where it is, or where it ended well."""

    namespace: str
    name: str
    component: str
    phase: str
    restarts: int
    reason: str
    node: str | None
    running: bool
    """Its main container runs, so that it answers `/readyz`."""


def pod_state(pod: Object) -> PodState:
    """Reads a pod as the API server lists it."""
    metadata, status = pod["metadata"], pod.get("status", {})
    containers = status.get("containerStatuses", [])
    return PodState(
        metadata["namespace"],
        metadata["name"],
        metadata.get("labels", {}).get(COMPONENT, ""),
        status.get("phase", "Unknown"),
        sum(one.get("restartCount", 0) for one in [*containers, *status.get("initContainerStatuses", [])]),
        _reason(status, containers),
        pod["spec"].get("nodeName"),
        any("running" in one.get("state", {}) for one in containers),
    )


def _reason(status: Object, containers: list[Object]) -> str:
    conditions = {one["type"]: one for one in status.get("conditions", [])}
    if status.get("phase") == "Succeeded" or conditions.get("Ready", {}).get("status") == "True":
        return ""
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return _words(scheduled)
    for one in [*status.get("initContainerStatuses", []), *containers]:
        cause = _container_reason(one)
        if cause:
            return f"{one['name']}: {cause}"
    return _words(status) or "not ready"


def _container_reason(container: Object) -> str:
    state, last = container.get("state", {}), container.get("lastState", {}).get("terminated")
    if "waiting" in state:
        ended = f"; it ended with {_end(last)}" if last else ""
        return "" if state["waiting"].get("reason") == "PodInitializing" else _words(state["waiting"]) + ended
    if "terminated" in state:
        return "" if state["terminated"].get("exitCode") == 0 else _end(state["terminated"])
    running_init = container["name"].startswith("wait-for-")
    return "not finished: see its log" if running_init else ""


def _end(terminated: Object) -> str:
    lines = (terminated.get("message") or "").strip().splitlines()
    words = f"exit code {terminated.get('exitCode')} ({terminated.get('reason', 'Error')})"
    return f"{words}: {lines[-1]}" if lines else words


def _words(part: Object) -> str:
    return ": ".join(text for text in (part.get("reason"), part.get("message")) if text)
