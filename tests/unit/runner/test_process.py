"""Promises of the keeper, with real processes: bounded, drained, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from leyden.services.runner import keeper, process
from leyden.services.runner.process import Command, Ended, KeeperLost, Processes

ROOT = Path(__file__).parents[3]


def command(code: str, folder: Path, **changes: object) -> Command:
    values: dict[str, object] = {
        "argv": [sys.executable, "-S", "-E", "-c", code],
        "environment": {"PATH": os.defpath},
        "folder": folder,
        "timeout_seconds": 60.0,
        "grace_seconds": 0.2,
        "output_bytes": 1000,
    }
    return Command(**{**values, **changes})  # type: ignore[arg-type]


async def run(code: str, folder: Path, **changes: object) -> Ended:
    with contextlib.closing(Processes()) as processes:
        return await processes.run(command(code, folder, **changes))


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def until(condition: object, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "did not come true in time"
        await asyncio.sleep(0.01)


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


async def test_exit_code_output_and_costs_are_told(tmp_path: Path) -> None:
    ended = await run("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)", tmp_path)
    assert (ended.exit_code, ended.stdout, ended.stderr, ended.timed_out, ended.clean, ended.start_error) == (
        *(3, b"out\n", b"err\n", False, True),
        None,
    )
    assert ended.cpu_seconds > 0
    assert ended.max_rss_bytes > 1_000_000


async def test_the_agent_gets_its_environment_folder_and_nothing_else(tmp_path: Path) -> None:
    code = "import os; print(dict(os.environ), os.getcwd(), os.getsid(0) == os.getpid(), os.listdir('/proc/self/fd'))"
    # LANG, or Python itself would add LC_CTYPE.
    ended = await run(code, tmp_path, environment={"LANG": "C.UTF-8"})
    # stdin, stdout, stderr and the directory that listdir itself has open.
    assert ended.stdout.decode() == f"{{'LANG': 'C.UTF-8'}} {tmp_path} True ['0', '1', '2', '3']\n"


async def test_a_timeout_kills_an_agent_that_ignores_sigterm_and_all_its_children(tmp_path: Path) -> None:
    # Long enough for all of them to begin on a machine that is busy.
    ended = await run(FORKS + "\ntime.sleep(60)", tmp_path, timeout_seconds=4.0)
    assert (ended.timed_out, ended.exit_code, ended.clean) == (True, -signal.SIGKILL, True)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 3
    assert not any(map(alive, pids))


async def test_a_timeout_lets_an_agent_end_itself_within_the_grace(tmp_path: Path) -> None:
    code = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(7)); time.sleep(60)"
    ended = await run(code, tmp_path, timeout_seconds=4.0, grace_seconds=60.0)
    assert (ended.timed_out, ended.exit_code) == (True, 7)


async def test_what_the_agent_leaves_behind_dies_with_it(tmp_path: Path) -> None:
    ended = await run(FORKS, tmp_path)
    assert (ended.exit_code, ended.timed_out, ended.clean) == (0, False, True)
    assert not any(alive(int(pid)) for pid in (tmp_path / "pids").read_text().split())


async def test_a_flood_is_drained_and_only_its_end_is_kept(tmp_path: Path) -> None:
    code = "import os\nfor _ in range(3200): os.write(1, b'x' * 65536)\nprint(); print('the end')"
    ended = await run(code, tmp_path)
    assert ended.stdout_total == 3200 * 65536 + len("\nthe end\n")
    assert ended.stdout.endswith(b"\nthe end\n")
    assert len(ended.stdout) == 1000


async def test_memory_and_cpu_are_bounded(tmp_path: Path) -> None:
    greedy = await run("bytearray(300 << 20)", tmp_path, memory_bytes=200 << 20)
    assert greedy.exit_code == 1
    assert b"MemoryError" in greedy.stderr
    spinning = await run("while True: pass", tmp_path, cpu_seconds=1)
    assert spinning.exit_code == -signal.SIGXCPU


async def test_a_program_that_does_not_exist_is_told_apart_from_one_that_fails(tmp_path: Path) -> None:
    ended = await run("", tmp_path, argv=["no-such-program"])
    assert ended.start_error is not None
    assert "No such file" in ended.start_error


async def test_cancelling_kills_the_tree_before_it_returns(tmp_path: Path) -> None:
    task = asyncio.create_task(run(FORKS + "\ntime.sleep(60)", tmp_path))
    await until(lambda: len(read_pids(tmp_path)) == 3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not any(map(alive, read_pids(tmp_path)))


async def test_a_killed_keeper_leaves_nothing_and_is_told(tmp_path: Path) -> None:
    script = f"""
import asyncio, sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from tests.unit.runner.test_process import FORKS, command
from leyden.services.runner.process import KeeperLost, Processes
async def main():
    processes = Processes()
    processes.adopt_orphans()
    try:
        await processes.run(command(FORKS + '\\ntime.sleep(60)', Path({str(tmp_path)!r})))
    except KeeperLost:
        print('lost')
asyncio.run(main())
"""
    runner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    await until(lambda: len(read_pids(tmp_path)) == 3)
    [nursery] = children(runner.pid)
    [keeper_pid] = children(nursery)
    os.kill(keeper_pid, signal.SIGKILL)
    out, _ = await asyncio.to_thread(runner.communicate, timeout=60)
    assert out == b"lost\n"
    assert not any(map(alive, read_pids(tmp_path)))


async def test_attempts_survive_the_process_that_keepers_are_forked_from(tmp_path: Path) -> None:
    with contextlib.closing(Processes()) as processes:
        slow = asyncio.create_task(processes.run(command(SLOW, tmp_path)))
        await until(lambda: read_pids(tmp_path))
        [nursery] = [pid for pid in children(os.getpid()) if "keeper" in arguments(pid)]
        os.kill(nursery, signal.SIGKILL)
        await until(lambda: not alive(nursery))
        quick = await processes.run(command("print('quick')", tmp_path))
        (tmp_path / "go").touch()
        ended = await slow
    assert (quick.stdout, quick.exit_code) == (b"quick\n", 0)
    assert (ended.stdout, ended.exit_code) == (b"slow\n", 0)
    assert not any(map(alive, read_pids(tmp_path)))


async def test_a_nursery_that_stands_still_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "ANSWER_SECONDS", 5.0)
    with contextlib.closing(Processes()) as processes:
        await processes.run(command("", tmp_path))
        [nursery] = [pid for pid in children(os.getpid()) if "keeper" in arguments(pid)]
        os.kill(nursery, signal.SIGSTOP)
        with pytest.raises(KeeperLost, match="stands still"):
            await processes.run(command("", tmp_path))
        assert (await processes.run(command("", tmp_path))).exit_code == 0
        assert not alive(nursery)


async def test_nothing_is_left_of_what_keepers_are_forked_from(tmp_path: Path) -> None:
    with contextlib.closing(Processes()) as processes:
        await asyncio.gather(*(processes.run(command("", tmp_path)) for _ in range(3)))
        [nursery] = [pid for pid in children(os.getpid()) if "keeper" in arguments(pid)]
        await until(lambda: not children(nursery))
    assert not Path(f"/proc/{nursery}").exists()


def children(pid: int) -> list[int]:
    return [child for child, parent in keeper.parents().items() if parent == pid]


def arguments(pid: int) -> str:
    """None of a process that has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


# Says when it has begun, and waits for a file.
SLOW = """
import os, time
print(os.getpid(), file=open('pids', 'a'))
while not os.path.exists('go'): time.sleep(0.01)
print('slow')
"""


async def test_a_killed_runner_leaves_no_orphan(tmp_path: Path) -> None:
    script = f"""
import asyncio, sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from tests.unit.runner.test_process import FORKS, command
from leyden.services.runner.process import Processes
asyncio.run(Processes().run(command(FORKS + '\\ntime.sleep(60)', Path({str(tmp_path)!r}))))
"""
    runner = subprocess.Popen([sys.executable, "-c", script])
    await until(lambda: len(read_pids(tmp_path)) == 3)
    family = keeper.descendants(runner.pid)
    assert len(family) >= 3
    runner.kill()
    runner.wait()
    await until(lambda: not any(map(alive, {*family, *read_pids(tmp_path)})))


async def test_a_missing_report_is_an_error_of_ours() -> None:
    with pytest.raises(KeeperLost):
        await run("", Path("/"), output_bytes=1, timeout_seconds="no number")


def read_pids(folder: Path) -> list[int]:
    with contextlib.suppress(FileNotFoundError):
        return [int(pid) for pid in (folder / "pids").read_text().split()]
    return []


def test_a_keeper_starts_small_and_imports_nothing_once_walls_stand() -> None:
    code = """
import sys
sys.path.insert(0, sys.argv[1])
import leyden.services.runner.keeper, os
before = set(sys.modules)
os.get_exec_path({"PATH": "/bin"})
print(sorted(set(sys.modules) - before), "typing" in sys.modules)
"""
    argv = [sys.executable, "-I", "-S", "-c", code, str(ROOT)]
    told = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert told.stdout == "[] False\n"
