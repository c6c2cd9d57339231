"""The state of a pod, from the objects that a kubelet and a scheduler write."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from leyden.libs.kubernetes.pods import NODE_LOST, PodStatus, pod_status

SPEC = {"terminationGracePeriodSeconds": 5}


def pod(state: dict[str, Any] | None = None, metadata: dict[str, Any] | None = None, **status: Any) -> PodStatus:
    if state is not None:
        status["containerStatuses"] = [{"name": "sidecar", "state": {}}, {"name": "agent", "state": state}]
    labels = {"batch.kubernetes.io/job-name": "job"}
    found = {"metadata": {"name": "p", "labels": labels, **(metadata or {})}, "spec": SPEC, "status": status}
    return pod_status(found, "agent")


def ended(code: int, **details: Any) -> dict[str, Any]:
    times = {"startedAt": "2026-11-22T12:00:00Z", "finishedAt": "2026-11-22T12:00:30Z"}
    return {"terminated": {"exitCode": code, **times, **details}}


@pytest.mark.parametrize(
    ("found", "reason", "hopeless"),
    [
        (pod(phase="Pending"), "no node has reported the pod", False),
        (
            pod(
                phase="Pending",
                conditions=[
                    {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes fit"}
                ],
            ),
            "Unschedulable: 0/1 nodes fit",
            False,
        ),
        (pod({"waiting": {"reason": "ContainerCreating"}}, phase="Pending"), "ContainerCreating", False),
        (pod({"waiting": {"reason": "ErrImagePull", "message": "no"}}, phase="Pending"), "ErrImagePull: no", False),
        (
            pod({"waiting": {"reason": "ImagePullBackOff", "message": "m"}}, phase="Pending"),
            "ImagePullBackOff: m",
            True,
        ),
        (
            pod(
                {"waiting": {"reason": "PodInitializing"}},
                phase="Pending",
                initContainerStatuses=[{"name": "i", "state": {"waiting": {"reason": "ErrImageNeverPull"}}}],
            ),
            "ErrImageNeverPull",
            True,
        ),
    ],
)
def test_a_pod_that_waits_says_why(found: PodStatus, reason: str, hopeless: bool) -> None:
    assert (found.waiting, found.hopeless, found.is_over, found.started_at) == (reason, hopeless, False, None)


def test_a_start_by_the_servers_clock_adds_the_nodes_own_time_to_the_moment_of_binding() -> None:
    running = {"running": {"startedAt": "2026-11-22T12:00:30Z"}}
    bound = {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-11-22T09:00:00Z"}
    # The node's clock is three hours ahead; it pulled the image for 25 s.
    at_work = pod(running, phase="Running", startTime="2026-11-22T12:00:05Z", conditions=[bound])
    assert at_work.served_at == datetime(2026, 11, 22, 9, 0, 25, tzinfo=UTC)
    assert pod(running, phase="Running", conditions=[bound]).served_at is None
    assert pod(running, phase="Running", startTime="2026-11-22T12:00:05Z").served_at is None


def test_a_container_at_work_has_a_start_and_a_lost_node_shows() -> None:
    running = {"running": {"startedAt": "2026-11-22T12:00:00Z"}}
    at_work = pod(running, phase="Running", conditions=[{"type": "Ready", "status": "True"}])
    assert (at_work.started_at, at_work.lost) == (datetime(2026, 11, 22, 12, tzinfo=UTC), False)
    lost = pod(running, phase="Running", conditions=[{"type": "Ready", "status": "False"}])
    assert (lost.lost, lost.is_over) == (True, False)
    unready = {"type": "Ready", "status": "False", "reason": "ContainersNotReady"}
    assert not pod(running, phase="Running", conditions=[unready]).lost


def test_a_deleted_pod_whose_node_does_not_report_is_over() -> None:
    """Its deletion has no end while the node is away; one whose node reports ends by itself."""
    running, asked = {"running": {"startedAt": "2026-11-22T12:00:00Z"}}, {"deletionTimestamp": "2026-11-22T12:10:00Z"}
    found = [
        pod(running, asked, phase="Running", conditions=[{"type": "Ready", "status": ready}])
        for ready in ("False", "True")
    ]
    assert [one.disrupted for one in found] == ["the pod was deleted, and its node does not report", None]


def test_an_end_has_its_code_and_times_although_another_container_goes_on() -> None:
    found = pod(ended(3), phase="Running")
    assert (found.exit_code, found.is_over, found.disrupted, found.out_of_memory) == (3, True, None, False)
    assert found.started_at is not None and found.finished_at is not None
    assert (found.finished_at - found.started_at).total_seconds() == 30
    assert pod(ended(137, reason="OOMKilled"), phase="Failed").out_of_memory
    assert pod(ended(128, reason="StartError", message="no such file"), phase="Failed").start_error == (
        "StartError: no such file"
    )


DISRUPTED = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI", "message": "drained"}


@pytest.mark.parametrize(
    ("found", "cause"),
    [
        (pod(ended(143), phase="Failed", conditions=[DISRUPTED]), "EvictionByEvictionAPI: drained"),
        (pod(ended(0), phase="Succeeded", conditions=[DISRUPTED]), "EvictionByEvictionAPI: drained"),
        (pod(phase="Failed", reason="OutOfcpu", message="too much"), "OutOfcpu: too much"),
        (pod(phase="Failed"), "the node ended the pod"),
        (pod(ended(137, reason="ContainerStatusUnknown"), phase="Failed"), "ContainerStatusUnknown"),
        (
            pod(
                ended(143),
                {"deletionTimestamp": "2026-11-22T12:00:35Z", "deletionGracePeriodSeconds": 5},
                phase="Failed",
            ),
            "the pod was deleted",
        ),
        (
            pod(
                ended(137),
                {"deletionTimestamp": "2026-11-22T12:00:31Z", "deletionGracePeriodSeconds": 0},
                phase="Failed",
            ),
            "the pod was deleted",
        ),
        (
            pod(
                ended(1),
                {"deletionTimestamp": "2026-11-22T12:00:45Z", "deletionGracePeriodSeconds": 5},
                phase="Failed",
            ),
            None,
        ),
    ],
)
def test_an_end_that_the_cluster_caused_is_told_from_the_containers_own(found: PodStatus, cause: str | None) -> None:
    assert (found.disrupted, found.is_over) == (cause, True)


def test_an_eviction_for_the_pods_own_limit_is_its_own_failure_and_one_for_the_nodes_is_not() -> None:
    own = pod(
        phase="Failed",
        reason="Evicted",
        message="Pod ephemeral local storage usage exceeds the total limit",
        conditions=[DISRUPTED],
    )
    assert (own.disrupted, own.is_over) == (None, True)
    assert own.evicted_for_limit is not None
    nodes = pod(phase="Failed", reason="Evicted", message="The node was low on resource: memory.")
    assert (nodes.disrupted, nodes.evicted_for_limit) == ("Evicted: The node was low on resource: memory.", None)


def test_a_pod_whose_init_container_failed_says_its_last_words_and_blames_no_agent() -> None:
    words = "policies did not hold within 60 s"
    inits = [
        {"name": "first", "state": {"terminated": {"exitCode": 0}}},
        {"name": "wait-for-policies", "state": {"terminated": {"exitCode": 1, "reason": "Error", "message": words}}},
    ]
    found = pod({"waiting": {"reason": "PodInitializing"}}, phase="Failed", initContainerStatuses=inits)
    assert (found.is_over, found.exit_code, found.disrupted) == (True, None, f"wait-for-policies: {words}")


def test_a_pod_that_nobody_ends_is_lost_before_its_container_runs() -> None:
    def waits(seconds: float) -> PodStatus:
        deletion = datetime.now(tz=UTC) - timedelta(seconds=seconds)
        return pod({"waiting": {"reason": "ContainerCreating"}}, {"deletionTimestamp": deletion.isoformat()})

    assert (waits(60).is_over, waits(60).waiting) == (False, "ContainerCreating")
    assert (waits(180).is_over, waits(180).lost, waits(180).disrupted) == (True, True, NODE_LOST)
