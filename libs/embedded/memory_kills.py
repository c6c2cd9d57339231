"""Tells whether the kernel killed a process for want of memory: the evidence of a trainer's SIGKILL.

`python -m leyden.libs.embedded.memory_kills PROGRAM ARGUMENT…` runs a program as a container's first process, and says
with its last line how many processes of the container the kernel killed meanwhile. Kubernetes has the line in the pod's
termination message. Standard library only.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
MACHINE = Path("/proc/vmstat")
LAST_LINE = "leyden: for want of memory the kernel killed {} processes of this container"
TOLD = re.compile(r"^leyden: for want of memory the kernel killed (\d+) processes of this container\n?", re.MULTILINE)


def memory_kills() -> int | None:
    """The processes of this process's own cgroup, and of those below it, that the kernel has killed so far; those of
    the rest of the machine do not count. None where no file tells it."""
    for line in OWN.read_text().splitlines() if OWN.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folder, name = CGROUPS, "memory.events"
        elif "memory" in controllers.split(","):
            folder, name = CGROUPS / "memory", "memory.oom_control"
        else:
            continue
        # A container sees its own cgroup as the root, by whatever name the host knows it.
        for file in (folder / path.lstrip("/") / name, folder / name):
            if (count := _count(file)) is not None:
                return count
    return None


def machine_memory_kills() -> int | None:
    """The processes of the whole machine that the kernel has killed so far for want of memory; None where no file tells
    it. For a program that has its machine for itself, and no cgroup that counts."""
    return _count(MACHINE)


def told(output: str) -> tuple[int | None, str]:
    """The count of a program's last line, None where it has none, and its output without the line."""
    found = TOLD.findall(output)
    return (int(found[-1]) if found else None), TOLD.sub("", output)


def _count(file: Path) -> int | None:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def main() -> int:
    """Returns the program's exit code, 128 + n for signal n; it gets the signals that ask this process to end."""
    before = memory_kills()
    process = subprocess.Popen(sys.argv[1:])  # the arguments are the Job's own
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: process.send_signal(number))
    code = process.wait()
    after = memory_kills()
    if code != 0 and before is not None and after is not None:
        sys.stderr.write(LAST_LINE.format(after - before) + "\n")
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
