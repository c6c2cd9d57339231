"""The Secret of one attempt: its key and its task."""

from __future__ import annotations

import json

from kubernetes_asyncio import client

from leyden.services.runner.backends.base import AttemptSpec

TASK_FILE = "task.json"


def attempt_secret(spec: AttemptSpec, job: str, job_uid: str) -> client.V1Secret:
    """Builds the Secret; Kubernetes deletes it with its Job."""
    owner = client.V1OwnerReference(api_version="batch/v1", kind="Job", name=job, uid=job_uid)
    return client.V1Secret(
        api_version="v1",
        kind="Secret",
        metadata=client.V1ObjectMeta(name=job, owner_references=[owner]),
        immutable=True,
        string_data={**spec.secrets, TASK_FILE: json.dumps(spec.task, ensure_ascii=False)},
    )
