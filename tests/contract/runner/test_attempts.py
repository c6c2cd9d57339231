"""The runner as a process: real leases in Postgres, real deliveries from Redis, real agents."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from sqlalchemy import select, update

from leyden.libs.capability import KeyRing, verify, write_keys
from leyden.libs.contracts.capability import Scope
from leyden.libs.queue.stream import RolloutQueue
from leyden.libs.sandbox.mounts import place_of_workspaces, rights_to_show
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from tests.support import builders, queues
from tests.support.waiting import eventually
from tests.unit.sandbox.test_supervisor import FORKS, alive, read_pids

SECRET = "a secret of the platform"


class Endpoints:
    """Two servers that answer in place of gateway and collector."""

    def __init__(self) -> None:
        self._servers: list[asyncio.Server] = []
        self._writers: set[asyncio.StreamWriter] = set()
        self.gateway = self.collector = ""
        self.status = "404 Not Found"

    async def open(self) -> None:
        self._servers = [await asyncio.start_server(self._answer, "127.0.0.1", 0) for _ in range(2)]
        ports = [server.sockets[0].getsockname()[1] for server in self._servers]
        self.gateway, self.collector = (f"http://127.0.0.1:{port}" for port in ports)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with contextlib.closing(writer), contextlib.suppress(OSError, EOFError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(f"HTTP/1.1 {self.status}\r\ncontent-length: 0\r\n\r\n".encode())

    def close(self) -> None:
        for server in self._servers:
            server.close()
        for writer in self._writers:
            writer.close()


class Bench:
    """A database with one run, a queue, and runner processes that belong to this test."""

    def __init__(self, database: Database, redis_url: str, folder: Path) -> None:
        self.database, self.redis_url, self.folder = database, redis_url, folder
        self.queue = RolloutQueue(redis_url)
        self.endpoints = Endpoints()
        self.keys = folder / "keys.json"
        write_keys(self.keys)
        self.processes: list[asyncio.subprocess.Process] = []
        self.launcher: tuple[str, ...] = (sys.executable,)

    async def start(self, **environment: str) -> asyncio.subprocess.Process:
        if not self.endpoints.gateway:
            await self.endpoints.open()
        process = await asyncio.create_subprocess_exec(
            *(*self.launcher, "-m", "leyden.services.runner"),
            env={
                "PATH": os.environ["PATH"],
                "LEYDEN_DATABASE_URL": self.database.dsn,
                "LEYDEN_REDIS_URL": self.redis_url,
                "LEYDEN_CAPABILITY_KEYS_FILE": str(self.keys),
                "LEYDEN_LOG_LEVEL": "warning",
                "RUNNER_GATEWAY_URL": self.endpoints.gateway,
                "RUNNER_COLLECTOR_URL": self.endpoints.collector,
                "RUNNER_WORK_FOLDER": str(self.folder / "attempts"),
                "RUNNER_GRACE_SECONDS": "0.2",
                "RUNNER_POLL_SECONDS": "0.2",
                "RUNNER_DRAIN_SECONDS": "0.2",
                "RUNNER_LEASE_SECONDS": "4",
                "PLATFORM_SECRET": SECRET,
                **environment,
            },
        )
        self.processes.append(process)
        return process

    async def enqueue(
        self,
        code: str,
        *arguments: str,
        size: int = 1,
        agent: Mapping[str, Any] = MappingProxyType({}),
        task: Mapping[str, Any] | None = None,
        greedy: int | None = None,
        reward: Mapping[str, Any] | None = None,
        **limits: Any,
    ) -> list[tables.Rollout]:
        """One group whose agents run some Python in their working folder. Args: greedy: the sibling that is greedy."""
        command = ["{python}", "-S", "-E", "-c", code, *arguments]
        config = builders.run_document(
            agent={"command": command, "environment": {"OWN": "1"}, **agent},
            runner={"timeout_seconds": 20, **limits},
            **({"reward": reward} if reward else {}),
        )
        dataset = await builders.add_dataset(self.database, [task], name=f"one {len(code)}") if task else None
        run = await builders.add_run(self.database, config=config, dataset_id=dataset.id if dataset else None)
        _, rollouts = await builders.add_group(self.database, run, size=size, greedy=greedy)
        await self.queue.enqueue([rollout.id for rollout in rollouts])
        return rollouts

    async def outcome(self, rollout: tables.Rollout, attempt: int = 1) -> tables.Outcome:
        return await self.until(lambda: self._get(tables.Outcome, (rollout.id, attempt)))

    async def second_outcome(self, rollout: tables.Rollout) -> tables.Outcome:
        """The outcome of attempt 2; does the controller's part until it is there."""

        async def found() -> tables.Outcome | None:
            async with self.database.session() as session:
                await queues.control(session)
            await self.queue.enqueue([rollout.id])
            row: tables.Outcome | None = await self._get(tables.Outcome, (rollout.id, 2))
            return row

        outcome: tables.Outcome = await self.until(found)
        return outcome

    async def attempt(self, rollout: tables.Rollout, state: str, number: int = 1) -> tables.Attempt:
        async def found() -> tables.Attempt | None:
            row = await self._get(tables.Attempt, (rollout.id, number))
            return row if row is not None and row.state == state else None

        return await self.until(found)

    async def until(self, find: Callable[[], Awaitable[Any]], seconds: float = 90.0) -> Any:
        deadline = time.monotonic() + seconds
        while not (found := await find()):
            assert time.monotonic() < deadline, "did not come true in time"
            await asyncio.sleep(0.02)
        return found

    async def pids(self, count: int) -> list[int]:
        """The processes that an agent running FORKS noted in its folder."""

        async def found() -> list[int]:
            # Folders of attempts may go while they are looked through.
            walked = os.walk(self.folder / "attempts")
            notes = [read_pids(Path(folder)) for folder, _, files in walked if "pids" in files]
            return next((pids for pids in notes if len(pids) == count), [])

        return list(await self.until(found))

    async def all_dead(self, pids: list[int]) -> None:
        async def dead() -> bool:
            return not any(map(alive, pids))

        await self.until(dead)

    async def _get(self, table: type[Any], key: tuple[str, int]) -> Any:
        async with self.database.read() as session:
            return await session.get(table, key)

    async def close(self) -> None:
        for process in self.processes:
            if process.returncode is None:
                process.kill()
                await process.wait()
        self.endpoints.close()
        await self.queue.close()


@pytest.fixture
async def bench(database: Database, redis_url: str, tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(database, redis_url, tmp_path)
    yield made
    await made.close()


@asynccontextmanager
async def stopped(process: asyncio.subprocess.Process) -> AsyncIterator[None]:
    yield
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(60):
        assert await process.wait() == 0


def can_show(bench: Bench) -> bool:
    """Whether a runner of this machine gives each agent files of its own."""
    other = bench.folder / "other"
    other.mkdir(exist_ok=True)
    room = bench.folder / "attempts" / "attempt"
    room.mkdir(parents=True, exist_ok=True)
    return rights_to_show(room, other, own_users=False) is not None


async def test_agents_run_in_fresh_folders_with_their_own_environment_and_outcomes(bench: Bench) -> None:
    code = """
import json, os
ours = ('RUNNER_', 'LEYDEN_DATABASE', 'LEYDEN_REDIS', 'LEYDEN_CAPABILITY', 'PLATFORM')
open('left', 'x').write('x')
print(json.dumps({
    'reward': 0.5,
    'secrets': [name for name in os.environ if name.startswith(ours)],
    'home': os.environ['HOME'] == os.getcwd(),
    'paths': [os.getcwd(), os.environ['TMPDIR'], os.environ['LEYDEN_TASK_FILE']],
    'seen': os.listdir(os.environ['HOME'] + '/..'),
    'key': os.environ['OPENAI_API_KEY'],
    'argv': open('/proc/self/cmdline').read(),
    'own': os.environ['OWN'],
    'task': json.loads(os.environ['LEYDEN_TASK']),
}))
"""
    async with stopped(await bench.start()):
        rollouts = await bench.enqueue(code, size=3, greedy=2)
        outcomes = [await bench.outcome(rollout) for rollout in rollouts]
        for rollout, outcome in zip(rollouts, outcomes, strict=True):
            assert (outcome.kind, outcome.reward, outcome.exit_code) == ("succeeded", 0.5, 0)
            facts = outcome.facts
            assert (facts["secrets"], facts["home"], facts["own"], facts["task"]) == (
                [],
                True,
                "1",
                {"question": "2+2"},
            )
            assert facts["key"] not in facts["argv"]
            capability = verify(KeyRing(bench.keys), facts["key"], rollout_id=rollout.id, attempt=1, scope=Scope.MODEL)
            assert capability.scopes == {Scope.MODEL, Scope.TELEMETRY}
            assert capability.greedy == (rollout is rollouts[2])
            assert capability.expires_at > time.time() + 20
        paths = {tuple(outcome.facts["paths"]) for outcome in outcomes}
        room = bench.folder / "attempts" / "attempt"
        place = place_of_workspaces(room)
        if can_show(bench):
            # A text that an agent makes of them differs in no sibling and names none.
            assert paths == {(f"{place}/work", f"{place}/tmp", f"{place}/task.json")}
        else:
            assert len(paths) == 3
        assert {tuple(sorted(outcome.facts["seen"])) for outcome in outcomes} == {
            ("task.json", "tmp", "var-tmp", "work")
        }
        # The mounts were the agents' own.
        assert list(room.iterdir()) == []
        attempt = await bench.attempt(rollouts[0], "settled")
        assert attempt.started_at is not None
        assert await bench.queue.depth() == 0
    assert not list((bench.folder / "attempts").glob("runner-*"))


PRINTS_ITS_INPUT = """
import json, os, sys
print(json.dumps({
    'reward': 1,
    'argv': sys.argv[1:],
    'city': os.environ['CITY'],
    'stdin': sys.stdin.read(),
    'file': open('input.json').read(),
}))
"""


async def test_an_agent_that_knows_nothing_of_leyden_gets_its_task(bench: Bench) -> None:
    task = {"question": "'; rm -rf $HOME & `id` {task.trip.city} é", "trip": {"city": "Bari", "days": [3, 4.5]}}
    words = ("--q={task.question}", "{task.trip.days.1}", '{"a": {{task.trip}}}', "{task.trip}")
    agent = {"environment": {"CITY": "in {task.trip.city}"}, "task": "stdin", "task_file": "input.json"}
    async with stopped(await bench.start()):
        [rollout] = await bench.enqueue(PRINTS_ITS_INPUT, *words, agent=agent, task=task)
        outcome = await bench.outcome(rollout)
        [lacking] = await bench.enqueue("pass", "{task.answer}", task=task)
        failed = await bench.outcome(lacking)
    assert outcome.kind == "succeeded", outcome.stderr_tail
    assert outcome.facts["argv"] == [
        *(f"--q={task['question']}", "4.5", '{"a": {task.trip}}', '{"city": "Bari", "days": [3, 4.5]}')
    ]
    assert outcome.facts["city"] == "in Bari"
    assert json.loads(outcome.facts["stdin"]) == json.loads(outcome.facts["file"]) == task
    assert failed.kind == "infra_error"
    assert re.fullmatch(r"task 0 of \S+: there is no field {task.answer} among question, trip", str(failed.detail))


async def test_each_kind_of_failure_gets_its_own_outcome(bench: Bench) -> None:
    # Enough grace for an agent to end by itself on a busy machine, too.
    async with stopped(await bench.start(RUNNER_GRACE_SECONDS="30")):
        [crash] = await bench.enqueue("import sys; print('{\"reward\": 1}'); sys.exit('broken')")
        [nan] = await bench.enqueue("print('{\"reward\": NaN}')")
        [slow] = await bench.enqueue("import time; time.sleep(60)", timeout_seconds=0.3)
        [silent] = await bench.enqueue("pass")
        outcomes = [
            (one.kind, one.reward, one.exit_code)
            for one in [await bench.outcome(rollout) for rollout in (crash, nan, slow, silent)]
        ]
        assert outcomes == [
            ("agent_error", None, 1),
            ("agent_error", None, 0),
            ("timeout", None, -signal.SIGTERM),
            ("succeeded", None, 0),
        ]
        assert (await bench.outcome(crash)).stderr_tail == "broken\n"


# Notes its start, and waits for a file.
WAITS = """
import os, sys, time
open('pids', 'w').write('1')
while not os.path.exists('go'): time.sleep(0.01)
"""


async def test_a_failure_while_an_endpoint_is_down_is_not_the_agents(bench: Bench) -> None:
    async with stopped(await bench.start()):
        [rollout] = await bench.enqueue(WAITS + "sys.exit(1)", timeout_seconds=120)
        await bench.pids(1)
        bench.endpoints.close()
        for folder in (bench.folder / "attempts").glob("*/*/work"):
            (folder / "go").touch()
        outcome = await bench.outcome(rollout)
        assert outcome.kind == "infra_error"
        assert "did not answer while the agent ran" in (outcome.detail or "")


@pytest.mark.parametrize(("line", "is_noted"), [("", True), ("print('{\"reward\": 0}')", False)])
async def test_an_agent_without_a_reward_that_swallowed_an_endpoint_being_down_is_noted(
    bench: Bench, line: str, is_noted: bool
) -> None:
    async with stopped(await bench.start()):
        [rollout] = await bench.enqueue(WAITS + line, timeout_seconds=120)
        await bench.pids(1)
        bench.endpoints.close()
        for folder in (bench.folder / "attempts").glob("*/*/work"):
            (folder / "go").touch()
        outcome = await bench.outcome(rollout)
    assert (outcome.kind, outcome.endpoint_down is not None) == ("succeeded", is_noted)
    assert outcome.gateway_down_seconds is not None


@pytest.mark.parametrize("code", ["import sys; sys.exit(1)", "print('{\"reward\": 0}')"])
async def test_an_agent_whose_key_the_gateway_refuses_is_not_blamed(bench: Bench, code: str) -> None:
    bench.endpoints.status = "401 Unauthorized"
    async with stopped(await bench.start()):
        [rollout] = await bench.enqueue(code)
        outcome = await bench.outcome(rollout)
        assert (outcome.kind, outcome.reward) == ("infra_error", None)
        assert "LEYDEN_CAPABILITY_KEYS_FILE" in (outcome.detail or "")


async def test_a_killed_runner_leaves_no_process_and_its_rollout_runs_again(bench: Bench) -> None:
    first = await bench.start()
    once = "\nif os.environ['LEYDEN_ATTEMPT'] == '1': time.sleep(60)\nprint('{\"reward\": 1}')"
    [rollout] = await bench.enqueue(FORKS + once)
    pids = await bench.pids(3)
    first.kill()
    await first.wait()
    await bench.all_dead(pids)
    async with stopped(await bench.start()):
        outcome = await bench.second_outcome(rollout)
        assert outcome.kind == "succeeded"
    async with bench.database.read() as session:
        rows = (await session.execute(select(tables.Attempt.number, tables.Attempt.state))).all()
    assert sorted(map(tuple, rows)) == [(1, "expired"), (2, "settled")]
    assert not list((bench.folder / "attempts").glob("runner-*"))


LEAVES_A_FILE = """
import os, sys, time
open(sys.argv[1], 'x').close()
if os.environ['LEYDEN_ATTEMPT'] == '1': time.sleep(60)
print('{"reward": 1}')
"""


async def test_of_an_agent_whose_runner_was_killed_nothing_is_left_in_tmp(bench: Bench) -> None:
    if not can_show(bench):
        pytest.skip("agents share /tmp here")
    left = Path("/tmp", f"left-{bench.folder.name}")
    # A work folder in /tmp would close /tmp itself to agents.
    with tempfile.TemporaryDirectory(dir="/var/tmp") as attempts:
        runner = await bench.start(RUNNER_WORK_FOLDER=attempts)
        [rollout] = await bench.enqueue(LEAVES_A_FILE, str(left))
        [file] = await eventually(lambda: [*Path(attempts).glob(f"*/*/tmp/{left.name}")])
        assert not left.exists()
        runner.kill()
        await runner.wait()
        async with stopped(await bench.start(RUNNER_WORK_FOLDER=attempts)):
            # It creates that file itself.
            assert (await bench.second_outcome(rollout)).kind == "succeeded"
            assert not file.exists()
        assert sorted(path.name for path in Path(attempts).iterdir()) == [".starting", "attempt"]
    assert not left.exists()


async def test_a_lost_lease_kills_the_agent_and_writes_no_outcome(bench: Bench) -> None:
    async with stopped(await bench.start()):
        await bench.enqueue(FORKS + "\ntime.sleep(60)")
        pids = await bench.pids(3)
        async with bench.database.session() as session:
            await session.execute(update(tables.Attempt).values(state="expired", finished_at=datetime.now(tz=UTC)))
        await bench.all_dead(pids)
    async with bench.database.read() as session:
        assert (await session.scalars(select(tables.Outcome))).all() == []


async def test_a_cancelled_rollout_is_stopped_and_its_lease_released(bench: Bench) -> None:
    async with stopped(await bench.start()):
        [rollout] = await bench.enqueue(FORKS + "\ntime.sleep(60)")
        pids = await bench.pids(3)
        async with bench.database.session() as session:
            await session.execute(update(tables.Rollout).values(state="cancelled", finished_at=datetime.now(tz=UTC)))
        assert (await bench.outcome(rollout)).kind == "cancelled"
        await bench.all_dead(pids)


async def test_a_stopped_runner_releases_attempts_that_do_not_finish_in_time(bench: Bench) -> None:
    process = await bench.start()
    [rollout] = await bench.enqueue(FORKS + "\ntime.sleep(60)")
    pids = await bench.pids(3)
    async with stopped(process):
        pass
    outcome = await bench.outcome(rollout)
    assert (outcome.kind, outcome.detail) == ("infra_error", "the runner was stopped")
    await bench.all_dead(pids)


async def test_redis_may_be_wiped_while_a_runner_waits(bench: Bench) -> None:
    async with stopped(await bench.start()):
        await bench.enqueue("print('{\"reward\": 1}')")
        await bench.queue._redis.flushall()
        [rollout] = await bench.enqueue("print('{\"reward\": 1}')")
        assert (await bench.outcome(rollout)).kind == "succeeded"


async def test_without_redis_rollouts_are_found_in_the_store(bench: Bench) -> None:
    [rollout] = await bench.enqueue("print('{\"reward\": 1}')")
    async with stopped(await bench.start(LEYDEN_REDIS_URL="redis://127.0.0.1:1/0")):
        assert (await bench.outcome(rollout)).kind == "succeeded"


async def test_a_second_sigterm_releases_all_attempts_at_once(bench: Bench) -> None:
    process = await bench.start(RUNNER_DRAIN_SECONDS="1000", RUNNER_SHUTDOWN_SECONDS="1010")
    [rollout] = await bench.enqueue(FORKS + "\ntime.sleep(600)", timeout_seconds=1000)
    pids = await bench.pids(3)
    # Two signals at once are one: again, until the second one has come.
    while await bench._get(tables.Outcome, (rollout.id, 1)) is None:
        process.terminate()
        await asyncio.sleep(0.2)
    outcome = await bench.outcome(rollout)
    async with asyncio.timeout(60):
        status = await process.wait()
    assert (status, outcome.kind, outcome.detail) == (0, "infra_error", "the runner was stopped")
    await bench.all_dead(pids)
