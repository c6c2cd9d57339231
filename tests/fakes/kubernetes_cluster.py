"""An API server for kubectl: it answers paths with the objects of a test, and runs nothing.

The real kubectl speaks to it over HTTP. It cannot forward ports, which SPDY would need: `write_kubectl` makes a
stand-in that carries bytes to a local server instead, and passes all else to the real one.
"""

from __future__ import annotations

import json
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from leyden.libs.cli.cluster.doctor import KINDS
from tests.support.tools import KUBECTL

Object = dict[str, Any]
V1 = {"kind": "APIResourceList", "groupVersion": "v1", "resources": []}
LISTS = {"deployments", "pods", "events", "persistentvolumeclaims", "nodes", "storageclasses", "daemonsets"}
PODS = {"name": "pods", "singularName": "pod", "namespaced": True, "kind": "Pod", "verbs": ["get", "list"]}


class FakeCluster:
    """Attributes: objects: lists of items, and single objects, by path; denied: resources that nobody may create;
    incomplete: the authorizer may grant more than it lists; forbidden: paths that get 403; logs: by pod."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {
            "/version": {"major": "1", "minor": "34", "gitVersion": "v1.34.4"},
            "/api": {"kind": "APIVersions", "versions": ["v1"]},
            "/api/v1": V1 | {"resources": [PODS]},
            "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
        }
        self.denied: set[str] = set()
        self.incomplete = False
        self.forbidden: set[str] = set()
        self.logs: dict[str, str] = {}
        self.url = ""

    @contextmanager
    def serving(self) -> Iterator[FakeCluster]:
        """Listens on a free port."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def write_kubeconfig(self, path: Path, namespace: str = "default") -> Path:
        """Writes a kubeconfig with one context, `trial`."""
        context = {"cluster": "trial", "user": "me", "namespace": namespace}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "trial",
            "clusters": [{"name": "trial", "cluster": {"server": self.url}}],
            "users": [{"name": "me", "user": {}}],
            "contexts": [{"name": "trial", "context": context}],
        }
        path.write_text(yaml.safe_dump(document))
        return path

    def answer(self, path: str, query: dict[str, list[str]]) -> tuple[int, Any]:
        """Status and body of a GET."""
        if path in self.forbidden:
            return 403, _status(403, "Forbidden", f'{path} is forbidden: User "me" cannot read it')
        if path.endswith("/log"):
            return 200, self.logs.get(path.split("/")[-2], "")
        if path not in self.objects and path.rsplit("/", 1)[1] in LISTS:
            return 200, {"items": []}
        if path not in self.objects:
            return 404, _status(404, "NotFound", "the server could not find the requested resource")
        found = self.objects[path]
        if not isinstance(found, list):
            return 200, found
        wanted = dict(part.split("=") for part in query.get("labelSelector", [""])[0].split(",") if part)
        items = [one for one in found if wanted.items() <= one["metadata"].get("labels", {}).items()]
        return 200, {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items}

    def review(self, body: Object) -> Object:
        """A review of the caller's rights with its answer."""
        if body["kind"] == "SelfSubjectRulesReview":
            granted = sorted({kind for kinds in KINDS.values() for kind in kinds.split()} - self.denied)
            rule = {"verbs": ["*"], "apiGroups": ["*"], "resources": granted}
            return body | {"status": {"resourceRules": [rule], "incomplete": self.incomplete}}
        return body | {"status": {"allowed": body["spec"]["resourceAttributes"]["resource"] not in self.denied}}


def _handler(cluster: FakeCluster) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            address = urlsplit(self.path)
            self._send(*cluster.answer(address.path, parse_qs(address.query)))

        def do_POST(self) -> None:
            # kubectl sends a body of chunks.
            content = b""
            while size := int(self.rfile.readline(), 16):
                content += self.rfile.read(size)
                self.rfile.readline()
            self._send(201, cluster.review(json.loads(content)))

        def _send(self, status: int, body: Any) -> None:
            text = body if isinstance(body, str) else json.dumps(body)
            self.send_response(status)
            self.send_header("content-type", "text/plain" if isinstance(body, str) else "application/json")
            self.send_header("content-length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    return Handler


def _status(code: int, reason: str, message: str) -> Object:
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
    return status | {"reason": reason, "message": message, "code": code}


def write_kubectl(folder: Path, ports: dict[str, int]) -> Path:
    """Writes a kubectl that forwards ports to local ones.

    Args: ports: local ports by target, such as `service/leyden-api`
    """
    path = folder / "kubectl"
    path.write_text(f"#!{sys.executable} -P\nREAL, PORTS = {str(KUBECTL)!r}, {ports!r}\n{_STAND_IN}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


_STAND_IN = """
import os, socket, sys, threading
words = sys.argv[1:]
if "port-forward" not in words:
    os.execv(REAL, [REAL, *words])
target, ports = words[-2:]
if target not in PORTS:
    sys.exit(f"Error from server (NotFound): {target} not found")
local = int(ports.partition(":")[0])
def carry(source, sink):
    try:
        while chunk := source.recv(65536):
            sink.sendall(chunk)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        pass
server = socket.create_server(("127.0.0.1", local))
print(f"Forwarding from 127.0.0.1:{local} -> {ports.partition(':')[2]}", flush=True)
while True:
    client, _ = server.accept()
    upstream = socket.create_connection(("127.0.0.1", PORTS[target]))
    for pair in ((client, upstream), (upstream, client)):
        threading.Thread(target=carry, args=pair, daemon=True).start()
"""


def deployment(namespace: str, release: str, component: str, env: list[Object]) -> Object:
    """A Deployment of the chart, as far as the command reads it."""
    labels = {"app.kubernetes.io/name": "leyden", "app.kubernetes.io/instance": release}
    labels["app.kubernetes.io/component"] = component
    containers = [{"name": component, "env": env}]
    return {
        "metadata": {"name": f"{release}-{component}", "namespace": namespace, "labels": labels},
        "spec": {"template": {"spec": {"containers": containers}}},
    }


def pod(namespace: str, release: str, component: str, name: str = "", **status: Any) -> Object:
    """A pod of the chart; ready unless its status says something else."""
    labels = {"app.kubernetes.io/instance": release, "app.kubernetes.io/component": component}
    running = {"name": component, "state": {"running": {}}}
    ready = {"conditions": [{"type": "Ready", "status": "True"}], "containerStatuses": [running]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name or f"{release}-{component}-0", "namespace": namespace, "labels": labels},
        "spec": {"nodeName": "node-1", "containers": [{"name": component}]},
        "status": {"phase": "Running", **(status or ready)},
    }


def release(cluster: FakeCluster, namespace: str = "platform", name: str = "leyden") -> list[Object]:
    """Adds a release and returns the list of its pods, all of them ready."""
    reference = {"secretKeyRef": {"name": f"{name}-secrets", "key": "admin-token"}}
    api = deployment(namespace, name, "api", [{"name": "API_ADMIN_TOKEN", "valueFrom": reference}])
    rollouts = f"{name}-rollouts"
    runner = deployment(namespace, name, "runner", [{"name": "RUNNER_NAMESPACE", "value": rollouts}])
    cluster.objects.setdefault(f"/apis/apps/v1/namespaces/{namespace}/deployments", []).append(api)
    cluster.objects.setdefault("/apis/apps/v1/deployments", []).append(api)
    cluster.objects[f"/apis/apps/v1/namespaces/{namespace}/deployments/{name}-runner"] = runner
    pods = [pod(namespace, name, component) for component in ("api", "runner", "gateway", "postgres")]
    for place, found in ((namespace, pods), (rollouts, [])):
        cluster.objects[f"/api/v1/namespaces/{place}/pods"] = found
        cluster.objects[f"/api/v1/namespaces/{place}/persistentvolumeclaims"] = []
        cluster.objects[f"/api/v1/namespaces/{place}/events"] = []
    return pods
