"""Rollouts through the platform as it is run: queue, runner, a process for each agent, verdict, settled.

They are those of evaluations, so that nothing trains beside them. A stub engine answers at once; agents print their
verdict, some after a call to the model.
"""

from __future__ import annotations

import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import psycopg

from leyden.libs.cli.platform import Platform
from leyden.libs.client import Client
from leyden.libs.contracts.api import EvaluationRequest
from tests.bench.rows import Goal, Growth, Row
from tests.bench.stored import process_seconds
from tests.growth import AGENT, stubbed_platform

SIBLINGS = 8
TASKS = (8, 32, 128)
MEASURED = TASKS[1]
AT_ONCE = 32
"""Agents, as many as a runner has by default."""
WAIT_SECONDS = 120.0
VERDICT = 'echo "{\\"reward\\": $((${LEYDEN_ROLLOUT_ID##*.} % 2))}"'
COMMAND = f"case $LEYDEN_TASK in *quiet*) {VERDICT};; *) exec bash {AGENT};; esac"
SPEAKERS = {"quiet": 0, "asking": 1}
"""Model calls of an agent's one rollout, by dataset."""

_ENDED = """
    SELECT count(*) FILTER (WHERE r.state = 'finished' AND r.reward = r.sibling %% 2 AND a.state = 'settled'
                            AND o.kind = 'succeeded' AND o.reward = r.reward AND c.calls = %(calls)s),
           count(*), extract(epoch FROM max(r.finished_at) - min(r.created_at))::float8,
           max(left(o.stderr_tail, 300))
    FROM groups g JOIN rollouts r ON r.group_id = g.id JOIN attempts a ON a.rollout_id = r.id
    JOIN outcomes o ON o.rollout_id = r.id AND o.attempt = a.number
    CROSS JOIN LATERAL (SELECT count(*) AS calls FROM model_calls
                        WHERE run_id = r.run_id AND rollout_id = r.id AND status = 'completed') c
    WHERE g.evaluation_id = %(evaluation)s
"""


def rows(repeats: int) -> list[Row]:
    """Rollouts of agents that only print, and of agents that ask the model."""
    with (
        tempfile.TemporaryDirectory(prefix="bench-rollouts-") as folder,
        stubbed_platform(Path(folder)) as platform,
        Client(platform.facts.url("api"), platform.token) as client,
    ):
        bench = _Bench(platform, client, _trained_run(client))
        for dataset in SPEAKERS:
            bench.measure(dataset, TASKS[0])
        found = [
            (bench.measure("quiet", MEASURED), bench.measure("asking", MEASURED), _alone()) for _ in range(repeats)
        ]
        grown = {dataset: [bench.measure(dataset, tasks) for tasks in TASKS] for dataset in SPEAKERS}
    quiet, asking, alone = zip(*found, strict=True)
    return [
        _row("quiet", "agents that print a verdict", quiet, alone, grown["quiet"]),
        _row("asking", "agents that ask the model once", asking, alone, grown["asking"]),
    ]


@dataclass(frozen=True)
class Settled:
    """Rollouts a second, from the admission of the first to the end of the last; CPU ms of one by process."""

    rate: float
    cpu_ms: Mapping[str, float]


def _row(dataset: str, agents: str, found: tuple[Settled, ...], alone: tuple[float, ...], grown: list[Settled]) -> Row:
    middle = {name: statistics.median(one.cpu_ms[name] for one in found) for name in found[0].cpu_ms}
    words = ", ".join(f"{name} {middle[name]:.1f}" for name in sorted(middle, key=lambda name: -middle[name]))
    return Row(
        part="rollouts",
        name=f"rollouts through the platform, {agents}",
        unit="rollouts/s",
        repeats=[one.rate for one in found],
        baseline_name=f"the first kind alone, {AT_ONCE} at once",
        baseline=alone,
        goal=Goal(at_least=60),
        growth=Growth(
            "rollouts of an evaluation",
            "ms CPU a rollout",
            [tasks * SIBLINGS for tasks in TASKS],
            [sum(one.cpu_ms.values()) for one in grown],
        ),
        note=f"One runner of {AT_ONCE}, the stub engine and the load on the same cores; verdicts, attempts and"
        f" {SPEAKERS[dataset]} calls each are looked up in Postgres. ms CPU of a rollout: {words}.",
    )


def _trained_run(client: Client) -> str:
    """A run whose one step is done: what it evaluates from now on has the machine for itself."""
    for name in SPEAKERS:
        client.upload_dataset(name, [{"number": number, "agent": name} for number in range(TASKS[-1])])
    document = {
        "name": "rollouts",
        "dataset": "asking",
        "agent": {"command": ["sh", "-c", COMMAND]},
        "runner": {"timeout_seconds": 60},
        "sampling": {"group_size": SIBLINGS, "groups_per_step": 1},
        # The stub's log-probabilities are its own.
        "training": {"steps": 1, "max_logprob_gap": 100.0},
    }
    run_id = client.create_run(document).id
    _until(lambda: client.run(run_id).phase == "completed")
    return run_id


@dataclass(frozen=True)
class _Bench:
    platform: Platform
    client: Client
    run_id: str

    def measure(self, dataset: str, tasks: int) -> Settled:
        """Evaluates so many tasks, and proves that every rollout was what it should be."""
        before = self._cpu_seconds()
        asked = EvaluationRequest(dataset=dataset, max_tasks=tasks, rollouts_per_task=SIBLINGS, policy_version=1)
        evaluation, rollouts = self.client.evaluate_run(self.run_id, asked), tasks * SIBLINGS
        with psycopg.connect(self.platform.facts.database_url, autocommit=True) as connection:
            open_groups = "SELECT count(*) FROM groups WHERE evaluation_id = %s AND state = 'complete'"
            _until(lambda: connection.execute(open_groups, (evaluation.id,)).fetchone() == (tasks,))
            spent = {name: seconds - before[name] for name, seconds in self._cpu_seconds().items()}
            values = {"evaluation": evaluation.id, "calls": SPEAKERS[dataset]}
            right, found, seconds, said = connection.execute(_ENDED, values).fetchone() or (0, 0, 0.0, None)
        if (right, found) != (rollouts, rollouts):
            raise AssertionError(f"of {rollouts} rollouts {found} ended, {right} of them as they should: {said}")
        return Settled(rollouts / seconds, {name: one * 1000 / rollouts for name, one in spent.items()})

    def _cpu_seconds(self) -> dict[str, float]:
        pids = self.platform.pids()
        runner = psutil.Process(pids["runner"])
        home = self.platform.home
        postgres = psutil.Process(int((home / "postgres/data/postmaster.pid").read_text().split()[0]))
        return {
            **{name: process_seconds(pid) for name, pid in pids.items()},
            "agents and supervisors": _ended_seconds(runner),
            "postgres": _ended_seconds(postgres)
            + sum(process_seconds(p.pid) for p in [postgres, *postgres.children()]),
            "redis": process_seconds(int((home / "redis/redis.pid").read_text())),
        }


def _ended_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.children_user + times.children_system)


def _alone() -> float:
    """The quiet agents a second, without a platform."""
    agents = MEASURED * SIBLINGS
    script = (
        f"export LEYDEN_TASK=quiet; seq {agents} | xargs -P {AT_ONCE} -I @ env LEYDEN_ROLLOUT_ID=@ sh -c '{COMMAND}'"
    )
    began = time.perf_counter()
    said = subprocess.run(["/bin/sh", "-c", script], check=True, capture_output=True, text=True).stdout
    seconds = time.perf_counter() - began
    if sorted(said.splitlines()) != sorted(f'{{"reward": {number % 2}}}' for number in range(agents)):
        raise AssertionError("the agents alone did not all print their verdict")
    return agents / seconds


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {WAIT_SECONDS:g} s")
        time.sleep(0.1)
