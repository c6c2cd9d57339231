"""`make growth ROLLOUTS=20000`: a long run of a scripted agent through the whole stack; nothing but the store may grow.

A stub engine answers at once and the trainer trains a tiny model, so that what is measured is ours: memory and CPU time
of each service, latencies at the start and at the end, Redis, files, and what dropping the run gives back. The last
line is one JSON object. Exit status 1 when something grew, slowed down, was lost or was left behind.
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
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import psycopg
import redis
from rich.console import Console
from rich.table import Table

from libs.cli.platform import Options, Platform
from libs.cli.services import INTERNAL_PORTS
from libs.client import Leyden
from services.engine.tiny import make_tiny_model
from tests.fakes.stub_engine import stub_engine
from tests.soak import trainer_pid
from tests.truth import violations

AGENT = Path(__file__).parent / "agents" / "scripted.sh"
GROUP_SIZE = 8
GROUPS_PER_STEP = 50
ENDED = {"completed", "failed", "cancelled"}
LOOKS = 60
"""Looks at memory during a run."""
STREAM = "{leyden:rollouts}"


@dataclass(frozen=True)
class Look:
    """The platform at one moment. Memory is what would be freed if the process ended (USS)."""

    seconds: float
    rollouts: int
    memory_bytes: Mapping[str, int]
    cpu_seconds: Mapping[str, float]
    redis_bytes: int
    stream_length: int
    files: int


def run_document(rollouts: int) -> dict[str, Any]:
    """A training of about that many rollouts; the stub's log-probabilities are its own, so their gap is no concern."""
    groups = max(1, rollouts // GROUP_SIZE)
    per_step = min(GROUPS_PER_STEP, groups)
    return {
        "name": "growth",
        "dataset": "growth",
        "agent": {"command": ["bash", str(AGENT)]},
        "runner": {"timeout_seconds": 120},
        "sampling": {"group_size": GROUP_SIZE, "groups_per_step": per_step, "max_attempts": 5},
        "training": {"steps": groups // per_step, "max_logprob_gap": 100.0},
    }


@contextmanager
def stubbed_platform(folder: Path) -> Iterator[Platform]:
    """A platform on free ports whose engine is a stub."""
    model = make_tiny_model(folder / "tiny")
    services = tuple(name for name in INTERNAL_PORTS if name != "engine")
    with stub_engine() as engine:
        environment = {
            "controller": {"CONTROLLER_ENGINE_URLS": json.dumps([engine])},
            # Small enough to be full soon: what is bounded must show it within the run.
            "gateway": {"GATEWAY_HISTORY_BYTES": str(2**22)},
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


def look(platform: Platform, run_id: str, rollouts: int) -> Look:
    """What every process holds now."""
    pids = platform.pids() | ({"trainer": trainer} if (trainer := trainer_pid(run_id)) else {})
    processes = {name: psutil.Process(pid) for name, pid in pids.items()}
    with redis.Redis.from_url(platform.facts.redis_url) as connection:
        redis_bytes = int(connection.info("memory")["used_memory_dataset"])
        stream_length = int(connection.xlen(STREAM))
    return Look(
        seconds=time.monotonic(),
        rollouts=rollouts,
        memory_bytes={name: process.memory_full_info().uss for name, process in processes.items()},
        cpu_seconds={name: _cpu_seconds(process) for name, process in processes.items()} | _servers_cpu(platform),
        redis_bytes=redis_bytes,
        stream_length=stream_length,
        files=_count_files(platform.home),
    )


def _count_files(home: Path) -> int:
    """Of everything but Postgres; folders that vanish while they are counted count for nothing."""
    count = 0
    for folder, folders, files in os.walk(home):
        folders[:] = [name for name in folders if (folder, name) != (str(home), "postgres")]
        count += len(files)
    return count


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
    runner = psutil.Process(platform.pids()["runner"]).cpu_times()
    return {"postgres": seconds, "agents": float(runner.children_user + runner.children_system)}


def watch(platform: Platform, client: Leyden, run_id: str, rollouts: int) -> list[Look]:
    """Looks at equal distances until the run has ended."""
    looks: list[Look] = []
    while True:
        run = client.run(run_id)
        finished = sum(run.progress.rollouts.values()) - run.progress.rollouts.get("queued", 0)
        if finished >= len(looks) * rollouts / LOOKS:
            looks.append(look(platform, run_id, finished))
            _tell(looks)
        if run.phase in ENDED:
            return looks
        time.sleep(0.5)


def _tell(looks: Sequence[Look]) -> None:
    now, first = looks[-1], looks[0]
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


def latencies(dsn: str, run_id: str) -> dict[str, dict[str, list[float]]]:
    """Median and 95th percentile in milliseconds of the first, the fifth and the last tenth, by what was waited for."""
    found: dict[str, dict[str, list[float]]] = {}
    with psycopg.connect(dsn) as connection:
        for name, question in LATENCIES.items():
            rows = connection.execute(
                "SELECT percentile_cont(0.5) WITHIN GROUP (ORDER BY seconds) * 1000,"
                " percentile_cont(0.95) WITHIN GROUP (ORDER BY seconds) * 1000"
                f" FROM (SELECT seconds, ntile(10) OVER (ORDER BY at) AS tenth FROM ({question}) AS all_of_them) AS parts"
                " WHERE tenth IN (1, 5, 10) GROUP BY tenth ORDER BY tenth",
                {"run": run_id},
            ).fetchall()
            medians, tails = zip(*rows, strict=True)
            found[name] = {"median": list(medians), "p95": list(tails)}
    return found


def thirds(looks: Sequence[Look]) -> tuple[Sequence[Look], Sequence[Look]]:
    """The looks at the second and at the last third of the rollouts."""
    last = looks[-1].rollouts
    second = [one for one in looks if last / 3 <= one.rollouts < 2 * last / 3]
    return second, [one for one in looks if one.rollouts >= 2 * last / 3]


def memory_of(looks: Sequence[Look], name: str) -> float:
    """Median in MiB."""
    return statistics.median(one.memory_bytes[name] for one in looks if name in one.memory_bytes) / 2**20


def cpu_of(looks: Sequence[Look], name: str) -> float:
    """CPU milliseconds per rollout."""
    seen = [one for one in looks if name in one.cpu_seconds]
    rollouts = seen[-1].rollouts - seen[0].rollouts
    return 1000 * (seen[-1].cpu_seconds[name] - seen[0].cpu_seconds[name]) / max(1, rollouts)


def grow(folder: Path, rollouts: int) -> dict[str, Any]:
    """Runs it, and tells what was measured and what is wrong."""
    with (
        stubbed_platform(folder) as platform,
        Leyden(platform.facts.url("api"), platform.token, patience_seconds=60) as client,
    ):
        client.upload_dataset("growth", [{"number": number} for number in range(64)])
        run = client.create_run(run_document(rollouts))
        looks = watch(platform, client, run.id, rollouts)
        dsn = platform.facts.database_url
        ended = client.run(run.id)
        return {
            "phase": ended.phase,
            "reason": ended.reason,
            "rollouts": ended.progress.rollouts,
            "seconds": looks[-1].seconds - looks[0].seconds,
            "looks": looks,
            "latencies": latencies(dsn, run.id),
            "violations": violations(dsn, run.id),
        }


def main() -> int:
    """Exit status 1 when something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=20_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="leyden-growth-") as folder:
        found = grow(Path(folder), arguments.rollouts)
    second, last = thirds(found["looks"])
    table = Table("service", "MiB 2nd third", "MiB last third", "CPU ms/rollout 2nd", "last")
    for name in last[-1].cpu_seconds:
        has = name in last[-1].memory_bytes
        table.add_row(
            name,
            f"{memory_of(second, name):.1f}" if has else "",
            f"{memory_of(last, name):.1f}" if has else "",
            f"{cpu_of(second, name):.2f}",
            f"{cpu_of(last, name):.2f}",
        )
    Console().print(table)
    print(json.dumps({key: value for key, value in found.items() if key != "looks"}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
