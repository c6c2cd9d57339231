"""Promises of the supervisor, with real processes: bounded, drained, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from leyden.libs.sandbox import supervisor, supervisors
from leyden.libs.sandbox.supervisors import Supervisors
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from leyden.libs.sandbox.supervisor import Orders, Report

ROOT = Path(__file__).parents[3]


def orders(code: str, folder: Path, **changes: object) -> Orders:
    values: dict[str, object] = {
        "command": [sys.executable, "-S", "-E", "-c", code],
        "environment": {"PATH": os.defpath},
        "stdin": os.devnull,
        "folder": str(folder),
        "timeout_seconds": 60.0,
        "grace_seconds": 0.2,
        "output_bytes": 1000,
        "memory_bytes": None,
        "memory_poll_seconds": 0.5,
        "limits": [],
        "sandbox": {
            "uid": None,
            "landlock": False,
            "hidden": [],
            "visible": str(folder),
            "view": None,
            "writable": None,
            "filter": True,
            "network": True,
        },
    }
    return {**values, **changes}  # type: ignore[return-value]


async def run(code: str, folder: Path, **changes: object) -> Report:
    return await Supervisors().run(orders(code, folder, **changes))


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# Writes its own id and that of every process it leaves: a child, one in its own session, and a daemon.
FORKS = """
import os, sys, time, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
file = open(sys.argv[1] if len(sys.argv) > 1 else 'pids', 'a')
def note(): print(os.getpid(), file=file, flush=True)
note()
for session in (False, True):
    if os.fork() == 0:
        if session:
            os.setsid()
            if os.fork(): os._exit(0)
        note()
        time.sleep(60)
        os._exit(0)
while len(open('pids').read().split()) < 3: time.sleep(0.005)
"""


async def test_exit_code_and_output_are_reported(tmp_path: Path) -> None:
    report = await run("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)", tmp_path)
    assert report.pop("seconds") > 0  # type: ignore[misc]
    assert report == {
        "exit_code": 3,
        "start_error": None,
        "timed_out": False,
        "all_dead": True,
        "stdout": b"out\n",
        "stderr": b"err\n",
        "reward_line": b"",
        "memory_bytes": None,
        "cpu_exceeded": False,
        "lacked_memory": report["lacked_memory"],
    }


async def test_a_reward_line_is_reported_however_much_follows_it(tmp_path: Path) -> None:
    report = await run("""print('{"reward": 0.5}'); print('y' * 3_000_000)""", tmp_path)
    assert report["reward_line"] == b'{"reward": 0.5}'
    assert b"reward" not in report["stdout"]


async def test_the_agent_gets_its_environment_folder_and_nothing_else(tmp_path: Path) -> None:
    code = "import os; print(dict(os.environ), os.getcwd(), os.getsid(0) == os.getpid(), os.listdir('/proc/self/fd'))"
    # LANG, or Python itself would add LC_CTYPE.
    report = await run(code, tmp_path, environment={"LANG": "C.UTF-8"})
    # stdin, stdout, stderr and the directory that listdir itself has open.
    assert report["stdout"].decode() == f"{{'LANG': 'C.UTF-8'}} {tmp_path} True ['0', '1', '2', '3']\n"


async def test_a_timeout_kills_an_agent_that_ignores_sigterm_and_all_its_children(tmp_path: Path) -> None:
    # Long enough for all of them to begin on a machine that is busy.
    report = await run(FORKS + "\ntime.sleep(60)", tmp_path, timeout_seconds=4.0)
    assert (report["timed_out"], report["exit_code"], report["all_dead"]) == (True, -signal.SIGKILL, True)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 3
    assert not any(map(alive, pids))


async def test_a_timeout_lets_an_agent_end_itself_within_the_grace(tmp_path: Path) -> None:
    code = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(7)); time.sleep(60)"
    report = await run(code, tmp_path, timeout_seconds=4.0, grace_seconds=60.0)
    assert (report["timed_out"], report["exit_code"]) == (True, 7)


async def test_background_processes_of_the_agent_die_with_it(tmp_path: Path) -> None:
    report = await run(FORKS, tmp_path)
    assert (report["exit_code"], report["timed_out"], report["all_dead"]) == (0, False, True)
    assert not any(alive(int(pid)) for pid in (tmp_path / "pids").read_text().split())


async def test_excess_output_is_drained_and_only_its_end_is_stored(tmp_path: Path) -> None:
    code = "import os\nfor _ in range(3200): os.write(1, b'x' * 65536)\nprint(); print('the end')"
    report = await run(code, tmp_path)
    assert report["stdout"].endswith(b"\nthe end\n")
    assert len(report["stdout"]) == 1000


async def test_memory_in_use_is_bounded_among_all_processes(tmp_path: Path) -> None:
    code = "import os, time; [os.fork() for _ in range(2)]; held = b'x' * (100 << 20); time.sleep(60)"
    greedy = await run(code, tmp_path, memory_bytes=300 << 20)
    assert greedy["memory_bytes"] is not None
    assert 300 << 20 < greedy["memory_bytes"] < 1 << 30
    assert (greedy["exit_code"], greedy["all_dead"]) == (-signal.SIGKILL, True)
    assert greedy["seconds"] < 30


async def test_memory_that_is_reserved_or_shared_does_not_count(tmp_path: Path) -> None:
    # As V8 does: much more address space than memory.
    code = """
import mmap, os, time
MAP_NORESERVE = 0x4000
room = mmap.mmap(-1, 16 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
held = b'x' * (100 << 20)
os.fork()
time.sleep(3)
"""
    modest = await run(code, tmp_path, memory_bytes=180 << 20)
    assert (modest["exit_code"], modest["memory_bytes"]) == (0, None)


async def test_cpu_time_is_bounded(tmp_path: Path) -> None:
    spinning = await run("while True: pass", tmp_path, limits=[(resource.RLIMIT_CPU, 1, 6)])
    assert (spinning["exit_code"], spinning["cpu_exceeded"]) == (-signal.SIGXCPU, False)


async def test_a_missing_program_is_distinguished_from_a_failing_one(tmp_path: Path) -> None:
    report = await run("", tmp_path, command=["no-such-program"])
    assert report["start_error"] is not None
    assert "No such file" in report["start_error"]


async def test_cancelling_kills_the_tree_before_it_returns(tmp_path: Path) -> None:
    task = asyncio.create_task(run(FORKS + "\ntime.sleep(60)", tmp_path))
    await eventually(lambda: len(read_pids(tmp_path)) == 3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not any(map(alive, read_pids(tmp_path)))


async def test_a_killed_supervisor_leaves_no_process_and_is_an_infrastructure_error(tmp_path: Path) -> None:
    script = f"""
import asyncio, sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from leyden.libs.sandbox.supervisors import ProgramError
from tests.unit.sandbox.test_supervisor import *
async def main():
    supervisor.become_subreaper()
    try:
        await run(FORKS + '\\ntime.sleep(60)', Path({str(tmp_path)!r}))
    except ProgramError:
        print('lost')
asyncio.run(main())
"""
    runner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    await eventually(lambda: len(read_pids(tmp_path)) == 3)
    [supervisor_pid] = children(runner.pid)
    os.kill(supervisor_pid, signal.SIGKILL)
    out, _ = await asyncio.to_thread(runner.communicate, timeout=60)
    assert out == b"lost\n"
    assert not any(map(alive, read_pids(tmp_path)))


async def test_a_killed_supervisor_takes_no_other_child_of_the_runner_with_it(tmp_path: Path) -> None:
    slow = tmp_path / "podman"
    slow.write_text("#!/bin/sh\ncd ${0%/*}; touch asked; while [ ! -e lost ]; do sleep 0.05; done; echo answer\n")
    slow.chmod(0o755)
    script = f"""
import asyncio, sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from leyden.libs.containers.client import ContainerClient
from leyden.libs.sandbox.supervisors import ProgramError
from tests.unit.sandbox.test_supervisor import *
async def main():
    supervisor.become_subreaper()
    folder = Path({str(tmp_path)!r})
    call = asyncio.create_task(ContainerClient({str(slow)!r}).call('inspect'))
    try:
        await run(FORKS + '\\ntime.sleep(60)', folder)
    except ProgramError:
        (folder / 'lost').touch()
    print(await call)
asyncio.run(main())
"""
    runner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    await eventually(lambda: len(read_pids(tmp_path)) == 3 and (tmp_path / "asked").exists())
    [supervisor_pid] = [
        pid for pid in children(runner.pid) if b"sandbox.supervisor" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    os.kill(supervisor_pid, signal.SIGKILL)
    out, _ = await asyncio.to_thread(runner.communicate, timeout=60)
    assert out == b"answer\n\n"
    assert not any(map(alive, read_pids(tmp_path)))


async def test_concurrent_attempts_leave_no_process(tmp_path: Path) -> None:
    before = set(children(os.getpid()))
    opened = Supervisors()
    reports = await asyncio.gather(*(opened.run(orders("print(1)", tmp_path)) for _ in range(3)))
    assert [report["stdout"] for report in reports] == [b"1\n"] * 3
    assert set(children(os.getpid())) <= before


def children(pid: int) -> list[int]:
    return [child for child, parent in supervisor.parents().items() if parent == pid]


async def test_a_killed_runner_leaves_no_orphan(tmp_path: Path) -> None:
    script = f"""
import asyncio, sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from tests.unit.sandbox.test_supervisor import FORKS, run
asyncio.run(run(FORKS + '\\ntime.sleep(60)', Path({str(tmp_path)!r})))
"""
    runner = subprocess.Popen([sys.executable, "-c", script])
    await eventually(lambda: len(read_pids(tmp_path)) == 3)
    family = supervisor.descendants(runner.pid)
    assert len(family) >= 3
    runner.kill()
    runner.wait()
    await eventually(lambda: not any(map(alive, {*family, *read_pids(tmp_path)})))


def test_a_missing_report_is_an_error_of_ours() -> None:
    # In a process of its own: the runner then kills every child that is no supervisor, and the test runner has others.
    script = f"""
import asyncio, sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from leyden.libs.sandbox.supervisors import ProgramError
from tests.unit.sandbox.test_supervisor import run
try:
    asyncio.run(run("", Path("/"), output_bytes=1, timeout_seconds="no number"))
except ProgramError as error:
    print(error)
"""
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "ended without a report" in printed


def read_pids(folder: Path) -> list[int]:
    with contextlib.suppress(FileNotFoundError):
        return [int(pid) for pid in (folder / "pids").read_text().split()]
    return []


def test_a_supervisor_starts_small_and_imports_nothing_inside_the_sandbox() -> None:
    code = """
import sys
sys.path.append(sys.argv[1])
import os
from sandbox import supervisor
before = set(sys.modules)
os.get_exec_path({"PATH": "/bin"})
print(sorted(set(sys.modules) - before), {"typing", "enum", "re", "pathlib"} & set(sys.modules))
"""
    argv = [sys.executable, "-I", "-S", "-c", code, supervisors._LIBS]
    said = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert said.stdout == "[] set()\n"
