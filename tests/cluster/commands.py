"""Does the `leyden` command reach a release by nothing but a kubectl context?"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.cluster.release import NAMESPACE, SERVICES, Release
from tests.support.tools import KUBECTL


def check(release: Release) -> None:
    """Lists the datasets, reads the log of each service, and asks the doctor."""
    assert "flights" in _leyden(release, "dataset", "list")
    for service in SERVICES:
        assert f"/{service}] " in _leyden(release, "logs", service, "--lines", "5"), service
    found = _leyden(release, "doctor", "--cluster")
    print("  " + found.splitlines()[-1], flush=True)
    assert "problems: none" in found, found


def _leyden(release: Release, *words: str) -> str:
    """The output of a command that knows the context alone.

    Raises: RuntimeError: its exit status is not 0
    """
    environment = {name: value for name, value in release.node.environment.items() if not name.startswith("LEYDEN_")}
    environment["PATH"] = os.pathsep.join([str(KUBECTL.parent), environment["PATH"]])
    context = release.node.kubectl("config", "current-context").strip()
    program = Path(sys.executable).with_name("leyden")
    done = subprocess.run(
        [program, "--context", context, "--namespace", NAMESPACE, *words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"leyden {' '.join(words)}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout
