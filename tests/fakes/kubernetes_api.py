"""A Kubernetes API server in memory, over HTTP: it checks objects against Kubernetes' schemas, and runs nothing.

A test is the cluster: it makes pods for Jobs, and sets their statuses.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import kubernetes_validate
from aiohttp import web
from kubernetes_asyncio import client

from leyden.libs.kubernetes.cluster import Cluster

VERSION = "1.34"
CHECKED = 10
Object = dict[str, Any]


class FakeKubernetes:
    """The objects of one namespace by kind and name.

    Attributes: refuse: answers a POST or PATCH with a status and a message instead; down: the number of requests that
    get the answer `outage`; holds: no deletion ends, as that of a pod whose node is away; requests: counted by method
    and kind.
    """

    def __init__(self) -> None:
        kinds = ("jobs", "pods", "secrets", "events", "endpointslices", "roles")
        self.objects: dict[str, dict[str, Object]] = {kind: {} for kind in kinds}
        self.logs: dict[str, bytes] = {}
        self.requests: Counter[str] = Counter()
        self.deleted: list[str] = []
        self.down = 0
        self.holds = False
        self.outage = 503, "the server is starting"
        self.refuse: Callable[[str, Object], tuple[int, str] | None] = lambda kind, body: None
        self.on_job: Callable[[Object], None] = lambda job: None
        self.port = 0

    def pod(self, job: str, index: int | None = None, **status: Any) -> Object:
        """Makes the pod of a Job, or changes its status."""
        name = f"{job}-{'x7k2p' if index is None else f'{index}-x7k2p'}"
        template = self.objects["jobs"][job]["spec"]["template"]
        labels = {**template["metadata"]["labels"], "batch.kubernetes.io/job-name": job}
        if index is not None:
            labels["batch.kubernetes.io/job-completion-index"] = str(index)
        made = self.objects["pods"].setdefault(
            name, {"metadata": {"name": name, "labels": labels}, "spec": {}, "status": {}}
        )
        made["status"] |= status
        return made

    def running(
        self, job: str, index: int | None = None, container: str = "agent", *, ago: float = 0.0, ahead: float = 0.0
    ) -> Object:
        """Starts the Job's pod now, or so many seconds ago, on a node whose clock is so many seconds ahead."""
        bound = datetime.now(UTC) - timedelta(seconds=ago)
        by_node = _stamp(bound + timedelta(seconds=ahead))
        state = {"running": {"startedAt": by_node}}
        scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": _stamp(bound)}
        statuses = [{"name": container, "state": state}]
        return self.pod(
            job, index, phase="Running", startTime=by_node, conditions=[scheduled], containerStatuses=statuses
        )

    def ended(self, job: str, code: int, index: int | None = None, container: str = "agent", **details: Any) -> Object:
        """Ends the container of the Job's pod."""
        state = {
            "terminated": {
                "exitCode": code,
                "startedAt": "2026-11-22T12:00:00Z",
                "finishedAt": "2026-11-22T12:00:07Z",
                **details,
            }
        }
        phase = "Failed" if code else "Succeeded"
        return self.pod(job, index, phase=phase, containerStatuses=[{"name": container, "state": state}])

    def finish_job(self, job: str, kind: str, **condition: Any) -> None:
        """Sets the Job's last condition: Complete or Failed."""
        self.objects["jobs"][job]["status"] = {"conditions": [{"type": kind, "status": "True", **condition}]}

    def cluster(self, owner_role: str | None = None) -> Cluster:
        """A client of this server."""
        api = client.ApiClient(client.Configuration(host=f"http://127.0.0.1:{self.port}"))
        return Cluster(api, "rollouts", owner_role)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[FakeKubernetes]:
        """Listens on a free port."""
        app = web.Application(middlewares=[self._outage])
        groups = {"jobs": "batch/v1", "endpointslices": "discovery.k8s.io/v1", "roles": "rbac.authorization.k8s.io/v1"}
        for kind, group in groups.items():
            self._add_routes(app, f"/apis/{group}/namespaces/rollouts/{kind}", kind)
        for kind in ("pods", "secrets", "events"):
            self._add_routes(app, f"/api/v1/namespaces/rollouts/{kind}", kind)
        app.router.add_get("/api/v1/namespaces/rollouts/pods/{name}/log", self._log)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.port = runner.addresses[0][1]
        yield self
        await runner.cleanup()

    def _add_routes(self, app: web.Application, path: str, kind: str) -> None:
        async def create(request: web.Request) -> web.Response:
            body = await request.json()
            # A check costs 0.1 s; hundreds of attempts differ in names alone.
            if len(self.objects[kind]) < CHECKED:
                kubernetes_validate.validate(body, VERSION, strict=True)
            name = body["metadata"]["name"]
            # Admission comes before the store.
            refusal = self.refuse(kind, body)
            if refusal is None and name in self.objects[kind]:
                refusal = 409, f'{kind} "{name}" already exists'
            if refusal is not None:
                return _refusal(*refusal)
            body["metadata"]["uid"] = str(uuid.uuid4())
            if "dryRun" not in request.query:
                self.objects[kind][name] = body
                if kind == "jobs":
                    self.on_job(body)
            return web.json_response(body, status=201)

        async def get(request: web.Request) -> web.Response:
            found = self.objects[kind].get(request.match_info["name"])
            return _missing(request) if found is None else web.json_response(found)

        async def patch(request: web.Request) -> web.Response:
            found = self.objects[kind].get(request.match_info["name"])
            if found is None:
                return _missing(request)
            body = await request.json()
            assert body.keys() == {"metadata"}
            assert body["metadata"].keys() == {"annotations"}
            refusal = self.refuse(kind, body)
            if refusal is not None:
                return _refusal(*refusal)
            found["metadata"].setdefault("annotations", {}).update(body["metadata"]["annotations"])
            return web.json_response(found)

        async def delete(request: web.Request) -> web.Response:
            name = request.match_info["name"]
            if name not in self.objects[kind]:
                return _missing(request)
            self.deleted.append(name)
            pods = [one for one in self.objects["pods"] if one.startswith(f"{name}-")]
            for of_kind, one in ((kind, name), *(("pods", pod) for pod in pods)):
                self.objects[of_kind][one]["metadata"]["deletionTimestamp"] = _stamp(datetime.now(UTC))
                if not self.holds:
                    del self.objects[of_kind][one]
            return web.json_response({"kind": "Status", "status": "Success"})

        async def list_all(request: web.Request) -> web.Response:
            selector = request.query.get("labelSelector", "")
            wanted = dict(part.split("=") for part in selector.split(",") if part)
            found = [one for one in self.objects[kind].values() if wanted.items() <= one["metadata"]["labels"].items()]
            return web.json_response({"kind": "List", "metadata": {"resourceVersion": "1"}, "items": found})

        app.router.add_post(path, create)
        app.router.add_get(path, list_all)
        app.router.add_get(f"{path}/{{name}}", get)
        app.router.add_patch(f"{path}/{{name}}", patch)
        app.router.add_delete(f"{path}/{{name}}", delete)

    async def _log(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        return web.Response(body=self.logs[name]) if name in self.logs else _missing(request)

    @web.middleware
    async def _outage(self, request: web.Request, handler: Callable[..., Any]) -> web.StreamResponse:
        kind = request.path.partition("/namespaces/rollouts/")[2].split("/")
        self.requests[f"{request.method} {kind[-1] if len(kind) == 3 else kind[0]}"] += 1
        if self.down:
            self.down -= 1
            return _refusal(*self.outage)
        try:
            answer: web.StreamResponse = await handler(request)
        except kubernetes_validate.ValidationError as error:
            return _refusal(422, f"{error.message} at {list(error.path)}")
        return answer


def _stamp(when: datetime) -> str:
    return when.strftime("%Y-%m-%dT%H:%M:%SZ")


def _missing(request: web.Request) -> web.Response:
    return _refusal(404, f"{request.path} not found")


def _refusal(status: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "status": "Failure", "message": message, "code": status}, status=status)
