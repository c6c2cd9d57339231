"""Executes each attempt as a Kubernetes Job. One list a second serves all attempts of a runner."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

from leyden.libs.contracts.config import KubernetesRunner, RunnerConfig
from leyden.libs.kubernetes.cluster import Cluster, Refused
from leyden.libs.kubernetes.jobs import QUOTA, job_statuses
from leyden.libs.kubernetes.pods import PodStatus, pod_status
from leyden.libs.kubernetes.shared import SharedPoll
from leyden.libs.kubernetes.templates import ATTEMPT, COMPONENT, INSTANCE, RAN_IN, ROLLOUT, selector
from leyden.libs.sandbox.ended import Ended
from leyden.libs.sandbox.output import Output
from leyden.libs.service.errors import Misconfigured
from leyden.libs.telemetry import RateLimitedLogger, logger
from leyden.services.runner.backends.base import AttemptSpec, BackendError, out_of_memory
from leyden.services.runner.backends.kubernetes.job import CONTAINER, agent_job, job_name, name_of
from leyden.services.runner.backends.kubernetes.secret import attempt_secret
from leyden.services.runner.backends.kubernetes.shared_pods import SharedPods
from leyden.services.runner.settings import Settings

log = logger()
limited_log = RateLimitedLogger(log)

POD_POLL_SECONDS = 1.0
JOB_POLL_SECONDS = 3.0
PODLESS_POLLS = 3
"""A Job has a pod by then, unless something keeps the cluster from making one."""
LOST_POLLS = 10
"""The pod of an agent that ran is gone for good by then, whatever its Job still says."""
CLEAN_UP_SECONDS = 20.0
LOG_SECONDS = 60.0
OUT_OF_MEMORY = out_of_memory("runner.resources.limits.memory")


class KubernetesBackend:
    """The attempts of one runner in one namespace.

    Raises: Misconfigured: the pod template is not usable
    """

    agents_outlive_runner = True

    def __init__(self, settings: Settings, cluster: Cluster) -> None:
        assert settings.pod_template_file is not None
        self._settings = settings
        self._asked_once = cluster
        # An API server that restarts may know no rights for a while. Half: an attempt that cannot start says why.
        self._cluster = cluster = cluster.patient(settings.start_seconds / 2)
        self._template = cluster.template(settings.pod_template_file, CONTAINER)
        shared = settings.shared_pod_template_file
        self._shared = SharedPods(settings, cluster, cluster.template(shared, CONTAINER) if shared else self._template)
        self._selector = selector({INSTANCE: settings.release, COMPONENT: CONTAINER})
        self._running: set[str] = set()
        self._pods = SharedPoll(self._list_pods, POD_POLL_SECONDS)
        self._jobs = SharedPoll(lambda: job_statuses(cluster, self._selector), JOB_POLL_SECONDS)

    async def check(self) -> None:
        """Asks the API server whether it would create an agent's Job, and creates none.

        Raises: Misconfigured: it would not
        """
        # An image of the operator's, where the template has one: a cluster may admit no other.
        image = next((one.image for one in self._template.spec.init_containers or ()), "leyden/check:1")
        limits = KubernetesRunner(image=image, timeout_seconds=60)
        try:
            await self._asked_once.pods(self._selector)
            job = agent_job(
                AttemptSpec("check", ["true"], {}, {}, {}, None, limits), limits, self._template, self._settings
            )
            await self._asked_once.create_job(job, dry_run=True)
        except Refused as error:
            if QUOTA in str(error):
                # Attempts wait for room, and those of an earlier runner may hold it.
                limited_log.warning("no room for a Job now", cause=str(error))
                return
            raise Misconfigured(
                f"agents cannot start in RUNNER_NAMESPACE {self._settings.namespace}: {error}. "
                "The chart's Role grants the runner its rights, and RUNNER_POD_TEMPLATE_FILE describes the pod"
            ) from error

    async def run(self, spec: AttemptSpec) -> Ended:
        """Runs the agent to its end. Its Job stays until `remove`: another runner may have adopted it, and read it.

        Raises: BackendError: it did not start, or its end is unknown
        """
        assert isinstance(spec.limits, KubernetesRunner)
        if spec.limits.attempts_per_pod > 1:
            return await self._shared.run(spec, spec.limits)
        name = job_name(spec)
        self._running.add(name)
        try:
            ran_in = await (self._adopt(name) if spec.adopted else self._create(spec, name))
            return await self._until_over(spec, name, ran_in)
        except Refused as error:
            raise BackendError(str(error)) from error
        finally:
            self._running.discard(name)

    async def remove(self, rollout_id: str, attempt: int, limits: RunnerConfig) -> None:
        """Deletes the Job of an attempt whose outcome counts; one in a shared pod had none."""
        if isinstance(limits, KubernetesRunner) and limits.attempts_per_pod == 1:
            await self._clean_up(_name(rollout_id, attempt))

    async def survivors(self) -> list[tuple[str, int]]:
        """Rollout and attempt of the Jobs of other runners, alive or not."""
        try:
            labels = [job["metadata"]["labels"] for job in await self._cluster.jobs(self._selector)]
        except Refused as error:
            limited_log.warning("Jobs not listed", cause=str(error))
            return []
        found = [(one[ROLLOUT], int(one[ATTEMPT])) for one in labels]
        return [one for one in found if _name(*one) not in self._running]

    async def discard(self, rollout_id: str, attempt: int) -> None:
        """Deletes the Job of an attempt that nobody wants."""
        await self._clean_up(_name(rollout_id, attempt))

    async def close(self) -> None:
        """Closes the connection to the API server."""
        await self._shared.close()
        await self._pods.close()
        await self._jobs.close()
        await self._cluster.close()

    async def _adopt(self, name: str) -> str | None:
        """Returns the pod in which the Job's agent ran, if a runner saw it run.

        Raises: BackendError: the Job is gone
        """
        # Creating it again would mix the calls of two agents in one attempt.
        job = await self._cluster.job(name)
        if job is None:
            raise BackendError("the agent's Job was deleted while its runner was gone")
        ran_in: str | None = job["metadata"].get("annotations", {}).get(RAN_IN)
        return ran_in

    async def _remember(self, name: str, pod: str) -> None:
        """Writes on the Job in which pod its agent runs: a runner that adopts it tells another pod from this one."""
        try:
            await self._asked_once.annotate_job(name, {RAN_IN: pod})
        except Refused as error:
            limited_log.warning("pod of an agent not remembered", cause=str(error))

    async def _create(self, spec: AttemptSpec, name: str) -> None:
        """Creates the Job and its Secret within `start_seconds`."""
        creating = asyncio.create_task(self._create_both(spec, name))
        try:
            await asyncio.wait([creating], timeout=self._settings.start_seconds)
        except asyncio.CancelledError:
            # A runner that adopts the Job does not create the Secret for which its pod waits.
            await asyncio.wait([creating], timeout=CLEAN_UP_SECONDS)
            raise
        finally:
            creating.cancel()
            await asyncio.gather(creating, return_exceptions=True)
        if creating.cancelled():
            raise BackendError(f"the agent's Job was not created within {self._settings.start_seconds:g} s")
        creating.result()

    async def _create_both(self, spec: AttemptSpec, name: str) -> None:
        """Creates the Job, or adopts it, and then the Secret, for which its pod waits."""
        assert isinstance(spec.limits, KubernetesRunner)
        if refused := self._settings.agent_rules.refusals(spec.limits):
            raise BackendError("; ".join(refused))
        job = agent_job(spec, spec.limits, self._template, self._settings)
        while True:
            try:
                uid = await self._cluster.create_job(job)
                break
            except Refused as error:
                if QUOTA not in str(error):
                    raise
                limited_log.warning("no room for a Job", cause=str(error))
            await asyncio.sleep(JOB_POLL_SECONDS)
        await self._cluster.create_secret(attempt_secret(spec, name, uid))

    async def _until_over(self, spec: AttemptSpec, name: str, ran_in: str | None) -> Ended:
        began, podless, reason = time.monotonic(), 0, "it has no pod"
        running_since: float | None = None
        while True:
            pod = (await self._pods.next()).get(name)
            podless = 0 if pod is not None else podless + 1
            if pod is not None and pod.name != (ran_in or pod.name):
                # As Kueue does with a Job that it suspended. The calls of two agents would be one attempt's.
                raise BackendError(f"the cluster started the agent again, in pod {pod.name} after {ran_in}")
            if pod is not None and pod.is_over:
                return await self._exit(spec, pod)
            if pod is not None and pod.started_at is not None:
                # Nodes, API server and this machine may disagree about the time: no two of their clocks are compared.
                if running_since is None:
                    # The clock is read after the answer, which may have taken long and contains that time.
                    ran = await self._ran_before(name, pod) if spec.adopted else 0.0
                    running_since = time.monotonic() - ran
                if ran_in is None:
                    await self._remember(name, pod.name)
                ran_in = pod.name
                if (seconds := time.monotonic() - running_since) > spec.limits.timeout_seconds:
                    return await self._timed_out(spec, pod, seconds)
                continue
            if pod is not None:
                reason = pod.waiting or reason
            elif podless >= PODLESS_POLLS:
                reason = await self._podless_reason(name) or reason
            if ran_in is not None and podless >= LOST_POLLS:
                raise BackendError(f"the agent's pod {ran_in} is gone: {reason}")
            if pod is not None and pod.hopeless:
                raise BackendError(f"the agent cannot start: {reason}")
            if time.monotonic() - began > self._settings.start_seconds:
                raise BackendError(f"the agent did not start within {self._settings.start_seconds:g} s: {reason}")

    async def _ran_before(self, name: str, pod: PodStatus) -> float:
        """How many seconds an adopted agent has run, by the API server's clock; 0 where that does not tell."""
        now = await self._cluster.time(name)
        return 0.0 if now is None or pod.served_at is None else max(0.0, (now - pod.served_at).total_seconds())

    async def _podless_reason(self, name: str) -> str | None:
        """Says why a Job has no pod. Raises: BackendError: it will never have one"""
        jobs = await self._jobs.next()
        if name not in jobs:
            raise BackendError("the agent's Job was deleted")
        if jobs[name].over:
            raise BackendError(f"the agent's pod is gone or was refused: {jobs[name].trouble}")
        return jobs[name].trouble

    async def _exit(self, spec: AttemptSpec, pod: PodStatus) -> Ended:
        if pod.start_error is not None:
            raise BackendError(f"the agent could not be started: {pod.start_error}")
        lacked_memory = pod.out_of_memory and pod.exit_code != 0
        output = await self._output(spec, pod)
        if output is None and pod.disrupted is None and pod.exit_code == 0:
            raise BackendError("the log of the agent is lost, and its reward with it")
        return Ended(
            exit_code=pod.exit_code,
            stdout=b"" if output is None else output.last(spec.limits.output_bytes),
            stderr=b"",
            seconds=_seconds(pod),
            limit_exceeded=pod.evicted_for_limit,
            platform_failure=pod.disrupted or (OUT_OF_MEMORY if lacked_memory else None),
            reward_line=b"" if output is None else output.reward_line(),
        )

    async def _timed_out(self, spec: AttemptSpec, pod: PodStatus, seconds: float) -> Ended:
        """The exit of an agent that still runs; deleting its Job stops it."""
        lost = "the agent's node does not report" if pod.lost else None
        output = await self._output(spec, pod)
        stdout = b"" if output is None else output.last(spec.limits.output_bytes)
        return Ended(None, stdout, b"", seconds, timed_out=lost is None, platform_failure=lost)

    async def _output(self, spec: AttemptSpec, pod: PodStatus) -> Output | None:
        """Returns the log's end and its reward line; None where the pod or its node is gone.

        A reward before more output than the node keeps (10 MiB by the kubelet's default) is lost.
        """
        output = Output()

        def begin() -> Callable[[bytes], None]:
            nonlocal output
            output = Output()
            return partial(output.add, limit=spec.limits.output_bytes)

        try:
            async with asyncio.timeout(LOG_SECONDS):
                await self._cluster.read_log(pod.name, CONTAINER, begin)
        except (Refused, TimeoutError) as error:
            log.warning("log of an agent is lost", attempt=spec.name, cause=str(error))
            return None
        return output

    async def _clean_up(self, name: str) -> None:
        try:
            async with asyncio.timeout(CLEAN_UP_SECONDS):
                await self._cluster.delete_job(name)
        except (Refused, TimeoutError) as error:
            log.warning("Job not deleted, its time limit ends it", job=name, cause=str(error))

    async def _list_pods(self) -> dict[str, PodStatus]:
        statuses = [pod_status(pod, CONTAINER) for pod in await self._cluster.pods(self._selector)]
        return {status.job: status for status in statuses}


def _name(rollout_id: str, attempt: int) -> str:
    return name_of(f"{rollout_id}.{attempt}")


def _seconds(pod: PodStatus) -> float:
    """Start to end of the container, both by its node's clock; 0 where it never ran, or its end is unknown."""
    if pod.started_at is None or pod.finished_at is None:
        return 0.0
    return max(0.0, (pod.finished_at - pod.started_at).total_seconds())
