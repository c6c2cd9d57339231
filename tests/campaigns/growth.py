"""`make growth ROLLOUTS=20000`: a long run of a scripted agent through the whole stack, and the growth of its services.

A scripted engine answers at once and the trainer trains a tiny model, so that the services take most of the time. The
report has memory and CPU time of each service, latencies at the start and at the end, Redis, files, and the space that
pruning frees. The last line is one JSON object. Exit status 1 when a service grew or slowed down, or when anything was
lost or left behind. The suite runs 400 rollouts and checks only that nothing is lost or left behind.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import psycopg
import redis
from rich.console import Console
from rich.table import Table

from leyden.libs.cli.local.platform import Options, Platform
from leyden.libs.cli.local.services import INTERNAL_PORTS
from leyden.libs.client import Client
from tests.campaigns.soak import trainer_pid
from tests.fakes.scripted_engine import engine_process
from tests.invariants import violations
from tests.support.tiny_model import make_tiny_model

AGENT = Path(__file__).parents[1] / "agents" / "scripted.sh"
GROUP_SIZE = 8
GROUPS_PER_STEP = 25
ENDED = {"completed", "failed", "cancelled"}
SNAPSHOTS = 60
STREAM = "{leyden:rollouts}"
BIG_TABLES = ("model_calls", "spans", "credits", "samples")
SETTLE_SECONDS = 60.0

# From the second to the last third of the rollouts. At 20,000 a leak of a kilobyte a rollout is 7 MiB; heaps,
# most of all torch's, vary by the share.
MEMORY_SHARE, MEMORY_MIB = 0.03, 5.0
# Generous bounds, because the machine may slow down: only growth with the number of rollouts exceeds them.
CPU_FACTOR, CPU_MS = 2.0, 1.0
LATENCY_FACTOR, LATENCY_MS = 3.0, 100.0


@dataclass(frozen=True)
class Snapshot:
    """The platform at one moment. Memory is the unique set size: it would be free if the process ended."""

    seconds: float
    rollouts: int
    memory_bytes: Mapping[str, int]
    cpu_seconds: Mapping[str, float]
    redis_bytes: int
    stream_length: int
    files: int


def run_document(rollouts: int) -> dict[str, Any]:
    """A run of about that many rollouts; the engine invents its log-probabilities, so that their gap is not bounded."""
    groups = max(1, rollouts // GROUP_SIZE)
    per_step = min(GROUPS_PER_STEP, groups)
    return {
        "name": "growth",
        "dataset": "growth",
        "agent": {"command": ["bash", str(AGENT)]},
        "runner": {"timeout_seconds": 120},
        "sampling": {"group_size": GROUP_SIZE, "groups_per_step": per_step, "max_attempts": 5},
        "training": {"steps": groups // per_step, "max_logprob_gap": 100.0, "min_effective_share": 0.0},
    }


@contextmanager
def stubbed_platform(folder: Path) -> Iterator[Platform]:
    """A platform on free ports with a scripted engine."""
    model = make_tiny_model(folder / "tiny")
    services = tuple(name for name in INTERNAL_PORTS if name != "engine")
    with engine_process() as engine:
        environment = {
            "controller": {"CONTROLLER_ENGINE_URLS": json.dumps([engine.url])},
            "trainer": {"OMP_NUM_THREADS": "1", "TRAINER_THREADS": "1"},
        }
        options = Options(model_path=model, free_ports=True, environment=environment, services=services)
        platform = Platform(folder / "home", options)
        platform.start()
        try:
            platform.ready(120)
            yield platform
        finally:
            platform.stop()


def snapshot(platform: Platform, run_id: str, rollouts: int) -> Snapshot:
    """Measures every process now."""
    used = {name: _used(pid) for name, pid in platform.pids().items()}
    # The trainer ends with its run, perhaps at this moment.
    with suppress(psutil.NoSuchProcess):
        used |= {"trainer": _used(trainer)} if (trainer := trainer_pid(run_id)) else {}
    with redis.Redis.from_url(platform.facts.redis_url) as connection:
        redis_bytes = int(connection.info("memory")["used_memory_dataset"])
        stream_length = int(connection.xlen(STREAM))
    return Snapshot(
        seconds=time.monotonic(),
        rollouts=rollouts,
        memory_bytes={name: memory for name, (memory, _) in used.items()},
        cpu_seconds={name: cpu for name, (_, cpu) in used.items()} | _servers_cpu(platform),
        redis_bytes=redis_bytes,
        stream_length=stream_length,
        files=_count_files(platform.home),
    )


def _count_files(home: Path) -> int:
    """Files of the home, without those of Postgres."""
    count = 0
    for folder, folders, files in os.walk(home):
        folders[:] = [name for name in folders if (folder, name) != (str(home), "postgres")]
        count += len(files)
    return count


def _used(pid: int) -> tuple[int, float]:
    """Unique set size in bytes, and seconds of CPU time."""
    process = psutil.Process(pid)
    return process.memory_full_info().uss, _cpu_seconds(process)


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _servers_cpu(platform: Platform) -> dict[str, float]:
    postmaster = psutil.Process(int((platform.home / "postgres/data/postmaster.pid").read_text().split()[0]))
    seconds = _cpu_seconds(postmaster) + postmaster.cpu_times().children_user + postmaster.cpu_times().children_system
    for backend in postmaster.children():
        try:
            seconds += _cpu_seconds(backend)
        except psutil.NoSuchProcess:
            continue
    # Agents of attempts that have ended, and the processes between them and the runner.
    runner = psutil.Process(platform.pids()["runner"])
    agents = float(runner.cpu_times().children_user + runner.cpu_times().children_system)
    for child in runner.children():
        with suppress(psutil.NoSuchProcess):
            agents += float(child.cpu_times().children_user + child.cpu_times().children_system)
    return {"postgres": seconds, "agents": agents}


def watch(platform: Platform, client: Client, run_id: str, rollouts: int) -> list[Snapshot]:
    """Snapshots at equal distances until the run has ended."""
    snapshots: list[Snapshot] = []
    while True:
        run = client.run(run_id)
        finished = sum(run.progress.rollouts.values()) - sum(
            run.progress.rollouts.get(state, 0) for state in ("queued", "running")
        )
        if finished >= len(snapshots) * rollouts / SNAPSHOTS:
            snapshots.append(snapshot(platform, run_id, finished))
            _print_progress(snapshots)
        if run.phase in ENDED:
            return snapshots
        time.sleep(0.5)


def _print_progress(snapshots: Sequence[Snapshot]) -> None:
    now, first = snapshots[-1], snapshots[0]
    rate = (now.rollouts - first.rollouts) / max(0.001, now.seconds - first.seconds)
    memory = " ".join(f"{name} {size / 2**20:.0f}" for name, size in now.memory_bytes.items())
    print(f"{now.rollouts} rollouts, {rate:.0f}/s, MiB: {memory}, stream {now.stream_length}", file=sys.stderr)


LATENCIES = {
    "call": """
        SELECT total_seconds AS seconds, sequence AS at FROM model_calls WHERE run_id = %(run)s""",
    "attempt": """
        SELECT extract(epoch FROM finished_at - created_at)::float8 AS seconds, finished_at AS at
        FROM attempts WHERE run_id = %(run)s""",
    "settle": """
        SELECT greatest(0, extract(epoch FROM r.finished_at - a.finished_at))::float8 AS seconds, a.finished_at AS at
        FROM rollouts r JOIN attempts a ON a.rollout_id = r.id AND a.number = r.attempt WHERE r.run_id = %(run)s""",
    "credit": """
        SELECT greatest(0, extract(epoch FROM c.created_at - g.finished_at))::float8 AS seconds, c.created_at AS at
        FROM group_credits c JOIN groups g ON g.id = c.group_id WHERE c.run_id = %(run)s""",
}


@dataclass(frozen=True)
class Tenth:
    """Latencies in one tenth of a run, in milliseconds."""

    median: float
    p95: float


def latencies(dsn: str, run_id: str) -> dict[str, list[Tenth]]:
    """The latencies of the first, the fifth and the last tenth of a run."""
    found: dict[str, list[Tenth]] = {}
    with psycopg.connect(dsn) as connection:
        for name, question in LATENCIES.items():
            rows = connection.execute(
                "SELECT percentile_cont(0.5) WITHIN GROUP (ORDER BY seconds) * 1000,"
                " percentile_cont(0.95) WITHIN GROUP (ORDER BY seconds) * 1000"
                f" FROM (SELECT seconds, ntile(10) OVER (ORDER BY at) AS tenth FROM ({question}) AS every) AS parts"
                " WHERE tenth IN (1, 5, 10) GROUP BY tenth ORDER BY tenth",
                {"run": run_id},
            ).fetchall()
            found[name] = [Tenth(*row) for row in rows]
    return found


@dataclass(frozen=True)
class Cost:
    """Memory and CPU of one service in the second and in the last third of the rollouts; `mib` is None for servers."""

    mib: tuple[float, float] | None
    cpu_ms: tuple[float, float]

    @property
    def has_grown(self) -> bool:
        """Whether it holds more memory than heaps vary by, or needs more CPU time for a rollout."""
        before, after = self.cpu_ms
        if after > before * CPU_FACTOR + CPU_MS:
            return True
        return self.mib is not None and self.mib[1] > self.mib[0] * (1 + MEMORY_SHARE) + MEMORY_MIB


def costs(snapshots: Sequence[Snapshot]) -> dict[str, Cost]:
    """The costs by service."""
    last = snapshots[-1].rollouts
    second = [one for one in snapshots if last / 3 <= one.rollouts <= 2 * last / 3]
    final = [one for one in snapshots if one.rollouts >= 2 * last / 3]
    return {
        name: Cost(
            (_mib(second, name), _mib(final, name)) if name in final[0].memory_bytes else None,
            (_cpu_ms(second, name), _cpu_ms(final, name)),
        )
        for name in final[0].cpu_seconds
    }


def _mib(snapshots: Sequence[Snapshot], name: str) -> float:
    return statistics.median(one.memory_bytes[name] for one in snapshots if name in one.memory_bytes) / 2**20


def _cpu_ms(snapshots: Sequence[Snapshot], name: str) -> float:
    """Milliseconds a rollout."""
    seen = [one for one in snapshots if name in one.cpu_seconds]
    rollouts = max(1, seen[-1].rollouts - seen[0].rollouts)
    return 1000 * (seen[-1].cpu_seconds[name] - seen[0].cpu_seconds[name]) / rollouts


@dataclass(frozen=True)
class Result:
    """The measurements of a run. `left` counts rows of the big tables after pruning."""

    phase: str
    rollouts: Mapping[str, int]
    seconds: float
    snapshots: Sequence[Snapshot]
    waits: Mapping[str, Sequence[Tenth]]
    violations: Mapping[str, Any]
    stream_length: int
    database_bytes: tuple[int, int]
    freed_bytes: int
    prune_seconds: float
    left: int

    def losses(self, expected: int) -> list[str]:
        """Everything that was lost or left behind, in words."""
        if self.phase != "completed":
            return [f"the run is {self.phase}"]
        files = self.snapshots[0].files, self.snapshots[-1].files
        problems = {
            f"of {expected} rollouts there are {self.rollouts}": self.rollouts != {"finished": expected},
            f"the store violates {self.violations}": bool(self.violations),
            f"{self.stream_length} messages stay in Redis": self.stream_length > 0,
            f"{files[1]} files, {files[0]} at the start": files[1] > files[0] + 200,
            f"pruning freed {self.freed_bytes} bytes and left {self.left} rows": not self.freed_bytes or self.left > 0,
        }
        return [words for words, is_so in problems.items() if is_so]

    def growth(self) -> list[str]:
        """Every service that grew and every latency that rose, in words."""
        grown = [f"{name} grew: {cost}" for name, cost in costs(self.snapshots).items() if cost.has_grown]
        slower = [
            f"{name} became slower: {tenths}"
            for name, tenths in self.waits.items()
            if tenths[-1].median > LATENCY_FACTOR * max(one.median for one in tenths[:-1]) + LATENCY_MS
        ]
        return grown + slower


def grow(folder: Path, rollouts: int) -> Result:
    """Runs so many rollouts and measures the services."""
    with (
        stubbed_platform(folder) as platform,
        Client(platform.facts.url("api"), platform.token, patience_seconds=60) as client,
    ):
        client.upload_dataset("growth", [{"number": number} for number in range(64)])
        run_id = client.create_run(run_document(rollouts)).id
        snapshots = watch(platform, client, run_id, rollouts)
        dsn, ended = platform.facts.database_url, client.run(run_id)
        waits, broken = latencies(dsn, run_id), violations(dsn, run_id)
        stream_length, before, began = _stream_length(platform), _database_bytes(dsn), time.monotonic()
        freed = client.prune_run(run_id).freed_bytes
        return Result(
            phase=f"{ended.phase} {ended.reason or ''}".strip(),
            rollouts=ended.progress.rollouts,
            seconds=snapshots[-1].seconds - snapshots[0].seconds,
            snapshots=snapshots,
            waits=waits,
            violations=broken,
            stream_length=stream_length,
            database_bytes=(before, _database_bytes(dsn)),
            freed_bytes=freed,
            prune_seconds=time.monotonic() - began,
            left=_rows(dsn),
        )


def _stream_length(platform: Platform) -> int:
    """The messages that stay after the last acknowledgements."""
    deadline = time.monotonic() + SETTLE_SECONDS
    with redis.Redis.from_url(platform.facts.redis_url) as connection:
        while (length := int(connection.xlen(STREAM))) and time.monotonic() < deadline:
            time.sleep(0.1)
    return length


def _database_bytes(dsn: str) -> int:
    with psycopg.connect(dsn) as connection:
        row = connection.execute("SELECT pg_database_size(current_database())").fetchone()
    assert row is not None
    return int(row[0])


def _rows(dsn: str) -> int:
    """Rows of the big tables."""
    with psycopg.connect(dsn) as connection:
        counted = [connection.execute(f"SELECT count(*) FROM {table}").fetchone() for table in BIG_TABLES]
    return sum(row[0] for row in counted if row is not None)


def tables(found: Result) -> list[Table]:
    """Tables for people."""
    memory = Table("service", "MiB", "at the end", "CPU ms a rollout", "at the end", title="second and last third")
    for name, cost in costs(found.snapshots).items():
        memory_mib = [f"{mib:.1f}" for mib in cost.mib] if cost.mib else ["", ""]
        memory.add_row(name, *memory_mib, *(f"{ms:.2f}" for ms in cost.cpu_ms))
    waits = Table("wait", "first tenth", "fifth", "last", title="median / p95 in ms")
    for name, tenths in found.waits.items():
        waits.add_row(name, *(f"{one.median:.1f} / {one.p95:.1f}" for one in tenths))
    return [memory, waits]


def summary(found: Result) -> dict[str, Any]:
    """One object for programs."""
    first, last = found.snapshots[0], found.snapshots[-1]
    return {
        "rollouts": found.rollouts,
        "seconds": found.seconds,
        "rollouts_per_second": (last.rollouts - first.rollouts) / found.seconds,
        "costs": {name: asdict(cost) for name, cost in costs(found.snapshots).items()}
        if found.phase == "completed"
        else {},
        "waits": {name: [asdict(one) for one in tenths] for name, tenths in found.waits.items()},
        "redis_bytes": [first.redis_bytes, last.redis_bytes],
        "files": [first.files, last.files],
        "database_bytes": found.database_bytes,
        "freed_bytes": found.freed_bytes,
        "prune_seconds": found.prune_seconds,
    }


def main() -> int:
    """Exit status 1 when something was lost or grew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=20_000, help=f"a multiple of {GROUP_SIZE * GROUPS_PER_STEP}")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="leyden-growth-") as folder:
        found = grow(Path(folder), arguments.rollouts)
    troubles = found.losses(arguments.rollouts)
    if found.phase == "completed":
        troubles += found.growth()
        for table in tables(found):
            Console().print(table)
    print(json.dumps({**summary(found), "troubles": troubles}))
    return 1 if troubles else 0


if __name__ == "__main__":
    sys.exit(main())
