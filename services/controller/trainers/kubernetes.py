"""Trainers as Indexed Jobs of a Kubernetes cluster; they outlive the controller, and the next leader adopts them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from leyden.libs.embedded.memory_kills import told
from leyden.libs.kubernetes.cluster import Cluster, Refused
from leyden.libs.kubernetes.jobs import QUOTA, JobStatus, job_status, job_statuses
from leyden.libs.kubernetes.pods import PodStatus, pod_status
from leyden.libs.kubernetes.shared import SharedPoll
from leyden.libs.kubernetes.templates import ATTEMPT, COMPONENT, INSTANCE, RUN, selector
from leyden.libs.telemetry import logger
from leyden.services.controller.settings import Settings
from leyden.services.controller.trainers.backend import (
    LESS_MEMORY,
    BackendAway,
    TrainerAttempt,
    TrainerRefused,
    TrainerState,
    TrainerStatus,
    end_of,
    last_line,
)
from leyden.services.controller.trainers.job import CONTAINER, WAIT, awaited, trainer_job
from leyden.services.controller.trainers.models import TrainerModels

log = logger()

POLL_SECONDS = 1.0
RANK_LOST = "another process of this trainer ended"
"""Words of the trainer's RankLost."""
PEER_LOST = "typically caused by a remote worker crashing"
"""Words of gloo, where the collective was torch's own."""
SIGNALS_FROM = 128
MORE_MEMORY = "raise trainer.resources.limits.memory in the chart's values"


class Snapshot(NamedTuple):
    """All trainers: Jobs by name, and each one's pods."""

    jobs: dict[str, JobStatus]
    pods: dict[str, list[PodStatus]]


class KubernetesTrainers:
    """A `TrainerBackend`: one Job per attempt.

    Raises: Misconfigured: the pod template is not usable
    """

    def __init__(self, settings: Settings, cluster: Cluster) -> None:
        assert settings.trainer_pod_template_file is not None
        self._settings = settings
        self._cluster = cluster
        self._template = cluster.template(settings.trainer_pod_template_file, CONTAINER)
        self._selector = selector({INSTANCE: settings.release, COMPONENT: CONTAINER})
        self._poll = SharedPoll(self._snapshot, POLL_SECONDS)
        self._without_quota: dict[TrainerAttempt, tuple[TrainerModels, str]] = {}

    async def last_attempt(self, run_id: str) -> int:
        with _refusals():
            jobs = await self._cluster.jobs(f"{self._selector},{RUN}={run_id}")
        return max((int(job["metadata"]["labels"][ATTEMPT]) for job in jobs), default=0)

    async def live_attempts(self) -> list[TrainerAttempt]:
        with _refusals():
            jobs = await self._cluster.jobs(self._selector)
        labels = [job["metadata"]["labels"] for job in jobs if not job_status(job).ended]
        return [TrainerAttempt(one[RUN], int(one[ATTEMPT])) for one in labels]

    async def start(self, attempt: TrainerAttempt, models: TrainerModels) -> None:
        try:
            uid = await self._cluster.create_job(trainer_job(attempt, models, self._template, self._settings))
        except Refused as error:
            if error.lacks_rights:
                raise _away(error) from error
            if QUOTA not in str(error):
                raise TrainerRefused(str(error)) from error
            self._without_quota[attempt] = models, str(error)
            return
        self._without_quota.pop(attempt, None)
        log.info("trainer started", trainer=attempt.name, job_uid=uid)

    async def status(self, attempt: TrainerAttempt) -> TrainerStatus:
        with _refusals():
            snapshot = await self._poll.next()
        if attempt in self._without_quota:
            models, _ = self._without_quota[attempt]
            await self.start(attempt, models)
            _, reason = self._without_quota.get(attempt, (models, "its Job was created just now"))
            return TrainerStatus(TrainerState.WAITING, reason)
        job = snapshot.jobs.get(attempt.name)
        if job is None:
            # The list may be older than the Job.
            with _refusals():
                made = await self._cluster.job(attempt.name)
            if made is None:
                return TrainerStatus(TrainerState.KILLED, f"the Job {attempt.name} was deleted")
            job = job_status(made)
        return trainer_status(job, snapshot.pods.get(attempt.name, []))

    async def stop(self, attempt: TrainerAttempt) -> None:
        # The kubelet sends SIGTERM, and SIGKILL after the template's `terminationGracePeriodSeconds`.
        self._without_quota.pop(attempt, None)
        with _refusals():
            await self._cluster.delete_job(attempt.name)
            log.info("trainer ends", trainer=attempt.name)
            while attempt.name in (snapshot := await self._poll.next()).jobs:
                # The next attempt may start beside a pod whose node does not report. Two never train at once: a trainer
                # trains while its session holds the run's advisory lock, and asks for it before whatever it writes.
                if (pods := snapshot.pods.get(attempt.name)) and all(pod.lost and pod.is_over for pod in pods):
                    return

    async def close(self) -> None:
        await self._poll.close()

    async def _snapshot(self) -> Snapshot:
        jobs = await job_statuses(self._cluster, self._selector)
        pods: dict[str, list[PodStatus]] = {}
        for pod in await self._cluster.pods(self._selector):
            status = pod_status(pod, CONTAINER)
            if WAIT in (status.waiting or "") and (missing := awaited(pod)) is not None:
                status = replace(status, waiting=f"{status.waiting}: {missing}")
            pods.setdefault(status.job, []).append(status)
        return Snapshot(jobs, pods)


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except Refused as error:
        raise _away(error) from error


def _away(error: Refused) -> BackendAway:
    return BackendAway(f"{error}: the chart's Role for the controller grants what it needs")


def trainer_status(job: JobStatus, pods: list[PodStatus]) -> TrainerStatus:
    """Reads the state of a trainer from its Job and its pods: one pod down is the trainer's end."""
    if job.complete:
        return TrainerStatus(TrainerState.DONE, "exit code 0")
    if job.suspended:
        # The ends of its pods are the queue's, which resumes the same Job: another one would train beside it.
        return TrainerStatus(TrainerState.WAITING, job.trouble or "")
    failed = [pod for pod in pods if pod.is_over and pod.exit_code != 0]
    disrupted = next((pod.disrupted or pod.evicted_for_limit for pod in pods if pod.is_over and _was_killed(pod)), None)
    if disrupted is not None:
        return TrainerStatus(TrainerState.KILLED, disrupted, _output(pods))
    # A process that loses another one ends, too: the other's end is the cause.
    causes = [pod for pod in failed if not any(words in pod.message for words in (RANK_LOST, PEER_LOST))]
    if causes:
        end = _end_of_pod(min(causes, key=lambda pod: not (pod.out_of_memory or told(pod.message)[0])))
        return end._replace(output=_output(pods))
    lost = [pod.name for pod in pods if pod.lost]
    if lost and not job.ended:
        # The cluster deletes it after some minutes, or the node reports again.
        return TrainerStatus(TrainerState.WAITING, f"the node of its pod {lost[0]} does not report")
    if failed and not job.ended and sum(pod.is_over for pod in pods) < job.pods:
        return TrainerStatus(TrainerState.RUNNING, "a pod has ended")
    if failed:
        return TrainerStatus(TrainerState.KILLED, last_line(told(failed[0].message)[1]), _output(pods))
    if job.ended:
        # No pod is left to blame: somebody deleted it.
        return TrainerStatus(TrainerState.KILLED, job.trouble or "its Job failed")
    if any(pod.exit_code == 0 for pod in pods):
        return TrainerStatus(TrainerState.RUNNING, "a pod has ended")
    waiting = [pod.waiting for pod in pods if pod.waiting is not None]
    if waiting or len(pods) < job.pods:
        return TrainerStatus(TrainerState.WAITING, next(iter(waiting), job.trouble or "its pods are being created"))
    return TrainerStatus(TrainerState.RUNNING, f"pods {', '.join(sorted(pod.name for pod in pods))}")


def _was_killed(pod: PodStatus) -> bool:
    return pod.disrupted is not None or pod.evicted_for_limit is not None


def _end_of_pod(pod: PodStatus) -> TrainerStatus:
    output, code = pod.start_error or pod.message, pod.exit_code or 0
    if pod.out_of_memory:
        line = last_line(told(output)[1]) or "no output"
        return TrainerStatus(TrainerState.OUT_OF_MEMORY, f"out of memory: {MORE_MEMORY}, or {LESS_MEMORY}: {line}")
    # The kernel may kill one process of a container, and the container goes on: its first process counts them.
    kills, output = told(output)
    return end_of(SIGNALS_FROM - code if code > SIGNALS_FROM else code, output, MORE_MEMORY, memory_kills=kills)


def _output(pods: list[PodStatus]) -> str:
    """The last lines of each pod's log, which go with the Job."""
    return "\n".join(f"{pod.name}:\n{pod.message}" for pod in pods if pod.message)
