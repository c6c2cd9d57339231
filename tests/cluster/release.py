"""The release that the tests install, and its API and database from outside."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psycopg

from leyden.libs.client import Client
from tests.cluster.node import Node, step
from tests.support.shared import ROOT
from tests.support.waiting import until

Found = TypeVar("Found")

NAME, NAMESPACE, ROLLOUTS = "leyden", "leyden", "leyden-rollouts"
CHART = ROOT / "helm" / "leyden"
SERVICES = ("api", "controller", "runner", "gateway", "collector", "credit", "grader")
HERE = Path(__file__).parent


class Release:
    """The chart on a node."""

    def __init__(self, node: Node, one_image: bool) -> None:
        self.node = node
        files = [CHART / "values-dev.yaml", HERE / "values.yaml", *([HERE / "one-image.yaml"] if one_image else [])]
        self._values = [f"--values={file}" for file in files]

    def install(self) -> None:
        """Installs it, or upgrades it to this checkout's chart."""
        with step("helm install"):
            self.upgrade("--timeout=8m")
        print(self.node.kubectl("get", "pods", "--namespace", NAMESPACE), flush=True)
        with step("helm test"):
            self.node.helm("test", NAME, "--namespace", NAMESPACE, "--timeout", "3m")

    def upgrade(self, *options: str, chart: Path = CHART) -> None:
        """`helm upgrade --install` with further options, until everything is ready and the pods before are gone."""
        self.node.helm(
            *("upgrade", "--install", NAME, str(chart), "--namespace", NAMESPACE, "--create-namespace"),
            *self._values,
            *("--wait", "--wait-for-jobs", "--timeout", "15m", *options),
        )
        # A port-forward stays with its pod: requests would reach the API with the values before.
        until(self._has_no_former_pod, "the end of the pods before the upgrade")

    def _has_no_former_pod(self) -> bool:
        """Whether the services have as many pods as they should; those that are being deleted count."""
        selector = ("-n", NAMESPACE, "-l", f"app.kubernetes.io/component in ({','.join(SERVICES)})")
        wanted = sum(one["spec"]["replicas"] for one in self.node.get("deployments", *selector)["items"])
        return len(self.node.get("pods", *selector)["items"]) == int(wanted)

    def pods(self, component: str = "", namespace: str = NAMESPACE, phase: str = "") -> list[dict[str, Any]]:
        """The pods of a component, or all; those that are being deleted do not count."""
        selector = ["-l", f"app.kubernetes.io/component={component}"] if component else []
        found = self.node.get("pods", "-n", namespace, *selector)["items"]
        return [
            pod
            for pod in found
            if "deletionTimestamp" not in pod["metadata"] and phase in ("", pod["status"].get("phase"))
        ]

    def has_a_store(self) -> bool:
        """Whether Postgres or Redis is ready; False as well where the API server is away."""
        with contextlib.suppress(RuntimeError):
            pods = [*self.pods("postgres"), *self.pods("redis")]
            return any(one["ready"] for pod in pods for one in pod["status"].get("containerStatuses", []))
        return False

    def delete_pod(self, pod: dict[str, Any], *options: str) -> None:
        """Deletes a pod; its grace period passes as usual."""
        metadata = pod["metadata"]
        self.node.kubectl("delete", "pod", metadata["name"], "-n", metadata["namespace"], "--wait=false", *options)

    def ready(self, workload: str, seconds: int = 300) -> None:
        """Waits for all replicas, as `deployment/leyden-api`."""
        self.node.kubectl("rollout", "status", workload, "-n", NAMESPACE, f"--timeout={seconds}s")

    def secret(self, key: str) -> str:
        """A value of the generated Secret."""
        found = self.node.get("secret", f"{NAME}-secrets", "-n", NAMESPACE)
        return base64.b64decode(found["data"][key]).decode()

    @contextlib.contextmanager
    def client(self) -> Iterator[Client]:
        """The REST API."""
        with self.node.forward(NAMESPACE, f"service/{NAME}-api", 8000) as port:
            url = f"http://127.0.0.1:{port}"
            with Client(url, self.secret("admin-token"), patience_seconds=180) as client:
                yield client

    @contextlib.contextmanager
    def database(self) -> Iterator[str]:
        """The address of Postgres inside the release."""
        with self.node.forward(NAMESPACE, f"pod/{NAME}-postgres-0", 5432) as port:
            address = f"postgresql://leyden:{self.secret('postgres-password')}@127.0.0.1:{port}/leyden"
            until(partial(_answers, address), "an answer of Postgres through the port-forward")
            yield address


def _answers(address: str) -> bool:
    """Whether Postgres takes connections there."""
    with contextlib.suppress(psycopg.OperationalError), psycopg.connect(address, connect_timeout=5):
        return True
    return False
