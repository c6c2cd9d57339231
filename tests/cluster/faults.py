"""Does a run end right when its pods die, when the API server restarts, and when a quota is full?"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from leyden.libs.client import Client
from tests.cluster.node import step
from tests.cluster.release import NAME, ROLLOUTS, Release
from tests.cluster.training import ENDED, document
from tests.support.waiting import until

QUOTA = f"{NAME}-rollouts"
TRAINER_PODS = 2
"""tests/cluster/values.yaml asks for so many."""


def check_start_failures(release: Release, client: Client) -> None:
    """An image that no node has: the API says why no attempt starts. The run is cancelled, and leaves no Job."""
    created = client.create_run(document("no such image", 1, "docker.io/leyden/nowhere:1"))
    reason = until(lambda: _failure(client, created.id, "nowhere"), "the reason of an agent that cannot start")
    print(f"  {reason}", flush=True)
    client.cancel_run(created.id)
    until(lambda: client.run(created.id).phase == "cancelled", "the end of a cancelled run")
    until(lambda: not _jobs(release, ROLLOUTS, created.id), "the deletion of a cancelled run's Jobs")


@contextlib.contextmanager
def full_quota(release: Release) -> Iterator[None]:
    """No pod of an agent may start meanwhile."""
    hard = release.node.get("resourcequota", QUOTA, "-n", ROLLOUTS)["spec"]["hard"]["pods"]
    _set_quota(release, "0")
    try:
        yield
    finally:
        _set_quota(release, hard)


def check_quota_reason(client: Client, run_id: str) -> None:
    """The API says that an attempt had no quota."""
    reason = until(lambda: _failure(client, run_id, "exceeded quota"), "the reason of an agent without quota")
    print(f"  {reason}", flush=True)


def delete_each(release: Release, components: Sequence[str]) -> None:
    """Deletes a pod of each component, one after another; Redis loses all that it holds."""
    for component in components:
        with step(f"delete {component}"):
            before = release.pods(component)
            release.delete_pod(before[0])
            until(partial(_replaced, release, component, before), f"another pod of {component}")


def kill_agent(release: Release) -> None:
    """Deletes an agent's pod without a grace period."""
    with step("kill an agent"):
        pod = until(lambda: release.pods(namespace=ROLLOUTS, component="agent", phase="Running"), "an agent's pod")[0]
        release.delete_pod(pod, "--grace-period=0", "--force")


def kill_trainer(release: Release) -> None:
    """Deletes a pod of the trainer without a grace period; another attempt of all its pods begins."""
    with step("kill the trainer"), _new_trainer(release) as pod:
        release.delete_pod(pod, "--grace-period=0", "--force")


def evict_trainer(release: Release) -> None:
    """Evicts a pod of the trainer as a drained node would; another attempt of all its pods begins."""
    with step("evict the trainer"), _new_trainer(release) as pod:
        evict(release, pod)


@contextlib.contextmanager
def _new_trainer(release: Release) -> Iterator[dict[str, Any]]:
    """Yields the last pod of a trainer that runs; later all pods of another one run."""
    before = until(lambda: _running_trainer(release, set()), "a trainer")
    yield before[-1]
    until(lambda: _running_trainer(release, {pod["metadata"]["uid"] for pod in before}), "another trainer")


def _running_trainer(release: Release, without: set[str]) -> list[dict[str, Any]] | None:
    pods = [pod for pod in release.pods("trainer", phase="Running") if pod["metadata"]["uid"] not in without]
    return sorted(pods, key=lambda pod: str(pod["metadata"]["name"])) if len(pods) >= TRAINER_PODS else None


def evict(release: Release, pod: dict[str, Any]) -> None:
    """Asks the API server to evict a pod.

    Raises: RuntimeError: a disruption budget forbids it
    """
    name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
    body = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": name, "namespace": namespace},
    }
    path = f"/api/v1/namespaces/{namespace}/pods/{name}/eviction"
    release.node.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(body))


def restart_api_server(release: Release) -> None:
    """Kills the node's API server, and starts it again with the same arguments after some seconds."""
    with step("restart the API server"):
        state = Path(release.node.environment["KUBECONFIG"]).parent
        file = state / "run" / "kube-apiserver.pid"
        pid = int(file.read_text())
        command = [part for part in Path(f"/proc/{pid}/cmdline").read_text().split("\0") if part]
        etcd = (state / "run" / "etcd.pid").read_text()
        os.kill(pid, signal.SIGKILL)
        time.sleep(10)
        with (state / "logs" / "kube-apiserver.log").open("ab") as log:
            inside = ["nsenter", f"--net=/proc/{etcd}/ns/net", *command]
            process = subprocess.Popen(inside, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)
        file.write_text(str(process.pid))
        until(lambda: _answers(release), "the API server")


def still_runs(client: Client, run_id: str) -> None:
    """The run has not ended."""
    found = client.run(run_id)
    assert found.phase not in ENDED, (found.phase, found.reason)
    print(f"  {found.phase}, step {found.progress.step}", flush=True)


def _failure(client: Client, run_id: str, word: str) -> str | None:
    """The reason that the API gives for an attempt that did not start."""
    for rollout in client.rollouts(run=run_id):
        for attempt in client.rollout(rollout.id).attempts:
            detail = attempt.outcome.detail if attempt.outcome else None
            if detail and word in detail:
                return detail
    return None


def _jobs(release: Release, namespace: str, run_id: str) -> list[Any]:
    found: list[Any] = release.node.get("jobs", "-n", namespace, "-l", f"leyden.dev/run={run_id}")["items"]
    return found


def _set_quota(release: Release, pods: str) -> None:
    patch = json.dumps({"spec": {"hard": {"pods": pods}}})
    release.node.kubectl("patch", "resourcequota", QUOTA, "-n", ROLLOUTS, "--type=merge", "-p", patch)


def _replaced(release: Release, component: str, before: list[dict[str, Any]]) -> bool:
    """As many pods as before, all of them ready, and the first one is gone."""
    pods = release.pods(component)
    gone = all(pod["metadata"]["uid"] != before[0]["metadata"]["uid"] for pod in pods)
    return gone and len(pods) == len(before) and all(map(_ready, pods))


def _ready(pod: dict[str, Any]) -> bool:
    conditions = pod["status"].get("conditions", [])
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def _answers(release: Release) -> bool:
    try:
        return release.node.kubectl("get", "--raw=/readyz", "--request-timeout=5s").strip() == "ok"
    except RuntimeError:
        return False
