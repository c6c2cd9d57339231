"""Supervision of trainers, with small processes in a trainer's place."""

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
from leyden.services.controller.settings import Settings
from leyden.services.controller.trainers import Trainers, last_words

NOTE = "import os, sys, time; open('pids', 'a').write(f'{os.getpid()}\\n'); "


@asynccontextmanager
async def supervised(folder: Path, code: str, **settings: object) -> AsyncIterator[Trainers]:
    command = [sys.executable, "-c", f"import os; os.chdir({str(folder)!r}); {code}"]
    values = {"log_folder": folder, "trainer_stop_seconds": 0.3, "trainer_command": command, **settings}
    made = Trainers(Settings(**values))  # type: ignore[arg-type]
    yield made
    await made.stop()


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


async def test_one_trainer_runs_however_often_it_is_wanted_and_stops_when_it_is_not(tmp_path: Path) -> None:
    async with supervised(tmp_path, NOTE + "time.sleep(60)") as made:
        for _ in range(3):
            made.want({"run-a": 0})
        await until(lambda: pids(tmp_path))
        made.want({"run-a": 0})
        [pid] = pids(tmp_path)
        made.want({})
        await until(lambda: not alive(pid))
        assert made.take_failures() == {}


async def test_a_trainer_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    code = "import signal; signal.signal(15, signal.SIG_IGN); " + NOTE + "time.sleep(60)"
    async with supervised(tmp_path, code) as made:
        made.want({"run-a": 0})
        await until(lambda: pids(tmp_path))
    assert not alive(pids(tmp_path)[0])


async def test_a_trainer_without_progress_is_given_up_with_its_last_words(tmp_path: Path) -> None:
    async with supervised(tmp_path, NOTE + "sys.exit('no memory')", trainer_restarts=2) as made:
        made.want({"run-a": 0})
        failed: dict[str, str] = {}
        await until(lambda: failed.update(made.take_failures()) or failed)
        assert failed == {"run-a": "the trainer ended with code 1 3 times without a step: no memory"}
        assert len(pids(tmp_path)) == 3


async def test_being_killed_is_no_failure_of_a_trainer_yet_not_for_ever(tmp_path: Path) -> None:
    code = NOTE + "print('at work', flush=True); os.kill(os.getpid(), 9)"
    async with supervised(tmp_path, code, trainer_restarts=0, trainer_kills=4) as made:
        made.want({"run-a": 0})
        failed: dict[str, str] = {}
        await until(lambda: failed.update(made.take_failures()) or failed)
        assert failed == {"run-a": "the trainer ended with code -9 5 times without a step: at work"}
        assert len(pids(tmp_path)) == 5


async def test_a_step_in_between_forgives_a_crash(tmp_path: Path) -> None:
    async with supervised(tmp_path, NOTE + "time.sleep(0.05); sys.exit(1)", trainer_restarts=1) as made:
        # Every look sees one step more.
        for step in range(1000):
            made.want({"run-a": step})
            if len(pids(tmp_path)) > 4:
                break
            await asyncio.sleep(0.01)
        assert made.take_failures() == {}


async def test_a_program_that_cannot_be_started_is_given_up(tmp_path: Path) -> None:
    made = Trainers(Settings(log_folder=tmp_path / "file" / "logs"))
    (tmp_path / "file").write_text("no folder")
    made.want({"run-a": 0})
    failed: dict[str, str] = {}
    await until(lambda: failed.update(made.take_failures()) or failed)
    assert failed["run-a"].startswith("the trainer could not be started")
    await made.stop()


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


def test_launch_does_nothing_when_its_parent_is_gone() -> None:
    command = [sys.executable, "-I", "-S", str(launch.__file__), str(os.getpid() + 1), "echo", "started"]
    assert subprocess.run(command, capture_output=True, check=True).stdout == b""


def test_last_words_are_the_last_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("x" * 5000 + "\nTraceback\nValueError: no model\n\n")
    assert last_words(log) == "ValueError: no model"
    log.write_text("")
    assert last_words(log) == ""
