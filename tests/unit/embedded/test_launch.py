"""The launcher that every child process of a supervisor runs first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from leyden.libs.embedded.launch import tied

REPORTING = """
import json, sys
import servers

print(json.dumps([__name__, sys.argv[1:], servers.OURS]))
"""


def launched(folder: Path, supervisor: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "reporting.py").write_text(REPORTING)
    # A module of this name is in the launcher's own folder, too.
    (folder / "servers.py").write_text("OURS = True\n")
    command = list(tied(sys.executable, "-P", "-m", "reporting", *arguments))
    command[command.index(str(os.getpid()))] = str(supervisor)
    return subprocess.run(
        command,
        env={"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_module_runs_as_main_with_its_arguments(tmp_path: Path) -> None:
    result = launched(tmp_path, os.getpid(), "--run", "it")
    assert (result.returncode, json.loads(result.stdout)) == (0, ["__main__", ["--run", "it"], True])


def test_a_child_of_a_dead_supervisor_exits_at_once(tmp_path: Path) -> None:
    result = launched(tmp_path, os.getpid() + 1)
    assert (result.returncode, result.stdout) == (1, "")
