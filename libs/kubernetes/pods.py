"""Reads the state of a pod: why it waits, how its container ended, and whether the cluster ended it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from leyden.libs.kubernetes.cluster import Object

NORMAL_WAITS = frozenset({"ContainerCreating", "PodInitializing"})
HOPELESS_WAITS = frozenset({"ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "ImageInspectError"})
"""Waiting helps against none of these. A first `ErrImagePull` may be the network's."""
START_ERRORS = frozenset({"StartError", "ContainerCannotRun"})
NODE_LOST = "the pod was deleted, and its node does not report"
DELETION_PATIENCE = timedelta(minutes=2)


@dataclass(frozen=True)
class PodStatus:
    """One pod, and the container in it that does the work.

    Args: waiting: why the container does not run yet; hopeless: waiting longer will not help; exit_code: 128 + n for
        signal n; start_error: the container runtime's; disrupted: why the cluster, and not the container, caused
        the end; evicted_for_limit: the kubelet ended the pod because it exceeded a limit of its own; lost: the node
        does not report; message: the container's last words, where its `terminationMessagePolicy` asks for them;
        address: of a pod that runs, once it has one; started_at, finished_at: by the node's clock; served_at: the
        start by the API server's clock, as far as known.
    """

    name: str
    job: str
    waiting: str | None = None
    hopeless: bool = False
    started_at: datetime | None = None
    finished_at: datetime | None = None
    served_at: datetime | None = None
    exit_code: int | None = None
    out_of_memory: bool = False
    start_error: str | None = None
    disrupted: str | None = None
    evicted_for_limit: str | None = None
    lost: bool = False
    message: str = ""
    address: str | None = None

    @property
    def is_over(self) -> bool:
        return self.exit_code is not None or self.disrupted is not None or self.evicted_for_limit is not None


class InitStatus(NamedTuple):
    """An init container; served_at: the start of one that runs by the API server's clock, as far as known."""

    is_running: bool
    has_ended: bool
    served_at: datetime | None


def init_status(pod: Object, container: str) -> InitStatus:
    """Reads an init container of a pod as the API server lists it."""
    status = pod.get("status", {})
    state: Object = next(
        (o.get("state", {}) for o in status.get("initContainerStatuses", ()) if o["name"] == container), {}
    )
    running = state.get("running")
    served_at = None if running is None else _by_server(status, _time(running.get("startedAt")))
    return InitStatus(running is not None, "terminated" in state, served_at)


def pod_status(pod: Object, container: str) -> PodStatus:
    """Reads a pod as the API server lists it.

    Args: container: the name of the one that does the work
    """
    status, metadata = pod.get("status", {}), pod["metadata"]
    state = _container(status, container)
    ended, running = state.get("terminated"), state.get("running")
    name, job = metadata["name"], metadata.get("labels", {}).get("batch.kubernetes.io/job-name", "")
    if ended is not None or status.get("phase") in {"Failed", "Succeeded"}:
        return _ended(name, job, pod, ended or {})
    if running is not None:
        ready = _condition(status, "Ready")
        lost = ready is not None and ready["status"] != "True" and ready.get("reason") != "ContainersNotReady"
        started = _time(running["startedAt"])
        served_at = _by_server(status, started)
        # Nobody confirms its deletion before the node is back or removed: it is no reason to wait.
        disrupted = NODE_LOST if lost and "deletionTimestamp" in metadata else None
        return PodStatus(
            name,
            job,
            started_at=started,
            served_at=served_at,
            lost=lost,
            disrupted=disrupted,
            address=status.get("podIP"),
        )
    if _is_past(metadata.get("deletionTimestamp")):
        return PodStatus(name, job, lost=True, disrupted=NODE_LOST)
    waiting, hopeless = _waiting(status, state)
    return PodStatus(name, job, waiting=waiting, hopeless=hopeless)


def _is_past(deletion: str | None) -> bool:
    """Whether the time by which a node ends a deleted pod is long over: it does not report."""
    by = _time(deletion)
    return by is not None and datetime.now(tz=UTC) > by + DELETION_PATIENCE


def _ended(name: str, job: str, pod: Object, ended: Object) -> PodStatus:
    status = pod["status"]
    limit = disrupted = None
    if status.get("reason") == "Evicted" and "exceed" in status.get("message", ""):
        limit = status["message"]
    else:
        disrupted = _disruption(pod, ended)
    return PodStatus(
        name,
        job,
        started_at=_time(ended.get("startedAt")),
        finished_at=_time(ended.get("finishedAt")),
        exit_code=ended.get("exitCode"),
        out_of_memory=ended.get("reason") == "OOMKilled",
        start_error=_words(ended) if ended.get("reason") in START_ERRORS else None,
        disrupted=disrupted,
        evicted_for_limit=limit,
        message=ended.get("message", ""),
    )


def _disruption(pod: Object, ended: Object) -> str | None:
    status, metadata = pod["status"], pod["metadata"]
    condition = _condition(status, "DisruptionTarget")
    if condition is not None and condition["status"] == "True":
        return _words(condition)
    if ended.get("exitCode") is None and (failed := _failed_init(status)) is not None:
        return failed
    if ended.get("exitCode") is None or ended.get("reason") == "ContainerStatusUnknown":
        return _words(status) or _words(ended) or "the node ended the pod"
    deleted = _time(metadata.get("deletionTimestamp"))
    if deleted is not None:
        # The kubelet's last deletion replaces both fields: the time is the end's, and the grace period 0.
        grace = max(metadata.get("deletionGracePeriodSeconds", 0), pod["spec"].get("terminationGracePeriodSeconds", 30))
        asked = deleted - timedelta(seconds=grace)
        finished = _time(ended.get("finishedAt"))
        return "the pod was deleted" if finished is None or finished >= asked else None
    return None


def _by_server(status: Object, started: datetime | None) -> datetime | None:
    """A start by the API server's clock: when it bound the pod to its node, and the node's own time from there."""
    scheduled = _condition(status, "PodScheduled") or {}
    bound, met = _time(scheduled.get("lastTransitionTime")), _time(status.get("startTime"))
    return None if started is None or bound is None or met is None else bound + max(timedelta(), started - met)


def _waiting(status: Object, state: Object) -> tuple[str, bool]:
    """The reason why the pod does not run yet, and whether waiting is in vain."""
    scheduled = _condition(status, "PodScheduled")
    if scheduled is not None and scheduled["status"] != "True":
        return _words(scheduled), False
    inits = [one.get("state", {}) for one in status.get("initContainerStatuses", [])]
    for one in [*inits, state]:
        waiting = one.get("waiting")
        if waiting is not None and waiting.get("reason") not in NORMAL_WAITS:
            return _words(waiting), waiting.get("reason") in HOPELESS_WAITS
    names = [one["name"] for one in status.get("initContainerStatuses", []) if "running" in one.get("state", {})]
    if names:
        return f"its container {names[0]} has not ended", False
    return state.get("waiting", {}).get("reason", "no node has reported the pod"), False


def _failed_init(status: Object) -> str | None:
    """The last words of an init container that failed, so that no other container of the pod began."""
    for one in status.get("initContainerStatuses", []):
        ended = one.get("state", {}).get("terminated")
        if ended is not None and ended.get("exitCode") != 0:
            return f"{one['name']}: {ended.get('message') or _words(ended) or 'it failed'}"
    return None


def _container(status: Object, name: str) -> Object:
    statuses = status.get("containerStatuses", [])
    return next((one.get("state", {}) for one in statuses if one["name"] == name), {})


def _condition(status: Object, kind: str) -> Object | None:
    return next((one for one in status.get("conditions", []) if one["type"] == kind), None)


def _words(part: Object) -> str:
    return ": ".join(text for text in (part.get("reason"), part.get("message")) if text)


def _time(text: Any) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)
