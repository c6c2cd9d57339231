"""The Job of a pod that many attempts of one run share."""

from __future__ import annotations

import math

from kubernetes_asyncio import client

from leyden.libs.contracts.config import KubernetesRunner
from leyden.libs.kubernetes.jobs import fail_on_disruption
from leyden.libs.kubernetes.templates import COMPONENT, INSTANCE, RUN, completed, variables
from leyden.libs.sandbox import pod_server
from leyden.services.runner.backends.kubernetes.job import (
    CONTAINER,
    LEFTOVER_SECONDS,
    from_secret,
    given_secrets,
    set_place,
)
from leyden.services.runner.settings import Settings

SHARED = "agents"
"""The component of shared pods; that of an attempt's own pod is another."""
PROGRAM_FOLDER = "/opt/leyden-server"
"""The chart's init container copies the server into this volume."""
IDLE_SECONDS = 60.0
"""A pod ends by itself after so long without a connection, as where its runner is gone."""
OPEN_SECONDS = 3600.0
"""A pod gets new attempts for so long, and its Job's time limit comes after the last one's."""
SPARE_SECONDS = 60.0
"""An attempt's end takes no longer after its time limit: its processes are killed and its files removed."""
TOKEN_KEY = "token"  # noqa: S105  # a key of the Secret


def shared_job(
    name: str, run: str, runner: KubernetesRunner, template: client.V1PodTemplateSpec, settings: Settings
) -> client.V1Job:
    """Builds the Job. Args: run: the run's id"""
    labels = {INSTANCE: settings.release, COMPONENT: SHARED, RUN: run}
    command = ["python3", "-I", "-S", "-c", pod_server.START, PROGRAM_FOLDER]
    bounds = {pod_server.ATTEMPTS: str(runner.attempts_per_pod), pod_server.IDLE_SECONDS: f"{IDLE_SECONDS:g}"}
    environment = [*given_secrets(runner), *variables(bounds), from_secret(pod_server.TOKEN, name, TOKEN_KEY)]
    pod, agent = completed(template, CONTAINER, labels=labels, command=command, environment=environment)
    pod.spec.termination_grace_period_seconds = math.ceil(settings.grace_seconds)
    set_place(pod.spec, agent, runner)
    return client.V1Job(
        api_version="batch/v1",
        kind="Job",
        metadata=client.V1ObjectMeta(name=name, labels=labels),
        spec=client.V1JobSpec(
            backoff_limit=0,
            # Without its runner a pod that has not started would wait for its Secret for ever.
            active_deadline_seconds=math.ceil(
                settings.start_seconds
                + OPEN_SECONDS
                + runner.timeout_seconds
                + 2 * SPARE_SECONDS
                + 2 * settings.grace_seconds
            ),
            ttl_seconds_after_finished=LEFTOVER_SECONDS,
            pod_failure_policy=fail_on_disruption(),
            template=pod,
        ),
    )


def memory_limit(job: client.V1Job) -> str | None:
    """The memory that the pod may use, as Kubernetes writes quantities; None for no limit."""
    agent = next(one for one in job.spec.template.spec.containers if one.name == CONTAINER)
    found: str | None = (agent.resources.limits or {}).get("memory")
    return found
