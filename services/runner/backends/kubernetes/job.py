"""The Job of one attempt, from the operator's pod template and the run document."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kubernetes_asyncio import client

from leyden.libs.contracts.config import KubernetesRunner
from leyden.libs.kubernetes.jobs import fail_on_disruption
from leyden.libs.kubernetes.templates import ATTEMPT, COMPONENT, INSTANCE, ROLLOUT, RUN, completed, variables
from leyden.services.runner.backends.base import AttemptSpec
from leyden.services.runner.backends.kubernetes.secret import TASK_FILE

if TYPE_CHECKING:
    from leyden.services.runner.settings import Settings

CONTAINER = "agent"
TASK_FOLDER = "/var/run/leyden"
TASK_VOLUME = "leyden-task"
LEFTOVER_SECONDS = 600
"""A Job whose runner is gone stays for so long after its end."""


def job_name(spec: AttemptSpec) -> str:
    """The same for the same attempt, so that creating it twice finds the first one."""
    return name_of(spec.name)


def name_of(attempt: str) -> str:
    """The Job's name from the attempt's."""
    return "agent-" + attempt.replace(".", "-")


def agent_job(
    spec: AttemptSpec, runner: KubernetesRunner, template: client.V1PodTemplateSpec, settings: Settings
) -> client.V1Job:
    """Builds the Job: one pod, one try, since a retry is another attempt."""
    name, labels = job_name(spec), agent_labels(spec, settings)
    pod = _pod(spec, runner, template, labels)
    pod.spec.termination_grace_period_seconds = math.ceil(settings.grace_seconds)
    return client.V1Job(
        api_version="batch/v1",
        kind="Job",
        metadata=client.V1ObjectMeta(name=name, labels=labels),
        spec=client.V1JobSpec(
            backoff_limit=0,
            # For the case that no runner lives to stop it.
            active_deadline_seconds=math.ceil(
                settings.start_seconds + runner.timeout_seconds + 2 * settings.grace_seconds + settings.lease_seconds
            ),
            ttl_seconds_after_finished=LEFTOVER_SECONDS,
            pod_failure_policy=fail_on_disruption(),
            template=pod,
        ),
    )


def agent_labels(spec: AttemptSpec, settings: Settings) -> dict[str, str]:
    """The labels of an attempt's Job and pod."""
    ours = zip((RUN, ROLLOUT, ATTEMPT), ("run", "rollout", "attempt"), strict=True)
    return {
        INSTANCE: settings.release,
        COMPONENT: CONTAINER,
        **{label: spec.labels[name] for label, name in ours if name in spec.labels},
    }


def _pod(
    spec: AttemptSpec, runner: KubernetesRunner, template: client.V1PodTemplateSpec, labels: dict[str, str]
) -> client.V1PodTemplateSpec:
    name = job_name(spec)
    first, *rest = spec.command
    given = given_secrets(runner)
    secrets = [from_secret(key, name, key) for key in spec.secrets]
    plain = variables({**spec.environment, "LEYDEN_TASK_FILE": f"{TASK_FOLDER}/{TASK_FILE}"})
    environment = [*(one for one in plain if one.name not in runner.secrets), *given, *secrets]
    command = ["python" if first == "{python}" else first, *rest]
    if spec.task_on_stdin:
        # A pod has no stdin without a client that stays attached. The words of the command are arguments of the shell.
        command = ["/bin/sh", "-c", 'exec "$0" "$@" <"$LEYDEN_TASK_FILE"', *command]
    pod, agent = completed(template, CONTAINER, labels=labels, command=command, environment=environment)
    set_place(pod.spec, agent, runner)
    mount = client.V1VolumeMount(name=TASK_VOLUME, mount_path=TASK_FOLDER, read_only=True)
    mounts = [mount]
    if spec.task_file is not None:
        own = client.V1VolumeMount(name=TASK_VOLUME, mount_path=spec.task_file, sub_path=TASK_FILE, read_only=True)
        mounts.append(own)
    agent.volume_mounts = [*(agent.volume_mounts or []), *mounts]
    item = client.V1KeyToPath(key=TASK_FILE, path=TASK_FILE)
    volume = client.V1Volume(name=TASK_VOLUME, secret=client.V1SecretVolumeSource(secret_name=name, items=[item]))
    pod.spec.volumes = [*(pod.spec.volumes or []), volume]
    return pod


def set_place(pod: client.V1PodSpec, agent: client.V1Container, runner: KubernetesRunner) -> None:
    """Adds the run's image, resources and nodes to a pod."""
    agent.image = runner.image
    agent.resources = agent.resources or client.V1ResourceRequirements()
    agent.resources.requests = {**(agent.resources.requests or {}), **runner.resources.requests}
    agent.resources.limits = {**(agent.resources.limits or {}), **runner.resources.limits}
    pod.node_selector = {**(pod.node_selector or {}), **runner.node_selector}
    pod.tolerations = [*(pod.tolerations or []), *(_toleration(one) for one in runner.tolerations)]


def given_secrets(runner: KubernetesRunner) -> list[client.V1EnvVar]:
    """The variables whose values are in Secrets that the run names."""
    return [from_secret(variable, one.name, one.key) for variable, one in runner.secrets.items()]


def from_secret(variable: str, secret: str, key: str) -> client.V1EnvVar:
    """A variable with a key of a Secret."""
    reference = client.V1SecretKeySelector(name=secret, key=key)
    return client.V1EnvVar(name=variable, value_from=client.V1EnvVarSource(secret_key_ref=reference))


def _toleration(one: object) -> client.V1Toleration:
    return client.V1Toleration(**one.model_dump(exclude_none=True))  # type: ignore[attr-defined]
