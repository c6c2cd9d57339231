"""kubectl as a client: JSON of any path of the API server, logs, files, and forwarded ports."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from leyden.libs.cli.errors import CommandError, Exit

REQUEST_SECONDS = 30
FORWARD_SECONDS = 30.0
RETRY_SECONDS = 0.5
POLL_SECONDS = 0.05
INSTALL = "https://kubernetes.io/docs/tasks/tools/"
_STATUSES = {
    "NotFound": Exit.NOT_FOUND,
    "Forbidden": Exit.NOT_ALLOWED,
    "Unauthorized": Exit.NOT_ALLOWED,
    "Invalid": Exit.REFUSED,
}

Object = dict[str, Any]


class KubectlError(CommandError):
    """kubectl failed. Its exit status says why: not found, not allowed, or unreachable for all other causes."""


@dataclass(frozen=True)
class Kubectl:
    """Args: context: of the kubeconfig; null: the current one."""

    context: str | None = None

    def get(self, path: str) -> Object:
        """Returns the object or list at a path, such as `/api/v1/nodes`. Raises: KubectlError"""
        found: Object = json.loads(self.run("get", "--raw", path))
        return found

    def items(self, path: str) -> list[Object]:
        """Returns the items of a list. Raises: KubectlError"""
        return list(self.get(path).get("items") or [])

    def create(self, path: str, body: Object) -> Object:
        """Posts an object. Raises: KubectlError"""
        made: Object = json.loads(self.run("create", "--raw", path, "-f", "-", text=json.dumps(body)))
        return made

    def run(self, *arguments: str, text: str | None = None, timed: bool = True) -> str:
        """Returns kubectl's output.

        Args: timed: bounds each request, which a copy must not be
        Raises: KubectlError
        """
        limit = [f"--request-timeout={REQUEST_SECONDS}s"] if timed else []
        done = subprocess.run(
            [*self.command(*arguments), *limit],
            input=text,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise self._error(done.stderr)
        return done.stdout

    def command(self, *arguments: str) -> list[str]:
        """The command line. Raises: KubectlError: kubectl is not installed"""
        program = shutil.which("kubectl")
        if program is None:
            raise KubectlError(f"kubectl is not in PATH: install it ({INSTALL}), or use --url and --token")
        return [program, *([] if self.context is None else [f"--context={self.context}"]), *arguments]

    def default_namespace(self) -> str:
        """The namespace of the context; `default` where it names none."""
        view = json.loads(self.run("config", "view", "--minify", "-o", "json"))
        context = (view.get("contexts") or [{}])[0].get("context", {})
        return str(context.get("namespace") or "default")

    @contextmanager
    def forward(self, namespace: str, target: str, port: int) -> Iterator[str]:
        """Yields the address of a local port that leads to a Service or pod, also after the pod was replaced.

        Args: target: such as `service/leyden-api`
        Raises: KubectlError
        """
        with socket.create_server(("127.0.0.1", 0)) as free:
            local = free.getsockname()[1]
        command = self.command("port-forward", "--namespace", namespace, target, f"{local}:{port}")
        process = self._start_forward(command, local)
        closed = threading.Event()
        repeating = threading.Thread(target=_repeat, args=(command, process, closed), daemon=True)
        repeating.start()
        try:
            yield f"http://127.0.0.1:{local}"
        finally:
            closed.set()
            repeating.join()

    def _start_forward(self, command: Sequence[str], port: int) -> subprocess.Popen[bytes]:
        """Starts kubectl and returns once it listens."""
        deadline = time.monotonic() + FORWARD_SECONDS
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
            while not _listens(port):
                if process.poll() is not None or time.monotonic() > deadline:
                    process.kill()
                    process.wait()
                    errors.seek(0)
                    words = errors.read().decode(errors="replace")
                    raise self._error(words or f"no port was forwarded within {FORWARD_SECONDS:g} s")
                time.sleep(POLL_SECONDS)
        return process

    def _error(self, output: str) -> KubectlError:
        message = output.strip().splitlines()[-1] if output.strip() else "kubectl failed without a message"
        if re.search(r"context .*does not exist|cannot locate context|not found for specified context", message):
            listing = Kubectl().command("config", "get-contexts", "-o", "name")
            names = subprocess.run(listing, capture_output=True, text=True, check=False).stdout.split()
            return KubectlError(
                f"no kubectl context {self.context!r}; there are: {', '.join(names) or 'none (see KUBECONFIG)'}",
                Exit.NOT_FOUND,
            )
        reason = re.search(r"\((\w+)\)", message)
        status = _STATUSES.get(reason.group(1) if reason else "", Exit.UNREACHABLE)
        return KubectlError(f"kubectl: {message}", status)


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def _repeat(command: Sequence[str], process: subprocess.Popen[bytes], closed: threading.Event) -> None:
    """Starts kubectl again whenever it ends, as it does when its pod is replaced."""
    while not closed.wait(RETRY_SECONDS):
        if process.poll() is not None:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    process.terminate()
    process.wait()
