"""The beginning of every child of a supervisor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from leyden.libs.cli import launch

TELLING = """
import gc, importlib, json, sys
import record

def found(name):
    try:
        return importlib.import_module(name) is not None
    except ImportError:
        return False

print(json.dumps([__name__, sys.argv[1:], gc.isenabled(), record.OURS, list(filter(found, ["rich", "psutil"]))]))
"""


def launched(folder: Path, supervisor: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "telling.py").write_text(TELLING)
    # Of a name that the launcher's own folder has, too.
    (folder / "record.py").write_text("OURS = True\n")
    return subprocess.run(
        [sys.executable, "-P", str(launch.__file__), str(supervisor), "telling", *arguments],
        env={"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_module_runs_as_main_with_its_arguments_and_without_the_collector(tmp_path: Path) -> None:
    result = launched(tmp_path, os.getpid(), "--run", "it")
    assert (result.returncode, json.loads(result.stdout)[:4]) == (0, ["__main__", ["--run", "it"], False, True])


def test_what_no_service_uses_is_not_found(tmp_path: Path) -> None:
    result = launched(tmp_path, os.getpid())
    assert (result.returncode, json.loads(result.stdout)[4]) == (0, [])


def test_nothing_runs_when_the_supervisor_is_gone(tmp_path: Path) -> None:
    result = launched(tmp_path, os.getpid() + 1)
    assert (result.returncode, result.stdout) == (1, "")
