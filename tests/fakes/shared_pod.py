"""The server of a shared pod as a process of this machine, with the four capabilities that the chart grants."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from leyden.libs.sandbox import pod_server

# Connections of the test come from this machine, and so would those of agents.
START = """
import ctypes, os, struct, sys
sys.path.append(sys.argv[1])
from sandbox import pod_server
granted = sum(1 << number for number in (0, 5, 6, 7))
sets = struct.pack("=6I", granted, granted, 0, 0, 0, 0)
assert ctypes.CDLL(None).capset(struct.pack("=Ii", 0x20080522, 0), sets) == 0
pod_server.PORT, pod_server.FOLDER, pod_server.is_inside = int(sys.argv[2]), sys.argv[3], lambda *_: False
pod_server.main()
"""


@contextmanager
def serving(folder: Path, port: int, variables: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Runs the program as an init container copies it, without this environment's packages. It leaves no file.

    Args: folder: gets the program
    """
    attempts = Path(f"/var/tmp/leyden-pod-{os.getpid()}-{port}")  # users of attempts pass to it
    attempts.mkdir()
    pod_server.copy(str(folder))
    command = [sys.executable, "-I", "-S", "-c", START, str(folder), str(port), str(attempts)]
    process = subprocess.Popen(command, env={"PATH": "/usr/local/bin:/usr/bin:/bin", **variables}, cwd="/")
    try:
        yield process
    finally:
        process.terminate()
        process.wait(20)
    left = list(attempts.iterdir())
    shutil.rmtree(attempts)
    # A server that was killed removes nothing; its volume goes with its pod.
    assert left == [] or process.returncode != 0


def listens(port: int) -> bool:
    """Whether a process of this machine listens at a port."""
    return f":{port:04X} " in Path("/proc/net/tcp6").read_text() + Path("/proc/net/tcp").read_text()
