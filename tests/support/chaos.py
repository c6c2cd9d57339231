"""Injects failures into a running platform, chosen by a seed: kills, kills at fault points, pauses, a wiped Redis."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence

import psutil
import psycopg
import redis

from leyden.libs.cli.local.platform import Platform
from leyden.libs.faults import FaultInjector
from tests.support.shared import ROOT

SERVICES = ("gateway", "runner", "collector", "credit", "grader", "controller", "api", "engine", "trainer")
SERVERS = {"postgres": "postgres/data/postmaster.pid", "redis": "redis/redis.pid"}
VICTIMS = (*SERVICES, *SERVERS)
ENDED = frozenset({"completed", "failed", "cancelled"})


def trainer_pid(run_id: str) -> int | None:
    """The process that trains a run."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "leyden.services.trainer" in words and run_id in words:
            return int(process.pid)
    return None


def pid_of(platform: Platform, victim: str, run_id: str) -> int | None:
    """The process of a service, of a run's trainer, or of an embedded server."""
    if victim == "trainer":
        return trainer_pid(run_id)
    if victim not in SERVERS:
        return platform.pids().get(victim)
    try:
        return int((platform.home / SERVERS[victim]).read_text().split("\n", 1)[0])
    except (FileNotFoundError, ValueError):
        return None


def kill(platform: Platform, victim: str, run_id: str) -> bool:
    """Whether there was a process to kill."""
    pid = pid_of(platform, victim, run_id)
    if pid is None:
        return False
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def fault_points() -> list[str]:
    """Every point at which a service may be killed, as the sources name them."""
    sources = [*(ROOT / "services").rglob("*.py"), *(ROOT / "libs").rglob("*.py")]
    found = {point for file in sources for point in re.findall(r'\bfault_point\("([\w.]+)"\)', file.read_text())}
    return sorted(point for point in found if point.split(".")[0] in SERVICES)


class Chaos:
    """Injects failures and counts them: `kills` by victim, `pauses`, `flushes`.

    Args: injector: of the folder that services were started with; None for no kills at points
        pause_seconds: longest SIGSTOP; victims: processes that are killed, paused or wiped, all by default
    """

    def __init__(
        self,
        platform: Platform,
        dice: random.Random,
        injector: FaultInjector | None,
        pause_seconds: float,
        victims: Sequence[str] = VICTIMS,
    ) -> None:
        self.kills: Counter[str] = Counter()
        self.pauses = self.flushes = 0
        self._platform = platform
        self._dice = dice
        self._injector = injector
        self._victims = victims
        self._points = [point for point in fault_points() if injector and point.split(".")[0] in victims]
        self._armed: set[str] = set()
        self._pause_seconds = pause_seconds
        self._paused: list[threading.Timer] = []

    def strike(self, run_id: str) -> str:
        """Injects one failure and returns its description."""
        choice = self._dice.random()
        if self._points and choice < 0.25:
            return self._arm(self._dice.choice(self._points))
        if choice < 0.4:
            return self._pause(self._dice.choice([one for one in self._victims if one not in SERVERS]), run_id)
        if choice < 0.45 and "redis" in self._victims:
            return self._flush()
        return self.kill(self._dice.choice(self._victims), run_id)

    def kill(self, victim: str, run_id: str) -> str:
        """SIGKILL, counted when somebody died."""
        if not kill(self._platform, victim, run_id):
            return f"{victim} was not there"
        self.kills[victim] += 1
        return f"{victim} killed"

    def collect(self) -> None:
        """Counts the points at which somebody has died."""
        for point in sorted(self._armed):
            if self._injector is not None and not (self._injector.folder / point).exists():
                self._armed.discard(point)
                self.kills[point] += 1

    def calm(self) -> None:
        """Ends what was begun: nothing stays paused or armed."""
        for timer in self._paused:
            timer.join()
        self._paused.clear()
        for point in sorted(self._armed):
            if self._injector is not None:
                with contextlib.suppress(FileNotFoundError):
                    (self._injector.folder / point).unlink()
                    self._armed.discard(point)
        self.collect()

    def _arm(self, point: str) -> str:
        if self._injector is None or point in self._armed:
            return f"{point} is armed already"
        self._injector.arm(point)
        self._armed.add(point)
        return f"{point} armed"

    def _pause(self, victim: str, run_id: str) -> str:
        pid = pid_of(self._platform, victim, run_id)
        if pid is None:
            return f"{victim} was not there"
        seconds = self._dice.uniform(0.2, self._pause_seconds)
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            process.suspend()
            timer = threading.Timer(seconds, _resume, [process])
            timer.start()
            self._paused.append(timer)
            self.pauses += 1
        return f"{victim} paused for {seconds:.1f} s"

    def _flush(self) -> str:
        try:
            with redis.Redis.from_url(self._platform.facts.redis_url, socket_timeout=5) as client:
                client.flushall()
        except redis.RedisError:
            return "Redis was not there"
        self.flushes += 1
        return "Redis wiped"


def _resume(process: psutil.Process) -> None:
    # A process that was killed meanwhile, and another one with its pid, are left alone.
    with contextlib.suppress(psutil.NoSuchProcess):
        process.resume()


class RunWatch:
    """Progress of a run, read from the store because services may be down."""

    def __init__(self, platform: Platform, run_id: str) -> None:
        self._platform = platform
        self._run_id = run_id
        self.phase = "pending"
        self.ended_rollouts = 0

    def poll(self) -> bool:
        """Reads the state again; returns False without a change while the store is away."""
        with contextlib.suppress(psycopg.Error), self._connect() as connection:
            row = connection.execute(
                "SELECT (SELECT phase FROM run_status WHERE run_id = %(run)s),"
                " (SELECT count(*) FROM rollouts WHERE run_id = %(run)s AND state <> 'queued')",
                {"run": self._run_id},
            ).fetchone()
            assert row is not None
            self.phase, self.ended_rollouts = row[0] or self.phase, row[1]
            return True
        return False

    @property
    def is_over(self) -> bool:
        """Whether it has ended, at the last poll."""
        return self.phase in ENDED

    def wait(self, *, more_rollouts: int, seconds: float) -> None:
        """Until so many more rollouts have ended, the run is over, or the time is."""
        self.poll()
        goal, deadline = self.ended_rollouts + more_rollouts, time.monotonic() + seconds
        while not self.is_over and self.ended_rollouts < goal and time.monotonic() < deadline:
            time.sleep(0.1)
            self.poll()

    def wait_for_end(self, seconds: float) -> bool:
        """Whether the run ended within this time, and the store answers, so that it can be asked about it."""
        deadline = time.monotonic() + seconds
        while not (self.poll() and self.is_over):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.2)
        return True

    def _connect(self) -> psycopg.Connection[tuple[str | None, int]]:
        return psycopg.connect(self._platform.facts.database_url, connect_timeout=5)
