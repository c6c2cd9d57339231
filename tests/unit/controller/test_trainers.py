"""Supervision of trainers: with small processes in a trainer's place, and with a backend that outlives its leader."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from leyden.libs.embedded import memory_kills
from leyden.libs.store.database import StoreAway
from leyden.libs.store.runs.trainer_ends import TrainerEnd
from leyden.services.controller.settings import Settings
from leyden.services.controller.trainers import process as process_trainers
from leyden.services.controller.trainers import supervisor as trainers
from leyden.services.controller.trainers.backend import (
    LESS_MEMORY,
    TrainerAttempt,
    TrainerState,
    TrainerStatus,
    end_of,
    last_line,
)
from leyden.services.controller.trainers.models import TrainerModels
from leyden.services.controller.trainers.process import ProcessTrainers
from leyden.services.controller.trainers.supervisor import TrainerSupervisor, verdict
from tests.fakes.trainer_journal import RememberedEnds
from tests.support.waiting import eventually

NOTE = "import os, sys, time; open('pids', 'a').write(f'{os.getpid()}\\n'); "


@asynccontextmanager
async def supervised(
    folder: Path, code: str, journal: RememberedEnds | None = None, **settings: object
) -> AsyncIterator[TrainerSupervisor]:
    command = [sys.executable, "-c", f"import os; os.chdir({str(folder)!r}); {code}"]
    values = {"log_folder": folder, "trainer_stop_seconds": 0.3, "trainer_command": command, **settings}
    chosen = Settings(**values)  # type: ignore[arg-type]
    made = TrainerSupervisor(chosen, ProcessTrainers(chosen), journal or RememberedEnds())
    yield made
    await made.close()


def pids(folder: Path) -> list[int]:
    path = folder / "pids"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainers, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(trainers, "POLL_SECONDS", 0.01)


AT_WORK = TrainerStatus(TrainerState.RUNNING, "on node a")


class Cluster:
    """A backend whose trainers outlive the controller; tests set their statuses. `beginning`: of every new attempt."""

    def __init__(self, beginning: TrainerStatus = AT_WORK) -> None:
        self.beginning, self.asked = beginning, 0
        self.statuses: dict[TrainerAttempt, TrainerStatus] = {}
        self.journal: list[str] = []

    async def last_attempt(self, run_id: str) -> int:
        return max((attempt.number for attempt in self.statuses if attempt.run_id == run_id), default=0)

    async def live_attempts(self) -> list[TrainerAttempt]:
        return [attempt for attempt, status in self.statuses.items() if not status.state.is_over]

    async def start(self, attempt: TrainerAttempt, models: TrainerModels) -> None:
        if attempt not in self.statuses:
            self.journal.append(f"start {attempt.name}")
            self.statuses[attempt] = self.beginning

    async def status(self, attempt: TrainerAttempt) -> TrainerStatus:
        self.asked += 1
        return self.statuses[attempt]

    async def stop(self, attempt: TrainerAttempt) -> None:
        self.journal.append(f"stop {attempt.name}")

    async def close(self) -> None:
        pass


async def test_one_trainer_runs_however_often_it_is_wanted_and_stops_when_it_is_not(tmp_path: Path) -> None:
    async with supervised(tmp_path, NOTE + "time.sleep(60)") as made:
        for _ in range(3):
            made.reconcile({"run-a": 0})
        await eventually(lambda: pids(tmp_path))
        made.reconcile({"run-a": 0})
        [pid] = pids(tmp_path)
        made.reconcile({})
        await eventually(lambda: not alive(pid))
        assert made.pop_failures() == {}


async def test_a_trainer_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    code = "import signal; signal.signal(15, signal.SIG_IGN); " + NOTE + "time.sleep(60)"
    async with supervised(tmp_path, code) as made:
        made.reconcile({"run-a": 0})
        await eventually(lambda: pids(tmp_path))
    assert not alive(pids(tmp_path)[0])


async def test_a_trainer_without_progress_is_not_restarted_and_its_last_line_is_reported(tmp_path: Path) -> None:
    """The second time with the same cause, numbers apart."""
    code = NOTE + "sys.exit(f'ValueError: no model in row {os.getpid()}')"
    async with supervised(tmp_path, code, trainer_restarts=9) as made:
        failed = await failures(made)
        assert failed["run-a"].startswith("the trainer ended 2 times without a step: exit code 1: ValueError: no model")
        assert len(pids(tmp_path)) == 2


@pytest.mark.parametrize(
    ("words", "starts"),
    [
        ("ConnectionError: reset", 3),
        ("OSError: [Errno 5] input/output error", 3),
        ("torch.OutOfMemoryError: the learner needs too much memory: lower training.micro_batch_tokens", 2),
        ("leyden.services.trainer.loop.PoliciesDisagree: differ by 2", 1),
        ("leyden.services.trainer.model.load.UnsupportedModel: falcon: choose another model", 1),
    ],
)
async def test_a_cause_is_tried_again_as_often_as_trying_may_help(tmp_path: Path, words: str, starts: int) -> None:
    async with supervised(tmp_path, NOTE + f"sys.exit({words!r})", trainer_restarts=2) as made:
        failed = await failures(made)
        assert failed["run-a"].endswith(words)
        assert len(pids(tmp_path)) == starts


async def failures(made: TrainerSupervisor) -> dict[str, str]:
    """Those of a run without a step, once it has failed."""
    made.reconcile({"run-a": 0})
    failed: dict[str, str] = {}
    await eventually(lambda: failed.update(made.pop_failures()) or failed)
    return failed


@pytest.mark.parametrize("counts", ["its cgroup", "the machine alone"])
async def test_a_trainer_that_the_kernel_kills_for_memory_twice_fails_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counts: str
) -> None:
    counter = own_cgroup(tmp_path, monkeypatch)
    if counts != "its cgroup":
        monkeypatch.setattr(memory_kills, "OWN", tmp_path / "absent")
        monkeypatch.setattr(memory_kills, "MACHINE", counter)
    kill = (
        "kills = int(open('memory.events').read().split()[1]);"
        " open('memory.events', 'w').write(f'oom_kill {kills + 1}\\n'); os.kill(os.getpid(), 9)"
    )
    journal = RememberedEnds()
    async with supervised(tmp_path, NOTE + "print('at work', flush=True); " + kill, journal) as made:
        failed = await failures(made)
    remedy = f"give this machine more memory, or {LESS_MEMORY}"
    assert failed == {
        "run-a": f"the trainer ended 2 times without a step: killed by signal 9, out of memory: {remedy}: at work"
    }
    assert [(end.attempt, end.state) for end in journal.ends] == [(1, "out_of_memory"), (2, "out_of_memory")]
    assert journal.ends[-1].output.endswith("at work\n")
    assert counter.read_text() == "oom_kill 5\n"


async def test_a_kill_long_before_a_sigkill_is_not_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent of the same machine, which the kernel killed for memory while the trainer was at work."""
    counter = own_cgroup(tmp_path, monkeypatch)
    monkeypatch.setattr(process_trainers, "RECENT_SECONDS", 0.05)
    journal = RememberedEnds()
    async with supervised(tmp_path, NOTE + "time.sleep(60)", journal, trainer_kills=0) as made:
        made.reconcile({"run-a": 0})
        await eventually(lambda: pids(tmp_path))
        counter.write_text("oom_kill 4\n")
        await asyncio.sleep(0.5)
        os.kill(pids(tmp_path)[0], 9)
        await eventually(lambda: journal.ends)
    assert (journal.ends[0].state, journal.ends[0].reason) == ("killed", "killed by signal 9: no output")


def own_cgroup(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which this process reads kills for want of memory, three so far."""
    (folder / "own").write_text("0::/\n")
    (folder / "memory.events").write_text("oom_kill 3\n")
    monkeypatch.setattr(memory_kills, "OWN", folder / "own")
    monkeypatch.setattr(memory_kills, "CGROUPS", folder)
    return folder / "memory.events"


async def test_pauses_between_starts_grow_for_kills_too(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses, sleep = list[float](), asyncio.sleep

    async def noted(seconds: float) -> None:
        if seconds != trainers.POLL_SECONDS:
            pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(trainers.asyncio, "sleep", noted)
    monkeypatch.setattr(trainers, "FIRST_PAUSE_SECONDS", 1.0)
    cluster = Cluster(TrainerStatus(TrainerState.KILLED, "evicted from node a"))
    made = TrainerSupervisor(Settings(trainer_kills=7), cluster, RememberedEnds())
    await failures(made)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    await made.close()


async def test_a_change_of_leaders_forgives_no_end() -> None:
    journal, crash = (
        RememberedEnds(),
        TrainerStatus(TrainerState.ENDED, "exit code 1: ValueError: no", "a\nValueError: no"),
    )
    cluster = Cluster(crash)
    first = TrainerSupervisor(Settings(), cluster, journal)
    first.reconcile({"run-a": 0})
    await eventually(lambda: journal.ends)
    await first.close()
    second = TrainerSupervisor(Settings(), cluster, journal)
    assert await failures(second) == {"run-a": "the trainer ended 2 times without a step: exit code 1: ValueError: no"}
    assert [(end.attempt, end.output) for end in journal.ends] == [(1, crash.output), (2, crash.output)]
    await second.close()


async def test_a_planned_end_is_none(tmp_path: Path) -> None:
    """Neither that of a paused run, nor that of a trainer whose work is done."""
    journal = RememberedEnds()
    async with supervised(tmp_path, NOTE + "time.sleep(60)", journal) as made:
        for starts in (1, 2):
            # Each tick asks again: the first trainer may be dead and not yet noticed.
            await eventually(lambda: made.reconcile({"run-a": 0}) or len(pids(tmp_path)) == starts)  # noqa: B023
            made.reconcile({})
            await eventually(lambda: not alive(pids(tmp_path)[-1]))
    async with supervised(tmp_path, NOTE + "sys.exit(0)", journal, trainer_restarts=1) as made:
        assert await failures(made) == {"run-a": "the trainer left its run 2 times"}
    assert journal.ends == []


async def test_an_end_that_the_store_cannot_record_yet_is_recorded_before_the_next_start() -> None:
    class Away(RememberedEnds):
        refusals = 3

        async def record(self, end: TrainerEnd) -> Sequence[TrainerEnd]:
            self.refusals -= 1
            if self.refusals >= 0:
                raise StoreAway("Postgres is away")
            return await super().record(end)

    journal = Away()
    cluster = Cluster(TrainerStatus(TrainerState.ENDED, "exit code 1: ValueError: no"))
    made = TrainerSupervisor(Settings(), cluster, journal)
    await failures(made)
    assert [end.attempt for end in journal.ends] == [1, 2]
    await made.close()


async def test_being_killed_is_no_failure_of_a_trainer_yet_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_cgroup(tmp_path, monkeypatch)
    code = NOTE + "print('at work', flush=True); os.kill(os.getpid(), 9)"
    async with supervised(tmp_path, code, trainer_restarts=0, trainer_kills=4) as made:
        made.reconcile({"run-a": 0})
        failed: dict[str, str] = {}
        await eventually(lambda: failed.update(made.pop_failures()) or failed)
        assert failed == {"run-a": "the trainer ended 5 times without a step: killed by signal 9: at work"}
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
    state = TrainerState.ENDED if line == "ValueError: no" else TrainerState.KILLED
    assert end_of(code, line, "add some") == (state, reason, line)


@pytest.mark.parametrize(("number", "name"), [(6, "SIGABRT"), (7, "SIGBUS"), (15, "SIGTERM")])
def test_a_worker_that_a_signal_ends_is_killed_like_a_trainer_alone(number: int, name: str) -> None:
    line = f"traceback : Signal {number} ({name}) received by PID 7"
    assert end_of(1, line, "").state is end_of(-number, "", "").state is TrainerState.KILLED


@pytest.mark.parametrize("error", ["CheckpointDamaged", "TeacherDamaged"])
def test_files_that_are_missing_may_come_back(error: str) -> None:
    found = []
    for words in ("is missing: restore it", "differs"):
        reason = f"exit code 1: x.{error}: /c/1 {words}"
        found.append(verdict([TrainerEnd("r", number, "ended", reason) for number in (1, 2)], Settings()))
    assert [one is None for one in found] == [True, False]


async def test_a_step_in_between_forgives_a_crash(tmp_path: Path) -> None:
    journal = RememberedEnds()
    async with supervised(tmp_path, NOTE + "time.sleep(0.05); sys.exit(1)", journal, trainer_restarts=1) as made:
        # Every tick sees one step more.
        for step in range(1000):
            journal.steps["run-a"] = step
            made.reconcile({"run-a": step})
            if len(pids(tmp_path)) > 4:
                break
            await asyncio.sleep(0.01)
        assert made.pop_failures() == {}


async def test_a_program_that_cannot_start_is_not_restarted(tmp_path: Path) -> None:
    settings = Settings(log_folder=tmp_path / "file" / "logs")
    made = TrainerSupervisor(settings, ProcessTrainers(settings), RememberedEnds())
    (tmp_path / "file").write_text("no folder")
    made.reconcile({"run-a": 0})
    failed: dict[str, str] = {}
    await eventually(lambda: failed.update(made.pop_failures()) or failed)
    assert failed["run-a"].startswith("the trainer could not be started")
    await made.close()


async def test_a_leader_adopts_the_trainer_of_the_last_one_and_stops_it_once_no_run_needs_it() -> None:
    cluster, attempt = Cluster(), TrainerAttempt("run-a", 1)
    first = TrainerSupervisor(Settings(), cluster, RememberedEnds())
    first.reconcile({"run-a": 0})
    await eventually(lambda: cluster.statuses)
    await first.close()
    assert cluster.journal == ["start trainer-run-a-1"]
    cluster.statuses[attempt] = TrainerStatus(TrainerState.WAITING, "no node has a free GPU")
    second = TrainerSupervisor(Settings(), cluster, RememberedEnds())
    second.reconcile({"run-a": 0})
    await eventually(lambda: second.waiting_reason("run-a") == "no node has a free GPU")
    cluster.statuses[attempt] = TrainerStatus(TrainerState.RUNNING, "on node a")
    await eventually(lambda: second.waiting_reason("run-a") is None)
    second.reconcile({})
    await eventually(lambda: len(cluster.journal) == 2)
    assert cluster.journal == ["start trainer-run-a-1", "stop trainer-run-a-1"]
    await second.close()


async def test_a_trainer_that_still_ends_is_followed_by_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ticks go on while it ends, and the run is resumed meanwhile."""
    cluster, ended = Cluster(), asyncio.Event()

    async def stop(attempt: TrainerAttempt) -> None:
        cluster.journal.append(f"stop {attempt.name}")
        await ended.wait()
        cluster.statuses[attempt] = TrainerStatus(TrainerState.DONE, "")

    monkeypatch.setattr(cluster, "stop", stop)
    made = TrainerSupervisor(Settings(), cluster, RememberedEnds())
    made.reconcile({"run-a": 0})
    await eventually(lambda: cluster.journal)
    for steps in ({}, {}, {"run-a": 0}, {"run-a": 0}):
        made.reconcile(dict[str, int](steps))
        await asyncio.sleep(0.02)
    assert cluster.journal == ["start trainer-run-a-1", "stop trainer-run-a-1"]
    ended.set()
    await eventually(lambda: made.reconcile({"run-a": 0}) or len(cluster.journal) == 3)
    assert cluster.journal[2] == "start trainer-run-a-2"
    await made.close()


async def test_a_trainer_ends_by_itself_after_the_last_step() -> None:
    """It writes the last checkpoint meanwhile; one that never ends is stopped."""
    cluster, attempt = Cluster(), TrainerAttempt("run-a", 1)
    made = TrainerSupervisor(Settings(), cluster, RememberedEnds())
    made.reconcile({"run-a": 2, "run-b": 2})
    await eventually(lambda: len(cluster.journal) == 2)
    cluster.journal.clear()
    made.reconcile({}, finishing=["run-a", "run-b"])
    cluster.statuses[attempt] = TrainerStatus(TrainerState.DONE, "")
    await eventually(lambda: made.reconcile({}, finishing=["run-a", "run-b"]) or len(made._tasks) == 1)
    assert cluster.journal == [] and made.pop_failures() == {}
    made.reconcile({})
    await eventually(lambda: cluster.journal == ["stop trainer-run-b-1"])
    await made.close()


async def test_a_trainer_has_time_since_its_run_needed_it_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that restored lost files of the last version, long after its step."""
    cluster = Cluster()
    made = TrainerSupervisor(Settings(), cluster, RememberedEnds())
    made.reconcile({"run-a": 2, "run-b": 2})
    await eventually(lambda: len(cluster.journal) == 2)
    cluster.journal.clear()
    made.reconcile({"run-b": 2}, finishing=made.supervised)
    # Only the other one's time is over at once.
    monkeypatch.setattr(trainers, "FINISH_SECONDS", 0.0)
    for _ in range(2):
        made.reconcile({}, finishing=made.supervised)
    assert made.supervised == {"run-a"}
    await eventually(lambda: cluster.journal == ["stop trainer-run-b-1"])
    cluster.statuses[TrainerAttempt("run-a", 1)] = TrainerStatus(TrainerState.DONE, "")
    await eventually(lambda: made.reconcile({}, finishing=made.supervised) or not made._tasks)
    assert cluster.journal == ["stop trainer-run-b-1"] and made.pop_failures() == {}
    await made.close()


async def test_the_process_of_a_trainer_lives_until_its_last_checkpoint_is_written(tmp_path: Path) -> None:
    async with supervised(tmp_path, SAVING) as made:
        made.reconcile({"run-a": 1})
        await eventually(lambda: pids(tmp_path))
        made.reconcile({}, finishing=["run-a"])
        (tmp_path / "go").touch()
        await eventually(lambda: made.reconcile({}, finishing=["run-a"]) or not made._tasks)
        assert (tmp_path / "checkpoint").exists() and len(pids(tmp_path)) == 1


SAVING = NOTE + "exec('while not os.path.exists(\"go\"): time.sleep(0.01)'); open('checkpoint', 'w').close()"


class Outliving(ProcessTrainers):
    """Trainers that stay at work when their leader goes, as those of a cluster do."""

    async def close(self) -> None:
        """Leaves them to the next leader."""


@pytest.mark.parametrize("is_needed", [False, True])
async def test_a_new_leader_lets_a_trainer_write_its_last_checkpoint(tmp_path: Path, is_needed: bool) -> None:
    """Also where a lost version needs the trainer again meanwhile, which is then supervised."""
    command = [sys.executable, "-c", f"import os; os.chdir({str(tmp_path)!r}); {SAVING}"]
    settings = Settings(log_folder=tmp_path, trainer_stop_seconds=0.3, trainer_command=command)
    backend = Outliving(settings)
    former, leader = (TrainerSupervisor(settings, backend, RememberedEnds()) for _ in range(2))
    former.reconcile({"run-a": 1, "run-b": 1})
    await eventually(lambda: len(pids(tmp_path)) == 2)
    await former.close()

    async def is_alone() -> bool:
        return [one.run_id for one in await backend.live_attempts()] == ["run-a"]

    leader.reconcile({}, finishing=["run-a"])
    # The other one has no time left: its run's last step was made long ago.
    await eventually(is_alone)
    if is_needed:
        leader.reconcile({"run-a": 1}, finishing=["run-a"])
        leader.reconcile({"run-a": 1})
    assert await is_alone()
    (tmp_path / "go").touch()
    await eventually(lambda: (tmp_path / "checkpoint").exists())
    leader.reconcile({}, finishing=["run-a"])
    await eventually(lambda: not any(map(alive, pids(tmp_path))))
    await leader.close()


async def test_a_new_leader_stops_a_trainer_that_never_ends() -> None:
    cluster, attempt = Cluster(), TrainerAttempt("run-a", 1)
    cluster.statuses[attempt] = AT_WORK
    made = TrainerSupervisor(Settings(), cluster, RememberedEnds())
    made.reconcile({}, finishing=["run-a"])
    await eventually(lambda: cluster.asked)
    assert cluster.journal == []
    made.reconcile({})
    await eventually(lambda: cluster.journal == ["stop trainer-run-a-1"])
    await made.close()


async def test_graceful_ends_with_steps_in_between_fail_no_run() -> None:
    cluster = Cluster(beginning=TrainerStatus(TrainerState.DONE, ""))
    made = TrainerSupervisor(Settings(), cluster, RememberedEnds())
    steps = itertools.count()
    await eventually(lambda: made.reconcile({"run-a": next(steps)}) or len(cluster.journal) > 8)
    assert made.pop_failures() == {}
    await eventually(lambda: made.reconcile({"run-a": 10**6}) or not made._tasks)
    assert "left its run" in made.pop_failures()["run-a"]
    await made.close()


async def test_a_leader_stops_the_trainers_of_runs_that_ended_while_nobody_led() -> None:
    cluster = Cluster()
    for run_id, state in (
        ("run-a", TrainerState.RUNNING),
        ("run-b", TrainerState.RUNNING),
        ("run-c", TrainerState.DONE),
    ):
        cluster.statuses[TrainerAttempt(run_id, 1)] = TrainerStatus(state, "on node a")
    made = TrainerSupervisor(Settings(), cluster, RememberedEnds())
    made.reconcile({"run-b": 3})
    await eventually(lambda: cluster.journal)
    await made.close()
    assert cluster.journal == ["stop trainer-run-a-1"]


async def test_an_attempt_that_ended_between_two_leaders_is_recorded_and_followed_by_the_next_number() -> None:
    cluster = Cluster()
    cluster.statuses[TrainerAttempt("run-a", 7)] = TrainerStatus(TrainerState.KILLED, "evicted from node a")
    journal = RememberedEnds()
    made = TrainerSupervisor(Settings(trainer_restarts=0, trainer_kills=2), cluster, journal)
    made.reconcile({"run-a": 0})
    for number in (8, 9):
        attempt = TrainerAttempt("run-a", number)
        await eventually(lambda: attempt in cluster.statuses)  # noqa: B023
        cluster.statuses[attempt] = TrainerStatus(TrainerState.KILLED, "evicted from node a")
    failed: dict[str, str] = {}
    await eventually(lambda: failed.update(made.pop_failures()) or failed)
    assert failed == {"run-a": "the trainer ended 3 times without a step: evicted from node a"}
    assert [end.attempt for end in journal.ends] == [7, 8, 9]
    assert cluster.journal == ["start trainer-run-a-8", "start trainer-run-a-9"]
    await made.close()


async def test_starting_an_attempt_twice_starts_one_process(tmp_path: Path) -> None:
    command = [sys.executable, "-c", f"import os, sys, time; os.chdir({str(tmp_path)!r}); {NOTE} time.sleep(60)"]
    backend = ProcessTrainers(Settings(log_folder=tmp_path, trainer_command=command, trainer_stop_seconds=0.3))
    attempt = TrainerAttempt("run-a", 1)
    for _ in range(2):
        await backend.start(attempt, TrainerModels())
    await eventually(lambda: pids(tmp_path))
    assert (await backend.status(attempt)).state is TrainerState.RUNNING
    assert await backend.last_attempt("run-a") == 1
    for _ in range(2):
        await backend.stop(attempt)
    assert len(pids(tmp_path)) == 1
    assert (await backend.status(attempt)).state is TrainerState.KILLED


async def test_a_trainer_dies_with_a_killed_controller(tmp_path: Path) -> None:
    agent = f"import os, time; open({str(tmp_path / 'pids')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    start = (
        "import subprocess, sys; from leyden.libs.embedded.launch import tied;"
        " subprocess.Popen(tied(sys.executable, '-c', sys.argv[1])).wait()"
    )
    parent = subprocess.Popen([sys.executable, "-c", start, agent])
    await eventually(lambda: pids(tmp_path))
    parent.kill()
    parent.wait()
    await eventually(lambda: not alive(pids(tmp_path)[0]))


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
