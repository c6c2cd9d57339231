"""A late worker changes nothing. Settling needs the lease it was given; a lease is fenced by its id."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import select, text

from leyden.libs.capability import KeyRing, verify
from leyden.libs.contracts.capability import Scope
from leyden.libs.queue import leases
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from tests.contract.runner.test_attempts import Bench, stopped
from tests.support.shared import open_to_agents
from tests.support.waiting import waits_for_a_table

# The first attempt says that it is there, waits for a word and calls itself worthless; any later one succeeds at once.
LATE_AGENT = """
import json, os, pathlib, time
notes, late = pathlib.Path({notes!r}), os.environ['LEYDEN_ATTEMPT'] == '1'
def say(word):
    with notes.open('a') as file: file.write(word)
if late:
    say('here ')
    while 'go ' not in notes.read_text(): time.sleep(0.01)
    say('said')
print(json.dumps({{'reward': 0.0 if late else 1.0}}))
"""

OTHER_TRANSACTIONS = """
    SELECT count(*) FROM pg_stat_activity
    WHERE datname = current_database() AND xact_start IS NOT NULL AND pid <> pg_backend_pid()
"""

# A second after the start of the process its clocks have always been this far off.
JUMPING_CLOCK = """
import time
true_time, true_monotonic = time.time, time.monotonic
began = true_monotonic()
def off(): return {seconds} if true_monotonic() - began > 1 else 0
time.time = lambda: true_time() + off()
time.monotonic = lambda: true_monotonic() + max(0, off())
"""


@pytest.fixture
async def bench(database: Database, redis_url: str, tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(database, redis_url, tmp_path)
    yield made
    await made.close()


async def attempts(database: Database, rollout: tables.Rollout) -> list[tuple[int, str]]:
    async with database.read() as session:
        table = tables.Attempt
        rows = await session.execute(
            select(table.number, table.state).where(table.rollout_id == rollout.id).order_by(table.number)
        )
    return [(row.number, row.state) for row in rows]


async def verdicts(database: Database, rollout: tables.Rollout) -> list[tuple[int, str, float | None]]:
    async with database.read() as session:
        table = tables.Outcome
        rows = await session.scalars(select(table).where(table.rollout_id == rollout.id).order_by(table.attempt))
    return [(row.attempt, row.kind, row.reward) for row in rows]


async def noted(bench: Bench, notes: Path, text: str) -> None:
    """Returns when the notes are this text."""
    await bench.until(lambda: asyncio.to_thread(lambda: notes.read_text() == text))


async def pause(bench: Bench, runner: asyncio.subprocess.Process) -> None:
    """Stops a runner between two transactions: Postgres would end one for which it stands still too long."""

    async def stands_still() -> bool:
        runner.send_signal(signal.SIGSTOP)
        async with bench.database.read() as session:
            if not await session.scalar(text(OTHER_TRANSACTIONS)):
                return True
        runner.send_signal(signal.SIGCONT)
        return False

    await bench.until(stands_still)


async def settles_another(bench: Bench) -> None:
    """A runner of one attempt at a time that settles another one is done with the late one."""
    [other] = await bench.enqueue("print('{\"reward\": 1}')")
    await bench.outcome(other)


async def settled_unless_overdue(bench: Bench, rollout: tables.Rollout) -> tables.Outcome | None:
    """The outcome of attempt 1; fails where its lease ran out meanwhile."""
    async with bench.database.session() as session:
        assert await leases.expire_overdue(session) == []
    outcome: tables.Outcome | None = await bench._get(tables.Outcome, (rollout.id, 1))
    return outcome


async def test_a_runner_paused_beyond_its_lease_writes_no_outcome(bench: Bench, tmp_path: Path) -> None:
    notes = open_to_agents(tmp_path / "notes")
    late = await bench.start(RUNNER_CONCURRENCY="1")
    [rollout] = await bench.enqueue(LATE_AGENT.format(notes=str(notes)), timeout_seconds=120)
    await noted(bench, notes, "here ")
    await pause(bench, late)
    # The agent's verdict is there before the lease is over; nobody is awake to settle it.
    with notes.open("a") as file:
        file.write("go ")
    await noted(bench, notes, "here go said")
    async with stopped(await bench.start()):
        assert (await bench.second_outcome(rollout)).reward == 1.0
    late.send_signal(signal.SIGCONT)
    async with stopped(late):
        await settles_another(bench)
        assert await attempts(bench.database, rollout) == [(1, "expired"), (2, "settled")]
        assert await verdicts(bench.database, rollout) == [(2, "succeeded", 1.0)]


async def test_a_runner_paused_inside_a_transaction_does_not_hold_its_attempt(bench: Bench) -> None:
    late = await bench.start(RUNNER_CONCURRENCY="1")
    async with bench.database.session() as session:
        # The runner has ended its attempt and waits for the row of the outcome.
        await session.execute(text("LOCK TABLE outcomes IN SHARE MODE"))
        [rollout] = await bench.enqueue("print('{\"reward\": 1}')")
        await bench.until(lambda: waits_for_a_table(bench.database))
        late.send_signal(signal.SIGSTOP)
    async with stopped(await bench.start()):
        assert (await bench.second_outcome(rollout)).reward == 1.0
    late.send_signal(signal.SIGCONT)
    async with stopped(late):
        await settles_another(bench)
        assert await attempts(bench.database, rollout) == [(1, "expired"), (2, "settled")]


async def test_an_attempt_that_continues_after_its_lease_was_lost_is_stopped_without_an_outcome(
    bench: Bench, tmp_path: Path
) -> None:
    notes = open_to_agents(tmp_path / "notes")
    late = await bench.start(RUNNER_CONCURRENCY="1")
    [rollout] = await bench.enqueue(LATE_AGENT.format(notes=str(notes)), timeout_seconds=120)
    await noted(bench, notes, "here ")
    await pause(bench, late)
    async with stopped(await bench.start()):
        assert (await bench.second_outcome(rollout)).reward == 1.0
    late.send_signal(signal.SIGCONT)
    async with stopped(late):
        await settles_another(bench)
        assert await attempts(bench.database, rollout) == [(1, "expired"), (2, "settled")]
        assert await verdicts(bench.database, rollout) == [(2, "succeeded", 1.0)]


@pytest.mark.parametrize("seconds", [-86_400, 86_400])
async def test_a_clock_jump_of_a_day_on_the_runner_does_not_affect_its_lease(
    bench: Bench, tmp_path: Path, seconds: int
) -> None:
    (tmp_path / "sitecustomize.py").write_text(JUMPING_CLOCK.format(seconds=seconds))
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3])])
    code = "import json, os, time; time.sleep(3); print(json.dumps({'reward': 1, 'key': os.environ['OPENAI_API_KEY']}))"
    async with stopped(await bench.start(PYTHONPATH=path, RUNNER_LEASE_SECONDS="30")):
        # The second begins after the jump.
        for _ in range(2):
            [rollout] = await bench.enqueue(code, timeout_seconds=60)
            attempt = await bench.attempt(rollout, "running")
            now = datetime.now(tz=UTC)
            assert now - timedelta(seconds=600) < attempt.lease_expires_at < now + timedelta(seconds=600)
            outcome = await bench.until(lambda one=rollout: settled_unless_overdue(bench, one), 60.0)
            assert await verdicts(bench.database, rollout) == [(1, "succeeded", 1.0)]
            assert await attempts(bench.database, rollout) == [(1, "settled")]
            capability = verify(
                KeyRing(bench.keys), outcome.facts["key"], rollout_id=rollout.id, attempt=1, scope=Scope.MODEL
            )
            assert capability.expires_at < now.timestamp() + 3600
