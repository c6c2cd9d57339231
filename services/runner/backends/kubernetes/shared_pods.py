"""Runs attempts of a run side by side in pods that serve many of them, `runner.attempts_per_pod` at once.

`libs/sandbox/pod_server.py` serves them inside. An attempt is one connection, so it ends with its runner.
"""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from kubernetes_asyncio import client

from leyden.libs.contracts.agent_rules import quantity
from leyden.libs.contracts.config import KubernetesRunner
from leyden.libs.kubernetes.cluster import Cluster, Refused
from leyden.libs.kubernetes.jobs import QUOTA, job_statuses
from leyden.libs.kubernetes.pods import PodStatus, pod_status
from leyden.libs.kubernetes.shared import SharedPoll
from leyden.libs.kubernetes.templates import COMPONENT, INSTANCE, selector
from leyden.libs.sandbox.ended import Ended, ended_of
from leyden.libs.sandbox.output import MAX_LINE_BYTES
from leyden.libs.sandbox.place import Names
from leyden.libs.sandbox.pod_server import PORT, watch_peer
from leyden.libs.sandbox.supervisor import MEMORY_POLL_SECONDS
from leyden.libs.sandbox.supervisors import ProgramError
from leyden.libs.telemetry import logger
from leyden.services.runner.backends.base import AttemptSpec, BackendError
from leyden.services.runner.backends.kubernetes.job import CONTAINER
from leyden.services.runner.backends.kubernetes.secret import secret_of
from leyden.services.runner.backends.kubernetes.shared_job import (
    OPEN_SECONDS,
    SHARED,
    SPARE_SECONDS,
    TOKEN_KEY,
    memory_limit,
    shared_job,
)
from leyden.services.runner.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from leyden.libs.sandbox.pod_server import PodReport

log = logger()

POLL_SECONDS = 1.0
JOB_POLL_SECONDS = 3.0
PODLESS_POLLS = 3
"""A Job has a pod by then, unless something keeps the cluster from making one."""
UNUSED_SECONDS = 30.0
"""A pod without attempts is deleted after so long."""
MEMORY_POLLS_A_SECOND = 100
"""In one pod. Why: each takes 0.2 ms of CPU, so two a second for each of 1,000 attempts take 0.4 cores."""
CONNECT_SECONDS = 20.0
"""Longer than the pause of a pod whose node has no CPU left: a pod that does not answer is lost to all attempts."""
CLEAN_UP_SECONDS = 20.0
END_SECONDS = 5.0
"""The API server shows the end of a pod a moment after its connections break."""
REPORT_BYTES = 2 * MAX_LINE_BYTES
"""Most bytes of a report without stdout and stderr, which base64 makes longer by a third."""
NAMES = Names(
    program="agent",
    prefix="RUNNER",
    kind="AGENT",
    directory="agent.directory",
    remedy="",
    memory="its share of runner.resources.limits.memory among runner.attempts_per_pod",
)


class _Pod:
    """One pod. Attributes: used: attempts that have it; lost, or later than open_until: it gets no more of them"""

    def __init__(self, job: client.V1Job, runner: KubernetesRunner) -> None:
        self.job = job
        self.name: str = job.metadata.name
        self.token = secrets.token_hex(32)
        self.slots = runner.attempts_per_pod
        self.used = 0
        self.lost = False
        self.open_until = time.monotonic() + OPEN_SECONDS
        self.opening: asyncio.Task[str] | None = None
        self.ending: asyncio.TimerHandle | None = None
        memory = memory_limit(job)
        self.memory_share = None if memory is None else int(quantity(memory)) // self.slots

    def lose(self) -> None:
        """Gives it no more attempts; those that it has go on."""
        self.lost = True

    @property
    def has_room(self) -> bool:
        return not self.lost and self.used < self.slots and time.monotonic() < self.open_until


class SharedPods:
    """The shared pods of one runner. Args: template: the operator's pod with the server in it"""

    def __init__(self, settings: Settings, cluster: Cluster, template: client.V1PodTemplateSpec) -> None:
        self._settings = settings
        self._cluster = cluster
        self._template = template
        self._selector = selector({INSTANCE: settings.release, COMPONENT: SHARED})
        self._pods: dict[tuple[str, str], list[_Pod]] = {}
        self._states = SharedPoll(self._list_pods, POLL_SECONDS)
        self._jobs = SharedPoll(lambda: job_statuses(cluster, self._selector), JOB_POLL_SECONDS)
        self._deletions: set[asyncio.Task[None]] = set()

    async def run(self, spec: AttemptSpec, runner: KubernetesRunner) -> Ended:
        """Runs the agent in a pod of its run, a new one where none has room. Cancelling kills it.

        Raises: BackendError: no pod started, or the pod was lost
        """
        if refused := self._settings.agent_rules.refusals(runner):
            raise BackendError("; ".join(refused))
        key = (spec.labels["run"], runner.model_dump_json())
        pod = self._with_room(key, runner)
        pod.used += 1
        if pod.ending is not None:
            pod.ending.cancel()
        try:
            assert pod.opening is not None
            address = await asyncio.shield(pod.opening)
            report = await _attempt(address, self._orders(spec, runner, pod), pod.lose)
            return ended_of(report, NAMES, contained=True)
        except (OSError, EOFError) as error:
            pod.lose()
            cause = await self._end_cause(pod.name) or str(error) or "no answer in time"
            raise BackendError(f"the shared pod {pod.name} is lost: {cause}") from error
        except (BackendError, Refused) as error:
            pod.lose()
            raise BackendError(f"the shared pod {pod.name} is lost: {error}") from error
        except ProgramError as error:
            raise BackendError(str(error)) from error
        finally:
            pod.used -= 1
            if pod.used == 0:
                seconds = 0.0 if pod.lost else UNUSED_SECONDS
                pod.ending = asyncio.get_running_loop().call_later(seconds, self._end, key, pod)

    async def close(self) -> None:
        """Deletes the pods. No attempt runs any more."""
        for key, pods in list(self._pods.items()):
            for pod in list(pods):
                self._end(key, pod)
        await asyncio.gather(*self._deletions)
        await self._states.close()
        await self._jobs.close()

    def _with_room(self, key: tuple[str, str], runner: KubernetesRunner) -> _Pod:
        pods = self._pods.setdefault(key, [])
        if (found := next((one for one in pods if one.has_room), None)) is not None:
            return found
        run = key[0]
        name = f"agents-{run}-{secrets.token_hex(4)}"
        made = _Pod(shared_job(name, run, runner, self._template, self._settings), runner)
        made.opening = asyncio.create_task(self._open(made))
        pods.append(made)
        return made

    def _end(self, key: tuple[str, str], pod: _Pod) -> None:
        """Deletes a pod that no attempt has."""
        if pod.ending is not None:
            pod.ending.cancel()
        self._pods[key].remove(pod)
        if not self._pods[key]:
            del self._pods[key]
        deletion = asyncio.create_task(self._delete(pod))
        self._deletions.add(deletion)
        deletion.add_done_callback(self._deletions.discard)

    async def _delete(self, pod: _Pod) -> None:
        assert pod.opening is not None
        pod.opening.cancel()
        await asyncio.gather(pod.opening, return_exceptions=True)
        try:
            async with asyncio.timeout(CLEAN_UP_SECONDS):
                await self._cluster.delete_job(pod.name)
        except (Refused, TimeoutError) as error:
            log.warning("shared pod not deleted, it ends without attempts", job=pod.name, cause=str(error))

    async def _open(self, pod: _Pod) -> str:
        """Returns the address of the pod's server. Raises: BackendError, Refused"""
        causes = [""]
        try:
            async with asyncio.timeout(self._settings.start_seconds):
                await self._create(pod, causes)
                address = await self._address(pod.name, causes)
                while not await _answers(address):
                    causes.append(f"nothing answers at {address}:{PORT}")
                return address
        except TimeoutError as error:
            raise BackendError(f"it did not start within {self._settings.start_seconds:g} s: {causes[-1]}") from error

    async def _create(self, pod: _Pod, causes: list[str]) -> None:
        while True:
            try:
                uid = await self._cluster.create_job(pod.job)
                break
            except Refused as error:
                if QUOTA not in str(error):
                    raise
                causes.append(str(error))
            await asyncio.sleep(JOB_POLL_SECONDS)
        await self._cluster.create_secret(secret_of(pod.name, uid, {TOKEN_KEY: pod.token}))

    async def _address(self, name: str, causes: list[str]) -> str:
        """Waits until the pod runs. Raises: BackendError: it never will"""
        podless = 0
        while True:
            status = (await self._states.next()).get(name)
            podless = 0 if status is not None else podless + 1
            if status is None and podless >= PODLESS_POLLS:
                job = (await self._jobs.next()).get(name)
                causes.append(job.trouble or "it has no pod" if job else "its Job was deleted")
                if job is None or job.over:
                    raise BackendError(causes[-1])
            if status is None:
                continue
            if status.is_over or status.hopeless:
                raise BackendError(_cause(status))
            if status.started_at is not None and status.address is not None:
                return status.address
            causes.append(status.waiting or causes[-1])

    async def _end_cause(self, name: str) -> str | None:
        """Says why a pod has ended; None where the API server does not show that it has."""
        with suppress(TimeoutError, Refused):
            async with asyncio.timeout(END_SECONDS):
                while True:
                    status = (await self._states.next()).get(name)
                    if status is not None and status.is_over:
                        return _cause(status)
        return None

    def _orders(self, spec: AttemptSpec, runner: KubernetesRunner, pod: _Pod) -> dict[str, Any]:
        first, *rest = spec.command
        plain = {name: value for name, value in spec.environment.items() if name not in runner.secrets}
        settings = self._settings
        return {
            "token": pod.token,
            "command": ["python3" if first == "{python}" else first, *rest],
            "environment": {**plain, **spec.secrets},
            "task": spec.task,
            "task_on_stdin": spec.task_on_stdin,
            "timeout_seconds": runner.timeout_seconds,
            "grace_seconds": settings.grace_seconds,
            "output_bytes": runner.output_bytes,
            "memory_bytes": pod.memory_share,
            "memory_poll_seconds": max(MEMORY_POLL_SECONDS, pod.slots / MEMORY_POLLS_A_SECOND),
            "max_open_files": settings.max_open_files,
            "max_file_bytes": settings.max_file_bytes,
            "max_processes": settings.max_processes,
        }

    async def _list_pods(self) -> dict[str, PodStatus]:
        statuses = [pod_status(pod, CONTAINER) for pod in await self._cluster.pods(self._selector)]
        return {status.job: status for status in statuses}


def _cause(status: PodStatus) -> str:
    """Why a pod that has ended did, or one that waits in vain."""
    if status.out_of_memory:
        return "out of memory: raise runner.resources.limits.memory, which all attempts of the pod share"
    known = status.start_error or status.evicted_for_limit or status.disrupted or status.waiting
    return known or "its server has ended"


async def _answers(address: str) -> bool:
    """Whether the server accepts a connection."""
    began = time.monotonic()
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(address, PORT)
    except OSError:
        await asyncio.sleep(max(0.0, 0.2 - (time.monotonic() - began)))
        return False
    writer.close()
    return True


async def _attempt(address: str, orders: dict[str, Any], lose: Callable[[], None]) -> PodReport:
    """Sends the orders of an attempt, and waits for its report. Cancelling ends the attempt, and waits for that.

    Args:   lose: called where the attempt may have left something in the pod
    Raises: OSError: no connection, or a broken one, also where the report is late; EOFError: no report
    """
    async with asyncio.timeout(CONNECT_SECONDS):
        reader, writer = await asyncio.open_connection(address, PORT)
    watch_peer(writer.get_extra_info("socket"))
    most = REPORT_BYTES + 4 * orders["output_bytes"]
    try:
        writer.write(json.dumps(orders).encode() + b"\n")
        async with asyncio.timeout(orders["timeout_seconds"] + orders["grace_seconds"] + SPARE_SECONDS):
            await writer.drain()
            report = _report(await _read(reader, most))
    except asyncio.CancelledError:
        writer.write_eof()
        try:
            async with asyncio.timeout(CLEAN_UP_SECONDS):
                _lose_after(_report(await _read(reader, most)), lose)
        except (OSError, EOFError) as error:
            lose()
            log.warning("the end of an agent is unknown, its pod ends it", cause=str(error))
        raise
    finally:
        writer.close()
    _lose_after(report, lose)
    return report


def _lose_after(report: PodReport, lose: Callable[[], None]) -> None:
    if not report["all_dead"] or report["left"] is not None:
        log.warning("a pod gets no more attempts: something of one is left", cause=report["left"] or "a process")
        lose()


async def _read(reader: asyncio.StreamReader, most: int) -> bytes:
    """The answer to its end. Raises: EOFError: it is longer than any report, as the image's own python may send it"""
    found = bytearray()
    while part := await reader.read(1 << 16):
        found += part
        if len(found) > most:
            raise EOFError(f"its answer has more than {most} bytes")
    return bytes(found)


def _report(answer: bytes) -> PodReport:
    """Raises: EOFError: the attempt ended without one"""
    try:
        found: dict[str, Any] = json.loads(answer)
    except ValueError as error:
        raise EOFError("the connection ended without a report") from error
    if "refused" in found:
        raise EOFError(str(found["refused"]))
    for name in ("stdout", "stderr", "reward_line"):
        found[name] = base64.b64decode(found[name])
    return cast("PodReport", found)
