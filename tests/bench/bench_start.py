"""How soon the platform is ready, what it holds and does at rest, and what an attempt costs beside its agent.

Every figure is of the whole process tree of `leyden up`, Postgres and Redis with it, as the kernel counts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import psutil

from leyden.libs.capability import KeyRing, write_keys
from leyden.libs.cli.record import PlatformRecord, read_record
from leyden.libs.cli.services import SERVICES
from leyden.libs.contracts.config import Agent, ProcessRunner
from leyden.libs.contracts.states import OutcomeKind
from leyden.libs.queue.leases import Lease
from leyden.services.engine.convert import convert
from leyden.services.runner.attempt import RunnerContext, execute
from leyden.services.runner.backends.process.backend import ProcessBackend
from leyden.services.runner.endpoint_monitor import EndpointMonitor
from leyden.services.runner.settings import Settings
from tests.bench.rows import Goal, Growth, Row

ROOT = Path(__file__).parents[2]
SETTLE_SECONDS, REST_SECONDS = 2.0, 6.0
SERVERS = {"postgres": "postgres/data/postmaster.pid", "redis": "redis/redis.pid"}
CROWDS = (1, 4, 16)
ATTEMPTS = 64
AGENT = ["/bin/sh", "-c", "echo '{\"reward\": 1}'"]


@dataclass(frozen=True)
class Rest:
    """A platform that nobody asks for anything: MB by process, and % of a core."""

    megabytes: dict[str, float]
    percent: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.megabytes.values())


def rows(repeats: int) -> list[Row]:
    """Start, rest and the cost of an attempt."""
    model = convert()
    with tempfile.TemporaryDirectory(prefix="leyden-bench-") as folder:
        home = Path(folder) / "home"
        fresh, _ = _start(home, rest=False)
        found = [(*_start(home, rest=True), _imports()) for _ in range(repeats)]
    starts, rests = [seconds for seconds, _, _ in found], [rest for _, rest, _ in found if rest is not None]
    weights = (model / "model.safetensors").stat().st_size / 1e6
    attempts = [(_attempts(CROWDS[-1]), _forks()) for _ in range(repeats)]
    return [
        _start_row("leyden up to ready, a home that exists", starts, [imports for _, _, imports in found]),
        _start_row("leyden up to ready, a fresh home", [fresh], [statistics.median(i for _, _, i in found)]),
        _memory_row(rests, weights),
        _rest_row(rests),
        Row(
            part="start",
            name="an attempt beside its agent: folder, sandbox, supervisor, outcome",
            unit="ms CPU",
            repeats=[ours for ours, _ in attempts],
            baseline_name="the agent alone, forked and reaped",
            baseline=[bare for _, bare in attempts],
            growth=Growth("attempts at once", "ms CPU an attempt", CROWDS, [_attempts(crowd) for crowd in CROWDS]),
            note=f"{ATTEMPTS} attempts, each with a user of its own where the runner is root; every outcome is"
            " checked. The agent is a shell that prints its reward.",
        ),
    ]


def _start_row(name: str, seconds: list[float], imports: list[float]) -> Row:
    return Row(
        part="start",
        name=name,
        unit="s",
        repeats=seconds,
        baseline_name="importing each service's code, one after another",
        baseline=imports,
        goal=Goal(at_most=10),
        note="From the command to the line `ready`; then every /readyz is asked. The model was prepared before.",
    )


def _memory_row(rests: list[Rest], weights: float) -> Row:
    names = rests[0].megabytes
    shares = {name: statistics.median(rest.megabytes[name] for rest in rests) for name in names}
    words = ", ".join(f"{name} {shares[name]:.0f}" for name in sorted(shares, key=lambda name: -shares[name]))
    return Row(
        part="start",
        name="idle memory of all services",
        unit="MB",
        repeats=[rest.total for rest in rests],
        baseline_name="the engine's weights alone",
        baseline=[weights] * len(rests),
        goal=Goal(at_most=1500),
        note=f"Proportional set size of every process: {words}. No trainer runs while no run is active.",
    )


def _rest_row(rests: list[Rest]) -> Row:
    return Row(
        part="start",
        name="idle CPU of all services",
        unit="% of a core",
        repeats=[sum(rest.percent.values()) for rest in rests],
        baseline_name="of that Postgres and Redis",
        baseline=[sum(rest.percent[name] for name in SERVERS) for rest in rests],
        note=f"Over {REST_SECONDS:g} s, {SETTLE_SECONDS:g} s after the start.",
    )


def _start(home: Path, *, rest: bool) -> tuple[float, Rest | None]:
    """Seconds to ready, and the platform at rest, if it is to rest."""
    with _platform(home) as (seconds, command):
        record = read_record(home)
        assert record is not None and tuple(record.services) == SERVICES
        _all_ready(record)
        return seconds, _rest(home, record, command) if rest else None


@contextlib.contextmanager
def _platform(home: Path) -> Iterator[tuple[float, int]]:
    """Seconds to ready and the command's pid; stopped after the block."""
    began = time.monotonic()
    command = [sys.executable, "-m", "leyden.libs.cli", "up", "--silent", "--free-ports", "--home", str(home)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stderr is not None
            said = next((line for line in process.stderr if "ready;" in line), None)
            seconds = time.monotonic() - began
            assert said is not None, f"not ready: see {home}"
            yield seconds, process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=120)


def _all_ready(record: PlatformRecord) -> None:
    for name, service in record.services.items():
        answer = httpx.get(f"{service.internal_url}/readyz", trust_env=False)
        assert answer.status_code == 200, f"{name}: {answer.text}"


def _rest(home: Path, record: PlatformRecord, command: int) -> Rest:
    roots = {name: service.process.pid for name, service in record.services.items() if service.process is not None}
    roots |= {name: int((home / file).read_text().split()[0]) for name, file in SERVERS.items()}
    time.sleep(SETTLE_SECONDS)
    trees = {name: [pid, *_below(pid)] for name, pid in roots.items()}
    # The command's children are services, which are counted by their names.
    trees["supervisor"] = [command]
    began, before = time.monotonic(), {name: _cpu_seconds(pids) for name, pids in trees.items()}
    time.sleep(REST_SECONDS)
    passed = time.monotonic() - began
    percent = {name: (_cpu_seconds(pids) - before[name]) / passed * 100 for name, pids in trees.items()}
    return Rest({name: sum(map(_megabytes, pids)) for name, pids in trees.items()}, percent)


def _below(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def _megabytes(pid: int) -> float:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
        return int(found[1]) * 1024 / 1e6 if found else 0.0
    return 0.0


def _cpu_seconds(pids: list[int]) -> float:
    """By the scheduler's clock, in nanoseconds, of every thread that lives."""
    files = [file for pid in pids for file in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    total = 0
    for file in files:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            total += int(file.read_text().split()[0])
    return total / 1e9


def _imports() -> float:
    """Seconds until each service's code has been imported, one process after another."""
    began = time.monotonic()
    for name in SERVICES:
        module = "worker" if (ROOT / "services" / name / "worker.py").exists() else "app"
        code = f"import leyden.services.{name}.__main__, leyden.services.{name}.{module}"
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    return time.monotonic() - began


def _attempts(crowd: int) -> float:
    """Milliseconds of CPU that one attempt costs, so many at once: this process's, the supervisor's and the agent's."""
    with tempfile.TemporaryDirectory(prefix="leyden-bench-", dir="/var/tmp") as folder:
        Path(folder).chmod(0o755)
        backend, context = _context(Path(folder))
        asyncio.run(_crowd(context, 4, 4))
        before = _own_cpu_seconds()
        asyncio.run(_crowd(context, ATTEMPTS, crowd))
        spent = _own_cpu_seconds() - before
        asyncio.run(backend.close())
    return spent / ATTEMPTS * 1000


def _context(folder: Path) -> tuple[ProcessBackend, RunnerContext]:
    keys = folder / "keys.json"
    write_keys(keys)
    settings = Settings(python="/bin/sh", work_folder=folder / "attempts", capability_keys_file=keys)
    backend = ProcessBackend(settings, "bench")

    async def answer() -> None:
        return

    return backend, RunnerContext(settings, KeyRing(keys), {"process": backend}, EndpointMonitor([], answer))


async def _crowd(context: RunnerContext, attempts: int, crowd: int) -> None:
    left = iter(range(attempts))

    async def worker() -> None:
        for number in left:
            outcome = await execute(_lease(number), context)
            assert (outcome.kind, outcome.reward) == (OutcomeKind.SUCCEEDED, 1.0), outcome

    await asyncio.gather(*(worker() for _ in range(crowd)))


def _lease(number: int) -> Lease:
    return Lease(
        run_id="run-bench000000",
        group_id="run-bench000000.0",
        rollout_id=f"run-bench000000.0.{number}",
        attempt=1,
        lease_id="bench",
        expires_at=datetime.now(tz=UTC) + timedelta(minutes=5),
        dataset_id="bench",
        task_number=0,
        task={"question": "What is six times seven?"},
        agent=Agent(command=AGENT),
        runner=ProcessRunner(timeout_seconds=60),
        trace_parent=None,
    )


def _forks() -> float:
    """Milliseconds of CPU of the agent alone."""
    before = _own_cpu_seconds()
    for _ in range(ATTEMPTS):
        result = subprocess.run(AGENT, capture_output=True, check=True)
        assert json.loads(result.stdout) == {"reward": 1}
    return (_own_cpu_seconds() - before) / ATTEMPTS * 1000


def _own_cpu_seconds() -> float:
    """Of this process, and of every supervisor and agent that has ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)
