"""Whether an installed release works, for `helm test`: `python -m leyden.libs.kubernetes.installed`, in its namespace.

Every Deployment and StatefulSet of the release must have all its pods ready, and every engine must sample a token.
"""

from __future__ import annotations

import os
import socket
import ssl
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx

from leyden.libs.contracts.conversation import Json
from leyden.libs.kubernetes.templates import INSTANCE

API_SERVER = "https://kubernetes.default.svc"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Kubernetes puts a pod's namespace, token and the API server's certificate here."""
WAIT_SECONDS = 60.0
"""Pods may just roll, and engines may take new weights."""
ENGINE_PORT = 30000
TOKEN = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}


def unready(workloads: list[Json]) -> Iterator[str]:
    """Names the workloads that lack ready pods, with both numbers."""
    for one in workloads:
        ready, wanted = one["status"].get("readyReplicas", 0), one["spec"]["replicas"]
        if ready < wanted:
            yield f"{one['metadata']['name']}: {ready} of {wanted} pods are ready"


def workloads_of(release: str) -> list[Json]:
    """The Deployments and StatefulSets of a release. Raises: httpx.HTTPError"""
    namespace, token = ((ACCOUNT / name).read_text().strip() for name in ("namespace", "token"))
    found = list[Json]()
    with httpx.Client(
        base_url=API_SERVER,
        verify=ssl.create_default_context(cafile=ACCOUNT / "ca.crt"),
        headers={"authorization": f"Bearer {token}"},
        trust_env=False,
    ) as http:
        for kind in ("deployments", "statefulsets"):
            address = f"/apis/apps/v1/namespaces/{namespace}/{kind}"
            answer = http.get(address, params={"labelSelector": f"{INSTANCE}={release}"}).raise_for_status()
            found += answer.json()["items"]
    return found


def silent(services: list[str], port: int, key: str | None) -> Iterator[str]:
    """Names the engines that sample no token, and the Services without an engine, with the cause."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    for service in services:
        try:
            hosts = sorted({str(found[4][0]) for found in socket.getaddrinfo(service, port, socket.AF_INET)})
        except OSError as error:
            yield f"{service}: no engine: {error}"
            continue
        for host in hosts:
            try:
                url = f"http://{host}:{port}/generate"
                httpx.post(url, json=TOKEN, headers=headers, timeout=30, trust_env=False).raise_for_status()
            except httpx.HTTPError as error:
                yield f"{service}: the engine at {host} samples no token: {type(error).__name__}: {error}"


def problems(environment: Mapping[str, str]) -> list[str]:
    """Every problem of the release that the variables `RELEASE`, `ENGINES` and `ENGINE_API_KEY` name."""
    try:
        found = list(unready(workloads_of(environment["RELEASE"])))
    except httpx.HTTPError as error:
        found = [f"the API server does not answer: {type(error).__name__}: {error}"]
    return found + list(silent(environment["ENGINES"].split(), ENGINE_PORT, environment.get("ENGINE_API_KEY")))


def main() -> int:
    """Returns 0 once the release works, and 1 with its problems where it does not in time."""
    deadline = time.monotonic() + WAIT_SECONDS
    while found := problems(os.environ):
        if time.monotonic() > deadline:
            sys.stderr.write("\n".join([*found, "see `kubectl get pods` and `leyden doctor --cluster`\n"]))
            return 1
        time.sleep(2)
    sys.stdout.write("every pod is ready, and every engine samples\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
