"""How much CPU does each part of the release use meanwhile?

The kernel of the node's machine accounts for it, in cgroups of version 1.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.cluster.node import Node

PODS = Path("/sys/fs/cgroup/cpuacct/kubepods")
SECONDS = 0.5
"""Between two readings."""
TICKS = os.sysconf("SC_CLK_TCK")

Reading = dict[str, float]
"""CPU seconds since the start of each pod, by uid, of each process of the node, by name, and of the whole machine."""


class Accounts:
    """Readings with their times, in seconds since the epoch. Args: node: its processes count, too"""

    def __init__(self, node: Node) -> None:
        self._processes = Path(node.environment["KUBECONFIG"]).parent / "run"
        self._readings: list[tuple[float, Reading]] = []

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Reads while the block runs."""
        over = threading.Event()
        thread = threading.Thread(target=self._read_until, args=(over,))
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def between(self, began: float, ended: float, parts: Mapping[str, str]) -> list[tuple[str, float]]:
        """CPU seconds by part between the readings next to two moments, the most first.

        Args: parts: names by uid of the pods
        """
        first = min(self._readings, key=lambda one: abs(one[0] - began))[1]
        last = min(self._readings, key=lambda one: abs(one[0] - ended))[1]
        used = dict[str, float]()
        for name, seconds in last.items():
            part = parts.get(name, name)
            used[part] = used.get(part, 0.0) + seconds - first.get(name, 0.0)
        machine = used.pop("machine")
        used["all else"] = machine - sum(used.values())
        return sorted(used.items(), key=lambda one: -one[1])

    def _read_until(self, over: threading.Event) -> None:
        while not over.wait(SECONDS):
            self._readings.append((time.time(), self._read()))

    def _read(self) -> Reading:
        found = Reading()
        for folder in [*PODS.glob("pod*"), *PODS.glob("*/pod*")]:
            # A pod may go meanwhile.
            with contextlib.suppress(OSError):
                found[folder.name.removeprefix("pod")] = int((folder / "cpuacct.usage").read_text()) / 1e9
        for file in self._processes.glob("*.pid"):
            found[file.stem] = _seconds_of(int(file.read_text()))
        _, *ticks = Path("/proc/stat").read_text().splitlines()[0].split()
        return found | {"machine": sum(map(int, ticks[:3])) / TICKS}


def _seconds_of(pid: int) -> float:
    """CPU seconds of one process with its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS
