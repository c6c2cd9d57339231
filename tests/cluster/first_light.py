"""`make test-cluster CLUSTER=…`: installs the chart on a real node and trains the flight agent through the REST API.

CLUSTER is a program that starts a Kubernetes node on this machine: `up`, `down`, `base-image NAME PACKAGES…`,
`load ARCHIVE` and `build` with buildah's options, which gives the image to the node. `up` prints `export KUBECONFIG=…`.
No registry is asked: stand-ins serve for the base images. The test says at each step how long it took, and ends with
the pods that it saw. The make variables of `make images` (CPU_TORCH, BUILD_ARGS) may come from the environment.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from leyden.libs.client import Client
from leyden.libs.contracts.api import Run
from tests.tools import HELM, KUBECTL, fetch

ROOT = Path(__file__).parents[2]
AGENT = ROOT / "examples" / "flight_agent"
STORES = ("docker.io/library/postgres:17", "docker.io/valkey/valkey:8.1")
RELEASE, NAMESPACE, ROLLOUTS = "leyden", "leyden", "leyden-rollouts"
AGENT_IMAGE = "docker.io/leyden/flight-agent:0.1.0"
PORT = 18000
ENDED = {"completed", "failed", "cancelled"}


def main() -> int:
    """Exit status 1 unless the run completes with agents and trainer as Jobs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cluster", required=True, type=Path)
    parser.add_argument("--built", action="store_true", help="the images are in the node already; start no cluster")
    parser.add_argument("--stay", action="store_true", help="leave the cluster running")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=20.0, help="bound of the run")
    arguments = parser.parse_args()
    fetch()
    cluster = Cluster(arguments.cluster)
    try:
        if not arguments.built:
            cluster.up()
            cluster.images()
        cluster.install()
        with step("rights"):
            check_rights(cluster)
        with step("isolation"):
            check_isolation(cluster)
        return train(cluster, arguments.steps, arguments.minutes * 60)
    finally:
        if not arguments.stay:
            cluster.down()


class Cluster:
    """The node, and the release on it."""

    def __init__(self, program: Path) -> None:
        self._program = str(program)
        found = subprocess.run([self._program, "kubeconfig"], capture_output=True, text=True, check=False).stdout
        self._environment = os.environ | {"KUBECONFIG": found.strip()}

    def up(self) -> None:
        with step("cluster up"):
            run(self._program, "up")

    def down(self) -> None:
        run(self._program, "down")

    def images(self) -> None:
        with step("base images"):
            python = "docker.io/library/python:3.11-slim-bookworm"
            run(self._program, "base-image", python, "python3", "python3-pip", "python3-venv")
            run(self._program, "base-image", "localhost/leyden-stores:12", "postgresql", "redis-server")
        with step("images of the stores"):
            folder = Path(__file__).parent
            for name in STORES:
                run(self._program, "build", "-t", name, "-f", str(folder / "stores.Dockerfile"), str(folder))
        with step("images"):
            build = f"BUILD={self._program} build"
            run("make", "images", build, "IMAGES=cpu", "IMAGE_PREFIX=docker.io/leyden", cwd=ROOT)

    def install(self) -> None:
        with step("helm install"):
            values = str(ROOT / "helm" / "leyden" / "values-dev.yaml")
            self.helm(
                *("upgrade", "--install", RELEASE, str(ROOT / "helm" / "leyden"), "--namespace", NAMESPACE),
                *("--create-namespace", "--values", values, "--wait", "--wait-for-jobs", "--timeout", "15m"),
            )
        print(self.kubectl("get", "pods", "--namespace", NAMESPACE), flush=True)
        with step("helm test"):
            self.helm("test", RELEASE, "--namespace", NAMESPACE, "--timeout", "3m")

    def helm(self, *arguments: str) -> None:
        subprocess.run([str(HELM), *arguments], env=self._environment, check=True)

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        command = [str(KUBECTL), *arguments]
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True, input=stdin, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
        return done.stdout

    def can(self, account: str, namespace: str, verb: str, resource: str, subresource: str) -> bool:
        user = f"system:serviceaccount:{NAMESPACE}:{RELEASE}-{account}"
        command = [str(KUBECTL), "auth", "can-i", verb, resource, f"--subresource={subresource}", "-n", namespace]
        done = subprocess.run([*command, "--as", user], env=self._environment, capture_output=True, text=True)
        return done.stdout.strip() == "yes"

    def node_addresses(self) -> list[str]:
        nodes = json.loads(self.kubectl("get", "nodes", "-o", "json"))["items"]
        return [one["address"] for node in nodes for one in node["status"]["addresses"] if one["type"] == "InternalIP"]

    def pods(self, namespace: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.kubectl("get", "pods", "-n", namespace, "-o", "json"))["items"]
        return found

    def token(self) -> str:
        secret = self.kubectl("get", "secret", f"{RELEASE}-secrets", "-n", NAMESPACE, "-o", "json")
        return base64.b64decode(json.loads(secret)["data"]["admin-token"]).decode()

    @contextlib.contextmanager
    def client(self) -> Iterator[Client]:
        command = [str(KUBECTL), "port-forward", "-n", NAMESPACE, f"service/{RELEASE}-api", f"{PORT}:8000"]
        with subprocess.Popen(command, env=self._environment, stdout=subprocess.DEVNULL) as forward:
            try:
                with Client(f"http://127.0.0.1:{PORT}", self.token(), patience_seconds=60) as client:
                    yield client
            finally:
                forward.terminate()


def check_rights(cluster: Cluster) -> None:
    """Asks the API server what the two accounts may do."""
    allowed = {
        ("controller", NAMESPACE): {("create", "jobs", ""), ("delete", "jobs", ""), ("list", "pods", "")},
        ("runner", ROLLOUTS): {
            *(("create", "jobs", ""), ("delete", "jobs", ""), ("list", "pods", "")),
            *(("get", "pods", "log"), ("create", "secrets", "")),
        },
    }
    asked = set().union(*allowed.values()) | {
        *(("get", "secrets", ""), ("list", "secrets", ""), ("create", "pods", ""), ("create", "pods", "exec")),
        *(("get", "configmaps", ""), ("create", "rolebindings", ""), ("list", "nodes", "")),
    }
    for account in ("controller", "runner"):
        for namespace in (NAMESPACE, ROLLOUTS, "default"):
            found = {right for right in asked if cluster.can(account, namespace, *right)}
            assert found == allowed.get((account, namespace), set()), (account, namespace, found)


def check_isolation(cluster: Cluster) -> None:
    """Connects from an agent's pod: gateway and collector answer, and nothing else does."""
    templates = cluster.kubectl("get", "configmap", f"{RELEASE}-pod-templates", "-n", NAMESPACE, "-o", "json")
    pod = yaml.safe_load(json.loads(templates)["data"]["agent.yaml"])
    pod |= {"apiVersion": "v1", "kind": "Pod"}
    pod["metadata"] |= {"name": "probe", "namespace": ROLLOUTS}
    pod["spec"]["containers"][0] |= {"image": AGENT_IMAGE, "command": ["sleep", "600"]}
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(pod))
    cluster.kubectl("wait", "pod/probe", "-n", ROLLOUTS, "--for=condition=Ready", "--timeout=60s")
    allowed = (("gateway", 8001), ("collector", 8003), ("collector", 4317))
    open_to_agents = {f"{RELEASE}-{name}.{NAMESPACE}.svc:{port}" for name, port in allowed}
    stores = (("api", 8000), ("postgres", 5432), ("redis", 6379))
    closed = {
        *(f"{RELEASE}-{name}.{NAMESPACE}.svc:{port}" for name, port in stores),
        f"{RELEASE}-engine-0.{RELEASE}-engine.{NAMESPACE}.svc:30000",
        *("kubernetes.default.svc:443", "169.254.169.254:80", "203.0.113.10:80"),
        *(f"{one['status']['podIP']}:9090" for one in cluster.pods(NAMESPACE) if one["status"]["phase"] == "Running"),
        *(f"{address}:10250" for address in cluster.node_addresses()),
    }
    script = (Path(__file__).parent / "probe.py").read_text()
    arguments = ("exec", "-i", "-n", ROLLOUTS, "probe", "--", "python", "-", *open_to_agents, *closed)
    found = json.loads(cluster.kubectl(*arguments, stdin=script))
    cluster.kubectl("delete", "pod", "probe", "-n", ROLLOUTS, "--now")
    assert set(found) == open_to_agents, found


def train(cluster: Cluster, steps: int, seconds: float) -> int:
    with cluster.client() as client, step("train"):
        with tempfile.TemporaryDirectory() as folder:
            generator = [sys.executable, str(AGENT / "tasks.py"), "--out", folder, "--train", "64", "--heldout", "16"]
            subprocess.run(generator, check=True)
            client.upload_dataset("flights", Path(folder) / "train.jsonl")
        created = client.create_run(document(steps))
        ended, seen = watch(cluster, client, created.id, seconds)
        report(client, ended, seen)
        complete = ended.phase == "completed" and seen["agent"] and seen["trainer"]
        return 0 if complete and len(list(client.policies(ended.id))) == steps + 1 else 1


def document(steps: int) -> dict[str, Any]:
    return {
        "name": "first light",
        "dataset": "flights",
        "agent": {"command": ["python", "agent.py"]},
        "runner": {"type": "kubernetes", "image": AGENT_IMAGE, "timeout_seconds": 300},
        "sampling": {"group_size": 4, "groups_per_step": 2, "max_policy_lag": 1},
        "credit": {
            "rule": {"type": "discounted"},
            "air": {"weights": {"memory": 0.3, "search": 0.2}},
            "baseline": {"type": "mean", "per": "state"},
        },
        "optimizer": {"learning_rate": 1e-5},
        "training": {"steps": steps, "micro_batch_tokens": 1024},
    }


def watch(cluster: Cluster, client: Client, run_id: str, seconds: float) -> tuple[Run, Counter[str]]:
    """The run at its end or at the deadline, and how many pods of each component it had."""
    deadline, seen, said = time.monotonic() + seconds, set[tuple[str, str]](), ""
    while True:
        for pod in [*cluster.pods(NAMESPACE), *cluster.pods(ROLLOUTS)]:
            seen.add((pod["metadata"]["labels"].get("app.kubernetes.io/component", "?"), pod["metadata"]["name"]))
        found = client.run(run_id)
        counts = Counter(component for component, _ in seen)
        line = f"{found.phase}, step {found.progress.step}, {counts['agent']} agents, {counts['trainer']} trainers"
        if line != said:
            print(f"  {line} {found.reason or ''}", flush=True)
            said = line
        if found.phase in ENDED or time.monotonic() > deadline:
            return found, counts
        time.sleep(1)


def report(client: Client, ended: Run, seen: Counter[str]) -> None:
    steps = [(one.number, one.reward_mean) for one in client.steps(ended.id)]
    states = Counter(one.state for one in client.rollouts(run=ended.id))
    engines = [(one.url, one.policy_version) for one in client.engines()]
    print(f"run {ended.phase} {ended.reason or ''}\nsteps and rewards: {steps}\nrollouts: {dict(states)}")
    print(f"pods seen: {dict(seen)}\nengines: {engines}", flush=True)


@contextlib.contextmanager
def step(name: str) -> Iterator[None]:
    began = time.monotonic()
    print(f"{name} …", flush=True)
    yield
    print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)


def run(*command: str, cwd: Path | None = None) -> None:
    subprocess.run(command, check=True, cwd=cwd)


if __name__ == "__main__":
    sys.exit(main())
