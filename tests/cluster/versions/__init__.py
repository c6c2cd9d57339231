"""Do versions travel by an object store to engines and to users, though a fetcher is killed while it reads?"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from leyden.libs.client import Client
from leyden.libs.contracts.weights import weights_sha256
from tests.cluster import training
from tests.cluster.node import Node, step
from tests.cluster.release import NAME, NAMESPACE, Release
from tests.support.waiting import until

S3, SECRET = "leyden-s3", "weights-store"
"""The namespace of tests/cluster/versions/s3.yaml, and the Secret with what its clients need."""
STEPS, DELIVERED = 3, 2
"""Engines are given no version of the last step: the run ends with it."""
SECONDS = 1800.0
CACHE = "var/cache/leyden"
HASH = (
    "import sys; from pathlib import Path; from leyden.libs.contracts.weights import weights_sha256 as of;"
    " print(of(Path(sys.argv[1])))"
)


def check(release: Release, client: Client) -> None:
    """Trains with a store; every engine loads the version after the killed one from its own cache."""
    with _served(release.node) as values:
        release.upgrade("--set", values)
        run = client.create_run(training.document("versions", STEPS))
        with step("kill a fetcher while it reads"):
            pod = until(lambda: _kill_reading(release, run.id), "a fetcher that reads version 1", SECONDS)
            until(lambda: _restarted(release, pod), "another fetcher in the same pod")
        with step("engines serve the versions"):
            until(lambda: _serve(client, run.id, 1), "version 1 on every engine, of the claim too", SECONDS)
            until(partial(_all_cached, release, run.id), f"version {DELIVERED} in every cache", SECONDS)
        training.finish(release, client, run.id, STEPS, SECONDS)
        _check_versions(release, client, run.id)
        assert "not_published" not in {one.name for one in client.alarms(run.id)}
        release.upgrade()


@contextlib.contextmanager
def _served(node: Node) -> Iterator[str]:
    """A server of S3 with a bucket; yields the values of the chart."""
    try:
        node.kubectl("apply", "-f", str(Path(__file__).with_name("s3.yaml")))
        literals = {"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "tests", "AWS_DEFAULT_REGION": "us-east-1"}
        told = [f"--from-literal={name}={value}" for name, value in literals.items()]
        node.kubectl("create", "secret", "generic", SECRET, "-n", NAMESPACE, *told)
        node.kubectl("wait", "pod/s3", "-n", S3, "--for=condition=Ready", "--timeout=180s")
        with node.forward(S3, "service/s3", 5000) as port:
            until(lambda: _has_bucket(f"http://127.0.0.1:{port}/weights"), "a bucket")
        store = {"url": "s3://weights/team", "endpoint": f"http://s3.{S3}.svc:5000", "credentialsSecret": SECRET}
        yield ",".join(f"objectStore.{name}={value}" for name, value in store.items())
    finally:
        node.kubectl("delete", "secret", SECRET, "-n", NAMESPACE, "--ignore-not-found")
        node.kubectl("delete", "namespace", S3, "--ignore-not-found")


def _has_bucket(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.put(url).is_success
    return False


def _kill_reading(release: Release, run_id: str) -> str | None:
    """Kills a fetcher that has read a part of version 1. Returns the name of its pod; None where none reads."""
    for name, pid in _fetchers(release).items():
        if any(one.is_dir() for one in _cache(pid).glob(f".{run_id}-1-*.*")):
            os.kill(pid, signal.SIGKILL)
            return name
    return None


def _restarted(release: Release, name: str) -> bool:
    [status] = [_status(pod) for pod in release.pods("engine") if pod["metadata"]["name"] == name]
    return status.get("restartCount", 0) > 0 and "running" in status["state"]


def _serve(client: Client, run_id: str, version: int) -> bool:
    """Whether every engine serves the run's version, or a later one."""
    engines = list(client.engines())
    return all(one.run_id == run_id and (one.policy_version or 0) >= version for one in engines)


def _all_cached(release: Release, run_id: str) -> bool:
    """Whether the fetcher of every engine has read a version whole, and no half is left."""
    caches = [_cache(pid) for pid in _fetchers(release).values()]
    named = [[one.name for one in cache.iterdir() if one.is_dir()] for cache in caches]
    prefix = f"{run_id}-{DELIVERED}-"
    return len(named) == len(release.pods("engine")) and all(
        any(name.startswith(prefix) for name in names) and not any(name.startswith(".") for name in names)
        for names in named
    )


def _check_versions(release: Release, client: Client, run_id: str) -> None:
    """The caches, the trainer's folder and the download have the weights on record; the API mounts no claim."""
    versions = {one.version: one for one in client.policies(run_id)}
    for pid in _fetchers(release).values():
        sha256 = versions[DELIVERED].content_sha256
        assert weights_sha256(_cache(pid) / f"{run_id}-{DELIVERED}-{sha256}") == sha256
    last = versions[STEPS]
    of_trainer = release.node.kubectl(
        *("exec", "-n", NAMESPACE, f"deployment/{NAME}-controller", "--", "python", "-c", HASH, last.path)
    )
    with tempfile.TemporaryDirectory() as folder:
        got = client.download_version(run_id, STEPS, Path(folder) / "got")
        assert {weights_sha256(got), of_trainer.strip()} == {last.content_sha256}


def _fetchers(release: Release) -> dict[str, int]:
    """The fetchers that run, by pod, as processes of this machine."""
    found = {}
    for pod in release.pods("engine"):
        container = str(_status(pod).get("containerID", "")).rpartition("/")[2]
        if container and (pid := _process(container)):
            found[pod["metadata"]["name"]] = pid
    return found


def _status(pod: dict[str, Any]) -> dict[str, Any]:
    statuses = pod["status"].get("initContainerStatuses", [])
    return next((one for one in statuses if one["name"] == "fetcher"), {})


def _process(container: str) -> int | None:
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if container in (process / "cgroup").read_text() and b"controller.fetcher" in (
                (process / "cmdline").read_bytes()
            ):
                return int(process.name)
    return None


def _cache(pid: int) -> Path:
    return Path(f"/proc/{pid}/root") / CACHE
