"""Supervision of trainers: with small processes in a trainer's place, and with a backend that outlives its leader."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from leyden.services.controller import launch, trainers
from leyden.services.controller.process_trainers import ProcessTrainers
from leyden.services.controller.settings import Settings
from leyden.services.controller.trainer_backend import (
    LESS_MEMORY,
    TrainerAttempt,
    TrainerState,
    TrainerStatus,
    end_of,
    last_line,
)
from leyden.services.controller.trainers import TrainerSupervisor

NOTE = "import os, sys, time; open('pids', 'a').write(f'{os.getpid()}\\n'); "


@asynccontextmanager
async def supervised(folder: Path, code: str, **settings: object) -> AsyncIterator[TrainerSupervisor]:
    command = [sys.executable, "-c", f"import os; os.chdir({str(folder)!r}); {code}"]
    values = {"log_folder": folder, "trainer_stop_seconds": 0.3, "trainer_command": command, **settings}
    chosen = Settings(**values)  # type: ignore[arg-type]
    made = TrainerSupervisor(chosen, ProcessTrainers(chosen))
    yield made
    await made.close()


def pids(folder: Path) -> list[int]:
    path = folder / "pids"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


async def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not come true in time"
        await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainers, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(trainers, "POLL_SECONDS", 0.01)


class Cluster:
    """A backend whose trainers outlive the controller; tests set their statuses."""

    def __init__(self) -> None:
        self.statuses: dict[TrainerAttempt, TrainerStatus] = {}
        self.journal: list[str] = []

    async def last_attempt(self, run_id: str) -> int:
        return max((attempt.number for attempt in self.statuses if attempt.run_id == run_id), default=0)

    async def start(self, attempt: TrainerAttempt) -> None:
        if attempt not in self.statuses:
            self.journal.append(f"start {attempt.name}")
            self.statuses[attempt] = TrainerStatus(TrainerState.RUNNING, "on node a")

    async def status(self, attempt: TrainerAttempt) -> TrainerStatus:
        return self.statuses[attempt]

    async def stop(self, attempt: TrainerAttempt) -> None:
        self.journal.append(f"stop {attempt.name}")

    async def close(self) -> None:
        pass


async def test_one_trainer_runs_however_often_it_is_wanted_and_stops_when_it_is_not(tmp_path: Path) -> None:
    async with supervised(tmp_path, NOTE + "time.sleep(60)") as made:
        for _ in range(3):
            made.reconcile({"run-a": 0})
        await until(lambda: pids(tmp_path))
        made.reconcile({"run-a": 0})
        [pid] = pids(tmp_path)
        made.reconcile({})
        await until(lambda: not alive(pid))
        assert made.pop_failures() == {}


async def test_a_trainer_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    code = "import signal; signal.signal(15, signal.SIG_IGN); " + NOTE + "time.sleep(60)"
    async with supervised(tmp_path, code) as made:
        made.reconcile({"run-a": 0})
        await until(lambda: pids(tmp_path))
    assert not alive(pids(tmp_path)[0])


async def test_a_trainer_without_progress_is_not_restarted_and_its_last_line_is_reported(tmp_path: Path) -> None:
    async with supervised(tmp_path, NOTE + "sys.exit('no memory')", trainer_restarts=2) as made:
        made.reconcile({"run-a": 0})
        failed: dict[str, str] = {}
        await until(lambda: failed.update(made.pop_failures()) or failed)
        assert failed == {"run-a": "the trainer ended 3 times without a step: exit code 1: no memory"}
        assert len(pids(tmp_path)) == 3


async def test_being_killed_is_no_failure_of_a_trainer_yet_not_for_ever(tmp_path: Path) -> None:
    code = NOTE + "print('at work', flush=True); os.kill(os.getpid(), 9)"
    async with supervised(tmp_path, code, trainer_restarts=0, trainer_kills=4) as made:
        made.reconcile({"run-a": 0})
        failed: dict[str, str] = {}
        await until(lambda: failed.update(made.pop_failures()) or failed)
        assert failed == {
            "run-a": "the trainer ended 5 times without a step: killed by signal 9, probably out of memory: give this"
            f" machine more memory, or {LESS_MEMORY}: at work"
        }
        assert len(pids(tmp_path)) == 5


@pytest.mark.parametrize(
    ("code", "line", "reason"),
    [
        (-9, "at work", f"killed by signal 9, probably out of memory: add some, or {LESS_MEMORY}: at work"),
        (-15, "at work", "killed by signal 15: at work"),
        (1, "ValueError: no", "exit code 1: ValueError: no"),
        (
            1,
            "traceback : Signal 9 (SIGKILL) received by PID 7",
            f"exit code 1, probably out of memory: add some, or {LESS_MEMORY}: traceback : Signal 9 (SIGKILL) received"
            " by PID 7",
        ),
    ],
)
def test_a_trainer_that_was_killed_for_memory_names_the_settings(code: int, line: str, reason: str) -> None:
    state = TrainerState.KILLED if code < 0 else TrainerState.ENDED
    assert end_of(code, line, "add some") == (state, reason)


async def test_a_step_in_between_forgives_a_crash(tmp_path: Path) -> None:
    async with supervised(tmp_path, NOTE + "time.sleep(0.05); sys.exit(1)", trainer_restarts=1) as made:
        # Every tick sees one step more.
        for step in range(1000):
            made.reconcile({"run-a": step})
            if len(pids(tmp_path)) > 4:
                break
            await asyncio.sleep(0.01)
        assert made.pop_failures() == {}


async def test_a_program_that_cannot_start_is_not_restarted(tmp_path: Path) -> None:
    settings = Settings(log_folder=tmp_path / "file" / "logs")
    made = TrainerSupervisor(settings, ProcessTrainers(settings))
    (tmp_path / "file").write_text("no folder")
    made.reconcile({"run-a": 0})
    failed: dict[str, str] = {}
    await until(lambda: failed.update(made.pop_failures()) or failed)
    assert failed["run-a"].startswith("the trainer could not be started")
    await made.close()


async def test_a_leader_adopts_the_trainer_of_the_last_one_and_stops_it_once_no_run_needs_it() -> None:
    cluster, attempt = Cluster(), TrainerAttempt("run-a", 1)
    first = TrainerSupervisor(Settings(), cluster)
    first.reconcile({"run-a": 0})
    await until(lambda: cluster.statuses)
    await first.close()
    assert cluster.journal == ["start trainer-run-a-1"]
    cluster.statuses[attempt] = TrainerStatus(TrainerState.WAITING, "no node has a free GPU")
    second = TrainerSupervisor(Settings(), cluster)
    second.reconcile({"run-a": 0})
    await until(lambda: second.waiting_reason("run-a") == "no node has a free GPU")
    cluster.statuses[attempt] = TrainerStatus(TrainerState.RUNNING, "on node a")
    await until(lambda: second.waiting_reason("run-a") is None)
    second.reconcile({})
    await until(lambda: len(cluster.journal) == 2)
    assert cluster.journal == ["start trainer-run-a-1", "stop trainer-run-a-1"]
    await second.close()


async def test_an_attempt_that_is_over_is_followed_by_the_next_number() -> None:
    cluster = Cluster()
    cluster.statuses[TrainerAttempt("run-a", 7)] = TrainerStatus(TrainerState.KILLED, "evicted from node a")
    made = TrainerSupervisor(Settings(trainer_restarts=0, trainer_kills=1), cluster)
    made.reconcile({"run-a": 0})
    for number in (8, 9):
        attempt = TrainerAttempt("run-a", number)
        await until(lambda: attempt in cluster.statuses)  # noqa: B023
        cluster.statuses[attempt] = TrainerStatus(TrainerState.KILLED, "evicted from node a")
    failed: dict[str, str] = {}
    await until(lambda: failed.update(made.pop_failures()) or failed)
    assert failed == {"run-a": "the trainer ended 2 times without a step: evicted from node a"}
    assert cluster.journal == ["start trainer-run-a-8", "start trainer-run-a-9"]
    await made.close()


async def test_starting_an_attempt_twice_starts_one_process(tmp_path: Path) -> None:
    command = [sys.executable, "-c", f"import os, sys, time; os.chdir({str(tmp_path)!r}); {NOTE} time.sleep(60)"]
    backend = ProcessTrainers(Settings(log_folder=tmp_path, trainer_command=command, trainer_stop_seconds=0.3))
    attempt = TrainerAttempt("run-a", 1)
    for _ in range(2):
        await backend.start(attempt)
    await until(lambda: pids(tmp_path))
    assert (await backend.status(attempt)).state is TrainerState.RUNNING
    assert await backend.last_attempt("run-a") == 1
    for _ in range(2):
        await backend.stop(attempt)
    assert len(pids(tmp_path)) == 1
    assert (await backend.status(attempt)).state is TrainerState.KILLED


async def test_a_trainer_dies_with_a_killed_controller(tmp_path: Path) -> None:
    agent = f"import os, time; open({str(tmp_path / 'pids')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    parent = subprocess.Popen(
        [
            *(sys.executable, "-c"),
            "import os, subprocess, sys; subprocess.Popen([sys.executable, '-I', '-S', sys.argv[1], str(os.getpid()),"
            " sys.executable, '-c', sys.argv[2]]).wait()",
            *(str(launch.__file__), agent),
        ]
    )
    await until(lambda: pids(tmp_path))
    parent.kill()
    parent.wait()
    await until(lambda: not alive(pids(tmp_path)[0]))


def test_launch_does_nothing_when_its_parent_is_dead() -> None:
    command = [sys.executable, "-I", "-S", str(launch.__file__), str(os.getpid() + 1), "echo", "started"]
    assert subprocess.run(command, capture_output=True, check=True).stdout == b""


@pytest.mark.parametrize(
    ("output", "line"),
    [
        ("x" * 5000 + "\nTraceback\nValueError: no model\n\n", "ValueError: no model"),
        (f"traceback : Traceback\n  RuntimeError: no model\n  \n{'=' * 60}\n", "RuntimeError: no model"),
        ("", ""),
    ],
)
def test_the_last_line_is_the_last_one_with_a_word(output: str, line: str) -> None:
    assert last_line(output) == line
