"""Evidence of kills for want of memory: from a process's own cgroup, told by a container's first process."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from leyden.libs.embedded import memory_kills as evidence
from leyden.libs.embedded.memory_kills import LAST_LINE, memory_kills, told

TELLING = """
import sys
from pathlib import Path
from leyden.libs.embedded import memory_kills
memory_kills.OWN, memory_kills.CGROUPS = Path({folder!r}, "own"), Path({folder!r})
sys.exit(memory_kills.main())
"""


def cgroup(folder: Path, own: str, file: str, kills: int) -> Path:
    (folder / "own").write_text(own)
    written = folder / file
    written.parent.mkdir(parents=True, exist_ok=True)
    written.write_text(f"max 7\noom_kill {kills}\noom_group_kill 0\n")
    return written


@pytest.mark.parametrize(
    ("own", "file"),
    [
        ("0::/\n", "memory.events"),
        ("0::/user.slice/session-1.scope\n", "user.slice/session-1.scope/memory.events"),
        ("0::/kubepods/pod1\n", "memory.events"),
        ("9:name=systemd:/\n4:cpu,memory:/docker/ab\n0::/\n", "memory/docker/ab/memory.oom_control"),
        ("4:memory:/docker/ab\n0::/\n", "memory/memory.oom_control"),
    ],
)
def test_the_kills_of_the_own_cgroup_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, file: str
) -> None:
    cgroup(tmp_path, own, file, 3)
    monkeypatch.setattr(evidence, "OWN", tmp_path / "own")
    monkeypatch.setattr(evidence, "CGROUPS", tmp_path)
    assert memory_kills() == 3


def test_kills_that_no_file_tells_are_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "OWN", tmp_path / "own")
    assert memory_kills() is None
    (tmp_path / "own").write_text("0::/\n")
    monkeypatch.setattr(evidence, "CGROUPS", tmp_path)
    assert memory_kills() is None


def first_process(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """The container's first process, with a program in the trainer's place."""
    command = [sys.executable, "-c", TELLING.format(folder=str(folder)), sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize(
    ("code", "status", "kills"),
    [
        ("raise SystemExit(0)", 0, None),
        ("raise SystemExit('ValueError: no')", 1, 0),
        ("import os; os.kill(os.getpid(), 9)", 137, 0),
        ("import os; open({file!r}, 'w').write('oom_kill 5'); os.kill(os.getpid(), 9)", 137, 2),
    ],
)
def test_the_first_process_has_the_programs_exit_code_and_tells_the_kills_meanwhile(
    tmp_path: Path, code: str, status: int, kills: int | None
) -> None:
    file = cgroup(tmp_path, "0::/\n", "memory.events", 3)
    ended = first_process(tmp_path, code.format(file=str(file)) if "{file" in code else code)
    assert (ended.returncode, told(ended.stderr)[0]) == (status, kills)


def test_the_count_leaves_the_programs_own_last_line() -> None:
    assert told("ValueError: no\n" + LAST_LINE.format(2)) == (2, "ValueError: no\n")
    assert told("ValueError: no\n") == (None, "ValueError: no\n")


def test_a_request_to_end_reaches_the_program(tmp_path: Path) -> None:
    cgroup(tmp_path, "0::/\n", "memory.events", 3)
    code = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(3));"
        " print('ready', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", TELLING.format(folder=str(tmp_path)), sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 3
        assert told(process.stderr.read())[0] == 0
