"""One namespace of a Kubernetes cluster. Every call is repeated while the API server does not answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import orjson
from kubernetes_asyncio import client
from kubernetes_asyncio.config import ConfigException, load_incluster_config, load_kube_config

from leyden.libs.kubernetes.templates import load_template
from leyden.libs.service.errors import Misconfigured
from leyden.libs.telemetry import RateLimitedLogger, logger

log = logger()
limited_log = RateLimitedLogger(log)

REQUEST_SECONDS = 30.0
FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 5.0
RETRIED = frozenset({408, 429, 500, 502, 503, 504})
"""Answers of an API server that is overloaded or starting."""

NO_RIGHTS = "is forbidden: User "
"""A part of the refusal of a caller without rights. Those of admission, as for a quota, name an object."""
LOG_GONE = b"unable to retrieve container logs for "

Object = dict[str, Any]
"""A Kubernetes object as JSON. Why: parsing 500 pods into the client's models costs a second of CPU, JSON 10 ms."""
T = TypeVar("T")


class Refused(Exception):
    """The API server refused a request, and repeating it will not help; the message says why."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status

    @property
    def lacks_rights(self) -> bool:
        """Whether the API server does not know the caller, or its rights: for a while after it started, so does one
        that has not read its Roles yet."""
        return self.status == 401 or (self.status == 403 and NO_RIGHTS in str(self))


async def connect() -> client.ApiClient:
    """A client with the credentials of this pod, or of the current kubectl context.

    Raises: Misconfigured: there are none
    """
    configuration = client.Configuration()
    try:
        load_incluster_config(client_configuration=configuration)
    except ConfigException:
        try:
            await load_kube_config(client_configuration=configuration)
        except ConfigException as error:
            remedy = "run in a pod with a service account, or set KUBECONFIG"
            raise Misconfigured(f"no Kubernetes cluster: {remedy} ({error})") from error
    return client.ApiClient(configuration)


class Cluster:
    """The Jobs, pods and Secrets of one namespace.

    Every method raises `Refused`, and waits while the API server is away.

    Args: owner_role: a Role of the namespace; Kubernetes deletes the Jobs created here with it; patience_seconds: a
        call is repeated for so long while the API server says that it lacks rights
    """

    def __init__(
        self, api: client.ApiClient, namespace: str, owner_role: str | None = None, patience_seconds: float = 0.0
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._owner_role = owner_role
        self._patience_seconds = patience_seconds
        self._batch = client.BatchV1Api(api)
        self._core = client.CoreV1Api(api)
        self._discovery = client.DiscoveryV1Api(api)
        self._access = client.RbacAuthorizationV1Api(api)

    def patient(self, seconds: float) -> Cluster:
        """The same namespace by the same connections, with other patience."""
        return Cluster(self._api, self._namespace, self._owner_role, seconds)

    def template(self, path: Path, container: str) -> client.V1PodTemplateSpec:
        """Reads a pod template. Raises: Misconfigured: see `load_template`"""
        return load_template(self._api, path, container)

    async def create_job(self, job: client.V1Job, *, dry_run: bool = False) -> str:
        """Creates a Job, or adopts the one that has its name; returns its uid."""
        options = {"dry_run": "All"} if dry_run else {}
        if self._owner_role is not None:
            job.metadata.owner_references = [await self._owner(self._owner_role)]
        try:
            made = await self._json(self._batch.create_namespaced_job, job, **options)
        except Refused as error:
            if error.status != 409:
                raise
            made = await self._json(self._batch.read_namespaced_job, name=job.metadata.name)
        return str(made["metadata"]["uid"])

    async def _owner(self, role: str) -> client.V1OwnerReference:
        # Read for each Job: Kubernetes deletes at once what a Role owns that was replaced.
        found = await self._json(self._access.read_namespaced_role, name=role)
        uid = found["metadata"]["uid"]
        return client.V1OwnerReference(api_version="rbac.authorization.k8s.io/v1", kind="Role", name=role, uid=uid)

    async def create_secret(self, secret: client.V1Secret) -> None:
        """Creates a Secret. One that has its name already stays as it is."""
        try:
            await self._json(self._core.create_namespaced_secret, secret)
        except Refused as error:
            if error.status != 409:
                raise

    async def delete_job(self, name: str) -> None:
        """Deletes a Job after its pods; none by that name is fine."""
        with suppress_missing():
            await self._json(self._batch.delete_namespaced_job, name=name, propagation_policy="Foreground")

    async def job(self, name: str) -> Object | None:
        """Returns a Job; None where there is none."""
        with suppress_missing():
            return await self._json(self._batch.read_namespaced_job, name=name)
        return None

    async def annotate_job(self, name: str, annotations: dict[str, str]) -> None:
        """Adds annotations to a Job; none by that name is fine."""
        with suppress_missing():
            patch = {"metadata": {"annotations": annotations}}
            await self._json(self._batch.patch_namespaced_job, patch, name=name)

    async def time(self, job: str) -> datetime | None:
        """The API server's own time, from its answer about a Job; None where it sends none, or the Job is gone."""

        async def ask() -> datetime | None:
            async with await self._answer(self._batch.read_namespaced_job, name=job) as answer:
                date = answer.headers.get("Date")
            return None if date is None else parsedate_to_datetime(date)

        with suppress_missing():
            return await retried(ask, self._patience_seconds)
        return None

    async def jobs(self, selector: str) -> list[Object]:
        """Lists Jobs by labels."""
        return await self._items(self._batch.list_namespaced_job, label_selector=selector)

    async def pods(self, selector: str) -> list[Object]:
        """Lists pods by labels, from the API server's cache: perhaps a moment old, at no cost to etcd."""
        return await self._items(self._core.list_namespaced_pod, label_selector=selector, resource_version="0")

    async def events(self, selector: str) -> list[Object]:
        """Lists events by fields, such as `reason=FailedCreate`."""
        return await self._items(self._core.list_namespaced_event, field_selector=selector)

    async def endpoint_slices(self, service: str) -> list[Object]:
        """Lists the EndpointSlices of a Service."""
        selector = f"kubernetes.io/service-name={service}"
        return await self._items(self._discovery.list_namespaced_endpoint_slice, label_selector=selector)

    async def read_log(self, pod: str, container: str, begin: Callable[[], Callable[[bytes], object]]) -> None:
        """Reads a container's log, stdout and stderr mixed: all that its node holds.

        Args:   begin: returns the function that takes the log in chunks; a try again begins anew
        Raises: Refused: also where the log is gone
        """

        async def read() -> None:
            add, is_first = begin(), True
            async with await self._answer(self._core.read_namespaced_pod_log, name=pod, container=container) as answer:
                async for chunk in answer.content.iter_chunked(1 << 16):
                    # The kubelet answers 200 with this sentence when the container was removed.
                    if is_first and chunk.startswith(LOG_GONE):
                        raise Refused(chunk.decode(), 404)
                    is_first = False
                    add(chunk)

        await retried(read, self._patience_seconds)

    async def close(self) -> None:
        """Closes the connections."""
        await self._api.close()

    async def _items(self, operation: Callable[..., Awaitable[Any]], **options: Any) -> list[Object]:
        return list((await self._json(operation, **options))["items"])

    async def _json(self, operation: Callable[..., Awaitable[Any]], *arguments: Any, **options: Any) -> Object:
        async def ask() -> Object:
            async with await self._answer(operation, *arguments, **options) as answer:
                parsed: Object = orjson.loads(await answer.read())
            return parsed

        return await retried(ask, self._patience_seconds)

    async def _answer(
        self, operation: Callable[..., Awaitable[Any]], *arguments: Any, **options: Any
    ) -> aiohttp.ClientResponse:
        body = {"body": arguments[0]} if arguments else {}
        options |= {
            "namespace": self._namespace,
            "_request_timeout": REQUEST_SECONDS,
            "_preload_content": False,
            **body,
        }
        answer: aiohttp.ClientResponse = await operation(**options)
        if answer.status >= 300:
            async with answer:
                raise Refused(_message(await answer.read()) or f"{answer.status} {answer.reason}", answer.status)
        return answer


async def retried(call: Callable[[], Awaitable[T]], patience_seconds: float = 0.0) -> T:
    """Repeats a call until the API server answers it, and for a while where it says that the caller lacks rights.

    Raises: Refused
    """
    seconds = FIRST_PAUSE_SECONDS
    patient_until: float | None = None
    while True:
        try:
            return await call()
        except Refused as refused:
            if refused.lacks_rights:
                patient_until = patient_until or time.monotonic() + patience_seconds
            is_patient = refused.lacks_rights and time.monotonic() < (patient_until or 0.0)
            if refused.status not in RETRIED and not is_patient:
                raise
            cause = str(refused)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            cause = f"{type(error).__name__}: {error}"
        limited_log.warning("the Kubernetes API does not answer", cause=cause)
        await asyncio.sleep(seconds)
        seconds = min(LONGEST_PAUSE_SECONDS, seconds * 2)


def _message(body: bytes) -> str:
    """The sentence of a refusal: the API server's own, which names the object and the cause."""
    with suppress(ValueError, KeyError, TypeError):
        return str(orjson.loads(body)["message"])
    return ""


@contextmanager
def suppress_missing() -> Iterator[None]:
    """Suppresses the refusal of a request for an object that does not exist."""
    try:
        yield
    except Refused as error:
        if error.status != 404:
            raise
