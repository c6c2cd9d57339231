"""Runs container graders as Jobs of the cluster. A Job outlives its grader: the next one finds it by its name.

The verdict stands in the status of the Job's pod until the grading is settled, so that whoever leases the attempt reads
the same one. Only then the Job goes.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from enum import IntEnum

from leyden.libs.contracts.config.graders import Container
from leyden.libs.contracts.states import ComponentState
from leyden.libs.faults import fault_point
from leyden.libs.grading.grade import Grade, cut
from leyden.libs.grading.pool import Graded
from leyden.libs.kubernetes.cluster import Cluster, Object, Refused, connect
from leyden.libs.kubernetes.jobs import QUOTA, job_statuses
from leyden.libs.kubernetes.pods import InitStatus, PodStatus, init_status, pod_status
from leyden.libs.kubernetes.shared import SharedPoll
from leyden.libs.kubernetes.templates import COMPONENT, INSTANCE, selector
from leyden.libs.service.errors import Misconfigured
from leyden.libs.telemetry import logger
from leyden.services.grader.containers.job import (
    COLLECT,
    COLLECT_SECONDS,
    VERIFIER,
    attempt_secret,
    secret_of,
    verifier_job,
)
from leyden.services.grader.containers.verdict import NoVerdict, grade_of_words
from leyden.services.grader.containers.verification import Verification, packed
from leyden.services.grader.settings import Settings

POD_POLL_SECONDS = 1.0
JOB_POLL_SECONDS = 3.0
PODLESS_POLLS = 3
"""A Job has a pod by then, unless something keeps the cluster from making one."""
CLEAN_UP_SECONDS = 20.0
LOG_SECONDS = 10.0
SHOWN_BYTES = 300
"""The end of the log in an explanation."""
OUT_OF_MEMORY = "it used more memory than allowed (resources.limits.memory)"

log = logger()


class Failed(Exception):
    """The container has given no verdict."""


class _Stage(IntEnum):
    """The part of a pod's work that it has reached; each has a time limit of its own."""

    START = 0
    VERIFY = 1
    COLLECT = 2


class Containers:
    """Grades while it is open. The cluster is asked with the first grading."""

    def __init__(self, settings: Settings, cluster: Cluster | None = None) -> None:
        self._settings = settings
        self._cluster = cluster
        self._room = asyncio.Semaphore(settings.container_jobs)
        self._place: _Place | None = None

    async def grade(self, grader: Container, one: Verification) -> Graded:
        """Returns the grade; one that has failed may be tried again, in a new Job. Cancelled, it leaves the Job at
        work."""
        async with self._room:
            began = time.perf_counter()
            try:
                place = await self._opened()
                found = await place.run(grader, one)
                return Graded(found, time.perf_counter() - began)
            except (Failed, Refused, Misconfigured, ValueError) as error:
                await self.forget(one.name)
                failed = Grade(ComponentState.FAILED, explanation=cut(str(error)))
                return Graded(failed, time.perf_counter() - began, crashed=True)

    async def forget(self, name: str) -> None:
        """Deletes the Job of a grading that has ended; none is fine."""
        if self._place is None:
            return
        try:
            async with asyncio.timeout(CLEAN_UP_SECONDS):
                await self._place.cluster.delete_job(name)
        except (Refused, TimeoutError) as error:
            log.warning("Job not deleted, its time limit ends it", job=name, cause=str(error))

    async def close(self) -> None:
        """Closes the connection to the API server. Jobs that are at work stay."""
        if self._place is not None:
            await self._place.close()
        elif self._cluster is not None:
            await self._cluster.close()

    async def _opened(self) -> _Place:
        """Raises: Misconfigured: no cluster, or no pod template"""
        if self._place is None:
            settings = self._settings
            assert settings.namespace is not None
            self._cluster = self._cluster or Cluster(await connect(), settings.namespace, settings.owner_role)
            self._place = _Place(settings, self._cluster)
        return self._place


class _Place:
    """The Jobs of one release in one namespace. Raises: Misconfigured"""

    def __init__(self, settings: Settings, cluster: Cluster) -> None:
        assert settings.pod_template_file is not None
        self.cluster = cluster
        self._settings = settings
        self._template = cluster.template(settings.pod_template_file, COLLECT)
        self._selector = selector({INSTANCE: settings.release, COMPONENT: VERIFIER})
        self._pods = SharedPoll(self._list_pods, POD_POLL_SECONDS)
        self._jobs = SharedPoll(lambda: job_statuses(cluster, self._selector), JOB_POLL_SECONDS)

    async def run(self, grader: Container, one: Verification) -> Grade:
        """Creates the Job or finds it, and waits for its verdict.

        Raises: Failed, Refused, Misconfigured; ValueError: its files are too large for a Secret
        """
        seconds, causes = self._settings.start_seconds, [""]
        try:
            async with asyncio.timeout(seconds):
                adopted = await self._create(grader, one, causes)
        except TimeoutError as error:
            raise Failed(f"its Job was not created within {seconds:g} s{causes[-1]}") from error
        status = await self._until_over(grader, one.name, adopted=adopted)
        try:
            return grade_of_words(status.message, grader.key)
        except NoVerdict as error:
            raise Failed(await self._with_log(str(error), status.name)) from error

    async def close(self) -> None:
        await self._pods.close()
        await self._jobs.close()
        await self.cluster.close()

    async def _create(self, grader: Container, one: Verification, causes: list[str]) -> bool:
        """Creates the Job and its Secret, or finds them; returns whether another try has created the Job.

        Args: causes: gets those of waits
        """
        content = await asyncio.to_thread(packed, one.files)
        settings = self._settings
        secret = f"{one.name}-{secrets.token_hex(4)}"
        job = verifier_job(
            one,
            grader,
            self._template,
            secret=secret,
            release=settings.release,
            start_seconds=settings.start_seconds,
        )
        while True:
            try:
                uid = await self.cluster.create_job(job)
                found = await self.cluster.job(one.name)
                # The Job of a try before may still be on its way out.
                if found is not None and not found["metadata"].get("deletionTimestamp"):
                    break
            except Refused as error:
                # 404: the one that had the name has gone meanwhile.
                if QUOTA not in str(error) and error.status != 404:
                    raise
                causes.append(f": {error}")
            await asyncio.sleep(JOB_POLL_SECONDS)
        fault_point("grader.container_created")
        await self.cluster.create_secret(attempt_secret(secret_of(found), one.name, uid, content))
        return secret_of(found) != secret

    async def _until_over(self, grader: Container, name: str, *, adopted: bool) -> PodStatus:
        """Returns the end of a pod whose `collect` has ended with 0. Raises: Failed"""
        stage, since, podless, reason = _Stage.START, time.monotonic(), 0, "it has no pod"
        while True:
            pod = (await self._pods.next()).get(name)
            if pod is None:
                podless += 1
                if podless >= PODLESS_POLLS:
                    reason = await self._podless_reason(grader, name) or reason
            else:
                podless, status, verifier = 0, pod_status(pod, COLLECT), init_status(pod, VERIFIER)
                if status.is_over:
                    return await self._checked(pod, status)
                reason = status.waiting or reason
                if status.hopeless:
                    raise Failed(f"it cannot start: {reason}")
                if (reached := _stage_of(verifier, status)) > stage:
                    stage, since = reached, time.monotonic()
                    # Nodes, API server and this machine may disagree about the time: no two clocks are compared.
                    if adopted and stage is _Stage.VERIFY:
                        since -= await self._ran_before(name, verifier)
            if time.monotonic() - since > self._limit(stage, grader):
                raise Failed(await self._late(stage, grader, pod, reason))

    async def _ran_before(self, name: str, verifier: InitStatus) -> float:
        """How many seconds an adopted verifier has run, by the API server's clock; 0 where that does not tell."""
        now = await self.cluster.time(name)
        began = verifier.served_at
        return 0.0 if now is None or began is None else max(0.0, (now - began).total_seconds())

    def _limit(self, stage: _Stage, grader: Container) -> float:
        """Returns seconds."""
        limits = {_Stage.START: self._settings.start_seconds, _Stage.VERIFY: grader.timeout_seconds}
        return limits.get(stage, COLLECT_SECONDS)

    async def _late(self, stage: _Stage, grader: Container, pod: Object | None, reason: str) -> str:
        """Says which limit is over."""
        match stage:
            case _Stage.START:
                return f"it did not start within {self._settings.start_seconds:g} s: {reason}"
            case _Stage.VERIFY:
                return await self._with_log(_too_long(grader), pod["metadata"]["name"]) if pod else _too_long(grader)
            case _Stage.COLLECT:
                return f"its verifier ended, but {COLLECT} did not within {COLLECT_SECONDS:g} s: {reason}"

    async def _podless_reason(self, grader: Container, name: str) -> str | None:
        """Says why a Job has no pod. Raises: Failed: it will never have one"""
        jobs = await self._jobs.next()
        if name not in jobs:
            raise Failed("its Job was deleted")
        trouble = jobs[name].trouble or ""
        if jobs[name].over:
            raise Failed(_too_long(grader) if "DeadlineExceeded" in trouble else f"its pod is gone: {trouble}")
        return trouble or None

    async def _checked(self, pod: Object, status: PodStatus) -> PodStatus:
        """Raises: Failed: the pod ended without its last words"""
        if status.exit_code == 0 and status.disrupted is None:
            return status
        cause = status.start_error or status.evicted_for_limit or status.disrupted or f"{COLLECT} failed"
        words = OUT_OF_MEMORY if "OOMKilled" in cause else cause
        raise Failed(await self._with_log(words, pod["metadata"]["name"]))

    async def _with_log(self, words: str, pod: str) -> str:
        """The words, and the end of the container's log, if there is one."""
        end = b""

        def add(part: bytes) -> None:
            nonlocal end
            end = (end + part)[-SHOWN_BYTES:]

        try:
            async with asyncio.timeout(LOG_SECONDS):
                await self.cluster.read_log(pod, VERIFIER, lambda: add)
        except (Refused, TimeoutError):
            return words
        said = end.decode(errors="replace").strip()
        return f"{words}: {said}" if said else words

    async def _list_pods(self) -> dict[str, Object]:
        pods = await self.cluster.pods(self._selector)
        return {pod["metadata"].get("labels", {}).get("batch.kubernetes.io/job-name", ""): pod for pod in pods}


def _too_long(grader: Container) -> str:
    return f"it took longer than {grader.timeout_seconds:g} s (timeout_seconds)"


def _stage_of(verifier: InitStatus, collect: PodStatus) -> _Stage:
    if verifier.has_ended or collect.started_at is not None:
        return _Stage.COLLECT
    return _Stage.VERIFY if verifier.is_running else _Stage.START
