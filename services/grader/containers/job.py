"""The Job of one grading by a container, and the Secret with the attempt's files."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping

from kubernetes_asyncio import client

from leyden.libs.contracts.config.graders import Container
from leyden.libs.kubernetes.jobs import fail_on_disruption
from leyden.libs.kubernetes.templates import (
    ATTEMPT,
    COMPONENT,
    INSTANCE,
    ROLLOUT,
    RUN,
    completed,
    variables,
    verbatim,
)
from leyden.libs.service.errors import Misconfigured
from leyden.services.grader.containers import pod as inside
from leyden.services.grader.containers.verification import Verification

COLLECT = "collect"
"""The pod's container: it begins once the verifier has ended, however it did."""
VERIFIER = "verifier"
UNPACK = "unpack"
NETWORK = "leyden.dev/network"
"""The label of pods that may open connections."""
WRAPPED = f'"$0" "$@"; echo $? >{inside.VERIFIER}/{inside.EXIT}'
LEFTOVER_SECONDS = 600
"""A Job whose grader is gone stays for so long after its end."""
COLLECT_SECONDS = 120.0
"""The longest time from the verifier's end to that of `collect`, whose image the node has."""
SPARE_SECONDS = 60


def verifier_job(
    one: Verification,
    grader: Container,
    template: client.V1PodTemplateSpec,
    *,
    secret: str,
    release: str,
    start_seconds: float,
) -> client.V1Job:
    """Builds the Job: one pod, one try, since a retry is another Job. It ends by itself where no grader lives to see.

    Args:   secret: the name of the Secret for which its pod waits
    Raises: Misconfigured: the template lacks a container
    """
    key = one.attempt
    labels = {
        INSTANCE: release,
        COMPONENT: VERIFIER,
        RUN: one.run,
        ROLLOUT: key.rollout_id,
        ATTEMPT: str(key.attempt),
        **({NETWORK: "true"} if grader.network else {}),
    }
    command = ["python", "-m", inside.__name__, "collect"]
    made, collect = completed(template, COLLECT, labels=labels, command=command, environment=[])
    by_name = {container.name: container for container in made.spec.init_containers or ()}
    if not {UNPACK, VERIFIER} <= set(by_name):
        raise Misconfigured(f"the pod of container graders needs init containers {UNPACK!r} and {VERIFIER!r}")
    unpack, verifier = by_name[UNPACK], by_name[VERIFIER]
    unpack.command = ["python", "-m", inside.__name__, "unpack"]
    verifier.image = grader.image
    verifier.command = ["/bin/sh", "-c", WRAPPED, *map(verbatim, grader.command)]
    verifier.env = [*(verifier.env or []), *variables({"LEYDEN_TASK_FILE": f"{inside.AGENT}/task.json"})]
    verifier.resources = verifier.resources or client.V1ResourceRequirements()
    verifier.resources.requests = {**(verifier.resources.requests or {}), **grader.resources.requests}
    verifier.resources.limits = {**(verifier.resources.limits or {}), **grader.resources.limits}
    _mount(made.spec, secret, unpack, verifier, collect)
    return client.V1Job(
        api_version="batch/v1",
        kind="Job",
        metadata=client.V1ObjectMeta(name=one.name, labels=labels),
        spec=client.V1JobSpec(
            backoff_limit=0,
            active_deadline_seconds=math.ceil(start_seconds + grader.timeout_seconds + COLLECT_SECONDS + SPARE_SECONDS),
            ttl_seconds_after_finished=LEFTOVER_SECONDS,
            pod_failure_policy=fail_on_disruption(),
            template=made,
        ),
    )


def _mount(
    spec: client.V1PodSpec,
    secret: str,
    unpack: client.V1Container,
    verifier: client.V1Container,
    collect: client.V1Container,
) -> None:
    """Adds the folders. The verdict's begins empty, whatever the image holds there."""
    files, agent, verdict = "leyden-attempt", "leyden-agent-logs", "leyden-verdict"
    spec.volumes = [
        *(spec.volumes or []),
        client.V1Volume(name=files, secret=client.V1SecretVolumeSource(secret_name=secret)),
        client.V1Volume(name=agent, empty_dir=client.V1EmptyDirVolumeSource(size_limit="256Mi")),
        client.V1Volume(name=verdict, empty_dir=client.V1EmptyDirVolumeSource(size_limit="64Mi")),
    ]

    def add(container: client.V1Container, volume: str, path: str, *, read_only: bool = False) -> None:
        mount = client.V1VolumeMount(name=volume, mount_path=path, read_only=read_only)
        container.volume_mounts = [*(container.volume_mounts or []), mount]

    add(unpack, files, str(inside.ATTEMPT.parent), read_only=True)
    add(unpack, agent, str(inside.AGENT))
    add(unpack, verdict, str(inside.VERIFIER))
    add(verifier, agent, str(inside.AGENT), read_only=True)
    add(verifier, verdict, str(inside.VERIFIER))
    add(collect, verdict, str(inside.VERIFIER), read_only=True)


def secret_of(job: Mapping[str, object]) -> str:
    """The name of the Secret for which a Job's pod waits, from the Job as JSON."""
    spec: dict = job["spec"]["template"]["spec"]  # type: ignore[index, type-arg]
    return next(str(one["secret"]["secretName"]) for one in spec["volumes"] if one["name"] == "leyden-attempt")


def attempt_secret(name: str, job: str, job_uid: str, content: bytes) -> client.V1Secret:
    """Builds the Secret; Kubernetes deletes it with its Job."""
    owner = client.V1OwnerReference(api_version="batch/v1", kind="Job", name=job, uid=job_uid)
    return client.V1Secret(
        api_version="v1",
        kind="Secret",
        metadata=client.V1ObjectMeta(name=name, owner_references=[owner]),
        immutable=True,
        data={inside.ATTEMPT.name: base64.b64encode(content).decode()},
    )
