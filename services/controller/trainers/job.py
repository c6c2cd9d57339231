"""The Indexed Job of one trainer, from the operator's pod template."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from kubernetes_asyncio import client

from leyden.libs.kubernetes.cluster import Object
from leyden.libs.kubernetes.jobs import fail_on_disruption
from leyden.libs.kubernetes.templates import ATTEMPT, COMPONENT, INSTANCE, RUN, completed, variables, verbatim
from leyden.services.controller.trainers.backend import TrainerAttempt
from leyden.services.controller.trainers.models import TrainerModels

if TYPE_CHECKING:
    from leyden.services.controller.settings import Settings

CONTAINER = "trainer"
LEFTOVER_SECONDS = 86_400
"""An ended Job stays for so long, with its log."""
DEFAULT_GRACE_SECONDS = 30
"""Kubernetes gives this to a pod whose template names none."""
PORT = 29_500
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
PROCESSES = "PET_NPROC_PER_NODE"
COUNTED = ("python", "-m", "leyden.libs.embedded.memory_kills")
"""Runs the trainer, and tells of each of its processes that the kernel killed for want of memory."""
WAIT = "wait-for-model"
"""The init container of the chart's pod template that waits until each line of MODEL_PATH is a model's folder."""
VARIABLE = "MODEL_PATH"
KUEUE = "kueue.x-k8s.io/"


def trainer_job(
    attempt: TrainerAttempt, models: TrainerModels, template: client.V1PodTemplateSpec, settings: Settings
) -> client.V1Job:
    """Builds the Job: its pods start together and fail together, since a retry is another attempt."""
    pods, labels = settings.trainer_pods, trainer_labels(attempt, settings)
    several = pods > 1 or _processes(template) not in {"", "1"}
    grace = template.spec.termination_grace_period_seconds or DEFAULT_GRACE_SECONDS
    environment = _rendezvous(attempt, settings, grace) if several else []
    command = _command(settings, attempt.run_id, several)
    pod, trainer = completed(template, CONTAINER, labels=labels, command=command, environment=environment)
    # The last lines of the log, in the pod's status.
    trainer.termination_message_policy = "FallbackToLogsOnError"
    _await_models(pod, models)
    pod.spec.subdomain = settings.trainer_service
    # Kueue admits Jobs, and finds the queue on them.
    queue = {name: value for name, value in pod.metadata.labels.items() if name.startswith(KUEUE)}
    return client.V1Job(
        api_version="batch/v1",
        kind="Job",
        metadata=client.V1ObjectMeta(name=attempt.name, labels={**queue, **labels}),
        spec=client.V1JobSpec(
            completion_mode="Indexed",
            completions=pods,
            parallelism=pods,
            backoff_limit=0,
            ttl_seconds_after_finished=LEFTOVER_SECONDS,
            pod_failure_policy=fail_on_disruption(),
            template=pod,
        ),
    )


def trainer_labels(attempt: TrainerAttempt, settings: Settings) -> dict[str, str]:
    """The labels of a trainer's Job and pods."""
    return {
        INSTANCE: settings.release,
        COMPONENT: CONTAINER,
        RUN: attempt.run_id,
        ATTEMPT: str(attempt.number),
    }


def awaited(pod: Object) -> str | None:
    """The folders for which a pod's init container waits, in words for users; None for a pod without such a wait."""
    containers = pod.get("spec", {}).get("initContainers", [])
    variables = [one for container in containers if container["name"] == WAIT for one in container.get("env", [])]
    folders = [str(one.get("value", "")).splitlines() for one in variables if one["name"] == VARIABLE]
    return f"there is no model yet in {' or '.join(folders[0])}" if folders else None


def _processes(template: client.V1PodTemplateSpec) -> str:
    """The processes of a pod, as the template gives them to `torchrun`; empty where it does not."""
    trainer = next(one for one in template.spec.containers if one.name == CONTAINER)
    return next((one.value or "" for one in trainer.env or [] if one.name == PROCESSES), "")


def _command(settings: Settings, run_id: str, several: bool) -> list[str]:
    first, *rest = settings.trainer_command
    if first not in {sys.executable, "python"}:
        return [first, *rest, "--run-id", run_id]
    # The controller's own interpreter is not that of the trainer's image.
    return [*COUNTED, "torchrun" if several else "python", *rest, "--run-id", run_id]


def _rendezvous(attempt: TrainerAttempt, settings: Settings, grace_seconds: int) -> list[client.V1EnvVar]:
    """The variables by which `torchrun` joins the trainer's pods, and lets them finish within their grace period."""
    index = client.V1EnvVarSource(field_ref=client.V1ObjectFieldSelector(field_path=INDEX))
    return [
        *variables(
            {
                "PET_NNODES": str(settings.trainer_pods),
                "PET_MASTER_ADDR": f"{attempt.name}-0.{settings.trainer_service}",
                "PET_MASTER_PORT": str(PORT),
                "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(max(5, grace_seconds - 10)),
            }
        ),
        client.V1EnvVar(name="PET_NODE_RANK", value_from=index),
    ]


def _await_models(pod: client.V1PodTemplateSpec, models: TrainerModels) -> None:
    """Makes the init container of a trainer's pod wait for the trainer's own models, in place of the base model."""
    for container in pod.spec.init_containers or []:
        for variable in container.env or []:
            if container.name == WAIT and variable.name == VARIABLE:
                own = variable.value if models.base is None else verbatim(models.base)
                variable.value = "\n".join([own, *map(verbatim, models.more)])
