"""Reads the state of a Job, and why it has no pod."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kubernetes_asyncio import client

from leyden.libs.kubernetes.cluster import Cluster, Object

QUOTA = "exceeded quota"
"""A part of the refusal of an object for which the namespace's quota has no room now."""
FINAL_REFUSALS = ("violates PodSecurity", "denied the request", "must specify ")
"""The last one is of a quota that names a resource of which a container gives no amount."""


@dataclass(frozen=True)
class JobStatus:
    """Args: trouble: why it has no pod, or failed; pods: how many it makes at once; ended: it makes no pod any more;
    complete: every pod succeeded; refused: it makes pods again and again, and the namespace admits none; suspended: its
    queue took its pods, and will make them again.
    """

    trouble: str | None
    pods: int
    ended: bool = False
    complete: bool = False
    refused: bool = False
    suspended: bool = False

    @property
    def over(self) -> bool:
        """Whether waiting for its pod is in vain."""
        return self.ended or self.refused


async def job_statuses(cluster: Cluster, selector: str) -> dict[str, JobStatus]:
    """Returns the Jobs of a selector by name: two requests, however many Jobs."""
    jobs = await cluster.jobs(selector)
    events = await cluster.events("involvedObject.kind=Job,reason=FailedCreate")
    return {job["metadata"]["name"]: job_status(job, events) for job in jobs}


def job_status(job: Object, events: Sequence[Object] = ()) -> JobStatus:
    """Reads a Job, with the events of kind FailedCreate of its namespace."""
    name, pods = job["metadata"]["name"], job["spec"].get("parallelism", 1)
    refusal = next((one.get("message", "") for one in events if one["involvedObject"]["name"] == name), None)
    for condition in job.get("status", {}).get("conditions", []):
        if condition["type"] in {"Failed", "Complete"} and condition["status"] == "True":
            words = ": ".join(text for text in (condition.get("reason"), condition.get("message")) if text)
            is_complete = condition["type"] == "Complete"
            return JobStatus(refusal or words or condition["type"], pods, ended=True, complete=is_complete)
    if job["spec"].get("suspend"):
        return JobStatus("queued: the Job is suspended until its queue has room", pods, suspended=True)
    return JobStatus(refusal, pods, refused=any(word in (refusal or "") for word in FINAL_REFUSALS))


def fail_on_disruption() -> client.V1PodFailurePolicy:
    """Fails the Job when the cluster ends a pod of it, with the cause in the Job's condition."""
    disrupted = client.V1PodFailurePolicyOnPodConditionsPattern(type="DisruptionTarget", status="True")
    return client.V1PodFailurePolicy(
        rules=[client.V1PodFailurePolicyRule(action="FailJob", on_pod_conditions=[disrupted])]
    )
