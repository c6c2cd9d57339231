"""A real Kubernetes node on this machine, and the images that it runs.

The program that starts it is not part of Leyden. Its commands: `up`, `down`, `status`, `kubeconfig`,
`base-image NAME PACKAGES…`, and `build` with buildah's options, which gives the image to the node. No registry is
asked: stand-ins serve for the base images.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.support.shared import ROOT, free_port
from tests.support.tools import HELM, KUBECTL

PREFIX = "docker.io/leyden"
PYTHON = "docker.io/library/python:3.11-slim-bookworm"
LOG = ROOT / ".cache" / "test-cluster.log"
STORES = f"{PREFIX}/stores:12"
S3 = f"{PREFIX}/s3:5"
TAG = "0.2.0"
"""The chart's appVersion: the release takes it without a value."""
SERVICES_IMAGE = f"{PREFIX}/services:{TAG}"
FREE_GIB = 10
"""The free disk space that the images need. A kubelet that has less than a hundredth left deletes its own images."""


_STATE = {
    "node": "get nodes --output custom-columns=TAINTS:.spec.taints,"
    "CONDITIONS:.status.conditions[*].type,STATUS:.status.conditions[*].status",
    "pods": "get pods --all-namespaces --no-headers --output custom-columns=:.metadata.name,:.status.phase,"
    ":.status.conditions[?(@.type=='PodScheduled')].message,:.status.containerStatuses[*].state.waiting.reason",
    "claims": "get persistentvolumeclaims --all-namespaces --no-headers",
    "warnings": "get events --all-namespaces --field-selector=type=Warning --sort-by=.lastTimestamp --no-headers "
    "--output custom-columns=:.involvedObject.name,:.reason,:.message",
}
"""The commands of `kubectl` that show it."""


class Node:
    """A node of one machine, with the commands that need its API server."""

    def __init__(self, program: Path) -> None:
        self.program = str(program.resolve())
        found = subprocess.run([self.program, "kubeconfig"], capture_output=True, text=True, check=True).stdout
        self.environment = os.environ | {"KUBECONFIG": found.strip()}

    def up(self) -> None:
        """Starts afresh: nothing stays of a cluster that runs.

        Raises: RuntimeError: the disk has no room for the images
        """
        if (free := shutil.disk_usage("/var/lib").free / 2**30) < FREE_GIB:
            raise RuntimeError(f"{free:.1f} GiB are free below /var/lib, and the node needs {FREE_GIB}: free some")
        with step("cluster up"):
            run(self.program, "up")

    def down(self) -> None:
        """Stops it. Built images stay."""
        run(self.program, "down")

    def images(self, services: tuple[str, ...], each: bool) -> None:
        """Builds every image that a release needs, and gives them to the node.

        each: an image for each service, as users build them; else one for all of them, SERVICES_IMAGE
        """
        before = _images()
        with step("base image"):
            if not _has_image(PYTHON):
                run(self.program, "base-image", PYTHON, "python3", "python3-pip", "python3-venv")
        with step("images of the stores"):
            folder = Path(__file__).parent
            run(self.program, "build", "-t", STORES, "-f", str(folder / "stores.Dockerfile"), str(folder))
        with step("images"):
            arguments = " ".join(build_arguments())
            variables = [f"BUILD={self.program} build", f"BUILD_ARGS={arguments}", "IMAGES=cpu"]
            if arguments:
                variables.append("CPU_TORCH=" + os.environ.get("CPU_TORCH", ""))
            if not each:
                variables.append("SERVICES=")
                extras = f"SERVICE={','.join(services)}"
                self._build(SERVICES_IMAGE, "docker/service.Dockerfile", "--build-arg", extras)
            run("make", "images", *variables, f"IMAGE_PREFIX={PREFIX}", f"IMAGE_TAG={TAG}", cwd=ROOT)
            if replaced := before - _images():
                run("buildah", "rmi", "--force", *sorted(replaced))

    def store_image(self) -> None:
        """Builds the server of S3 that tests/cluster/versions asks for."""
        with step("image of the object store"):
            self._build(S3, "tests/cluster/versions/s3.Dockerfile")

    def _build(self, tag: str, file: str, *options: str) -> None:
        arguments = shlex.split(" ".join(build_arguments()))
        run(self.program, "build", *arguments, "-t", tag, "-f", file, *options, ".", cwd=ROOT)

    def helm(self, *arguments: str) -> str:
        """The output of Helm."""
        return self._output([str(HELM), *arguments])

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """The output of kubectl.

        Raises: RuntimeError: it failed
        """
        return self._output([str(KUBECTL), *arguments], stdin)

    def get(self, *arguments: str) -> dict[str, Any]:
        """An object, or a list of them."""
        found: dict[str, Any] = json.loads(self.kubectl("get", *arguments, "-o", "json"))
        return found

    def state(self) -> str:
        """The node's conditions and taints, its pods, claims and last warnings, for a failed test."""
        status = subprocess.run([self.program, "status"], capture_output=True, text=True, check=False)
        # The commands below show pods in more detail.
        parts = ["processes:\n" + status.stdout.partition("\nNAMESPACE")[0][-2500:] + status.stderr[-500:]]
        for title, arguments in _STATE.items():
            try:
                found = self.kubectl(*arguments.split())
            except RuntimeError as error:
                found = str(error)
            parts.append(f"{title}:\n{found[-2500:]}")
        return "\n".join(parts)

    @contextlib.contextmanager
    def forward(self, namespace: str, target: str, port: int) -> Iterator[int]:
        """A port of this machine that leads to the target's port, also after its pod was replaced."""
        local = free_port()
        # A port-forward ends with its pod, and now and then with a connection.
        again = f"while true; do '{KUBECTL}' port-forward -n {namespace} {target} {local}:{port}; sleep 0.5; done"
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(
            ["sh", "-c", again], env=self.environment, stdout=quiet, stderr=quiet, start_new_session=True
        )
        try:
            yield local
        finally:
            os.killpg(process.pid, 15)
            process.wait()

    def _output(self, command: list[str], stdin: str | None = None) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, input=stdin, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
        return done.stdout


def build_arguments() -> list[str]:
    """The options of `build` that let pip read this machine's folders of wheels, where its configuration names any."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    settings: dict[str, list[str]] = {"find-links": [], "extra-index-url": []}
    for line in listed.stdout.splitlines():
        key, _, value = line.partition("=")
        if (name := key.rpartition(".")[2]) in settings:
            settings[name] += [one for one in value.strip("'\"").split() if _folder(one)]
    folders = {_folder(one) for one in settings["find-links"]} | {
        # The pages of an index refer to a folder beside them.
        folder.parent
        for one in settings["extra-index-url"]
        if (folder := _folder(one))
    }
    mounts = [f"--volume {folder}:{folder}:ro" for folder in sorted(filter(None, folders))]
    return mounts + [
        f"--build-arg 'PIP_{name.upper().replace('-', '_')}={' '.join(dict.fromkeys(values))}'"
        for name, values in settings.items()
        if values
    ]


def _folder(url: str) -> Path | None:
    parts = urlsplit(url)
    return Path(parts.path) if parts.scheme in ("", "file") and Path(parts.path).is_dir() else None


def _has_image(name: str) -> bool:
    return subprocess.run(["buildah", "inspect", "--type", "image", name], capture_output=True).returncode == 0


def _images() -> set[str]:
    """The ids of Leyden's images."""
    command = ["buildah", "images", "--quiet", "--no-trunc", f"--filter=reference={PREFIX}/*"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


@contextlib.contextmanager
def step(name: str) -> Iterator[None]:
    """Prints how long the block took."""
    began = time.monotonic()
    print(f"{name} …", flush=True)
    yield
    print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)


def run(*command: str, cwd: Path | None = None) -> None:
    """A command whose output goes into LOG, and is shown when it fails.

    Raises: RuntimeError: it failed
    """
    with LOG.open("a") as log:
        began = log.tell()
        done = subprocess.run(command, cwd=cwd, stdout=log, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        output = LOG.read_bytes()[began:].decode(errors="replace")[-8000:]
        raise RuntimeError(f"{' '.join(command)}: exit status {done.returncode}\n{output}")
