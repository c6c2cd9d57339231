"""The Secrets of Jobs: an attempt's has its key and its task."""

from __future__ import annotations

import json
from collections.abc import Mapping

from kubernetes_asyncio import client

from leyden.services.runner.backends.base import AttemptSpec

TASK_FILE = "task.json"


def attempt_secret(spec: AttemptSpec, job: str, job_uid: str) -> client.V1Secret:
    """Builds the Secret of one attempt."""
    return secret_of(job, job_uid, {**spec.secrets, TASK_FILE: json.dumps(spec.task, ensure_ascii=False)})


def secret_of(job: str, job_uid: str, values: Mapping[str, str]) -> client.V1Secret:
    """Builds a Secret with the name of its Job; Kubernetes deletes it with the Job."""
    owner = client.V1OwnerReference(api_version="batch/v1", kind="Job", name=job, uid=job_uid)
    return client.V1Secret(
        api_version="v1",
        kind="Secret",
        metadata=client.V1ObjectMeta(name=job, owner_references=[owner]),
        immutable=True,
        string_data=dict(values),
    )
