"""The store: durable model calls, rollouts from lease to outcome, and the polls of controller and credit."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from leyden.libs.contracts import ids
from leyden.libs.contracts.config import Sampling
from leyden.libs.contracts.conversation import Turn, turn_json
from leyden.libs.contracts.states import OutcomeKind
from leyden.libs.embedded.servers import EmbeddedRedis
from leyden.libs.queue import leases
from leyden.libs.queue.leases import Lease, Outcome
from leyden.libs.queue.notifications import Notifications
from leyden.libs.queue.stream import RolloutQueue
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.libs.store.group_commit import GroupCommit
from leyden.libs.store.records.calls import NewCall, write_calls
from leyden.libs.store.runs.admission import admit_groups
from leyden.libs.store.runs.facts import load_runs
from leyden.libs.store.runs.rollouts import queued_rollouts
from leyden.libs.store.samples import claim_groups
from leyden.libs.telemetry import configure_logs
from leyden.services.controller.runs import admission, settling
from leyden.services.runner.attempt_writer import AttemptWriter
from tests.bench.history import add_past
from tests.bench.rows import Row
from tests.bench.stored import Stored, stored
from tests.bench.trajectories import lone_calls
from tests.support.builders import add_group, add_run

CALLS = 2048
"""In one measurement."""
PROMPT_TOKENS, SAMPLED_TOKENS = 2000, 500
IN_FLIGHT = 64
"""Agents that each wait until their answer is recorded."""

RUNNERS, CONCURRENCY, ROLLOUTS = 4, 8, 480
"""Runner processes' worth of leases at once, and rollouts in one measurement."""
SIBLINGS = 8
GROUPS_PRESENT, POLLS = 20_000, 20
"""Groups of two rollouts that a run has already, and polls in one measurement."""
TICK_SECONDS = 0.1
"""The controller's shortest pause."""

_SETTLED = """
    SELECT count(*) FILTER (WHERE r.state = 'finished' AND r.reward = r.sibling %% 2 AND a.state = 'settled'
                            AND o.reward = r.reward AND g.state = 'complete'), count(*)
    FROM rollouts r JOIN groups g ON g.id = r.group_id JOIN attempts a ON a.rollout_id = r.id
    JOIN outcomes o ON o.rollout_id = r.id AND o.attempt = a.number WHERE r.id = ANY(%s)
"""
_COLUMNS = sql.SQL(", ").join(sql.Identifier(field.name) for field in fields(NewCall))


def rows(repeats: int) -> list[Row]:
    """Recorded calls, settled rollouts, and polls."""
    configure_logs("bench", "warning")
    with stored() as store, tempfile.TemporaryDirectory(prefix="bench-redis-") as folder:
        redis = EmbeddedRedis(Path(folder))
        redis_url = redis.start()
        try:
            return [
                asyncio.run(_calls(store, repeats)),
                asyncio.run(_rollouts(store, redis_url, repeats)),
                asyncio.run(_polls(store, repeats)),
            ]
        finally:
            redis.stop()


async def _calls(store: Stored, repeats: int) -> Row:
    database = Database(store.dsn)
    run = await add_run(database)
    _, rollouts = await add_group(database, run)
    await database.close()
    calls = lone_calls(run.id, rollouts[0].id, CALLS // 8, PROMPT_TOKENS, SAMPLED_TOKENS)
    await _record(store, calls)
    rates = [await _record(store, calls * 8) for _ in range(repeats)]
    work = f"model calls recorded, {PROMPT_TOKENS} + {SAMPLED_TOKENS} tokens, {IN_FLIGHT} in flight"
    return Row("store", work, "calls/s", rates, at_least=2700)


async def _record(store: Stored, calls: Sequence[NewCall]) -> float:
    """Calls a second, recorded as the gateway does, `IN_FLIGHT` of them at a time."""
    database = Database(store.dsn, pool_size=1)
    commit = GroupCommit[NewCall](partial(write_calls, database), max_items=512, hold_seconds=60)
    writing = asyncio.create_task(commit.run())
    fresh = [replace(call, id=ids.new_call_id()) for call in calls]
    left = iter(fresh)

    async def agent() -> None:
        for call in left:
            await commit.submit([call])

    with psycopg.connect(store.dsn, autocommit=True) as connection:
        before = _count(connection, "model_calls")
        began = time.perf_counter()
        await asyncio.gather(*(agent() for _ in range(IN_FLIGHT)))
        seconds = time.perf_counter() - began
        found = _count(connection, "model_calls") - before
        if found != len(calls):
            raise AssertionError(f"{len(calls)} calls were recorded and {found} are stored")
        for call in fresh[:: len(fresh) // 8]:
            _check(connection, call)
    writing.cancel()
    await asyncio.wait({writing})
    await database.close()
    return len(calls) / seconds


def _check(connection: psycopg.Connection[Any], call: NewCall) -> None:
    """Raises: AssertionError: a column differs"""
    question = sql.SQL("SELECT {} FROM model_calls WHERE run_id = %s AND id = %s").format(_COLUMNS)
    row = connection.execute(question, (call.run_id, call.id)).fetchone()
    if row != tuple(_as_stored(getattr(call, field.name)) for field in fields(NewCall)):
        raise AssertionError(f"call {call.id} is stored with other columns")


def _as_stored(value: object) -> object:
    if isinstance(value, Turn):
        return turn_json(value)
    return list(map(_as_stored, value)) if isinstance(value, tuple) else value


def _rest(connection: psycopg.Connection[Any]) -> None:
    """Vacuums and checkpoints now, so that Postgres does not during a measurement."""
    connection.execute("VACUUM ANALYZE")
    connection.execute("CHECKPOINT")


def _count(connection: psycopg.Connection[Any], table: str, run_id: str | None = None) -> int:
    where = "" if run_id is None else "WHERE run_id = %(run)s"
    row = connection.execute(f"SELECT count(*) FROM {table} {where}", {"run": run_id}).fetchone()
    assert row is not None
    return int(row[0])


async def _rollouts(store: Stored, redis_url: str, repeats: int) -> Row:
    database = Database(store.dsn, pool_size=RUNNERS + 2)
    run = await add_run(database)
    rates = [await _settle(store, database, redis_url, run) for _ in range(repeats)]
    await database.close()
    work = f"rollouts from queue to outcome, {RUNNERS} runners of {CONCURRENCY}, agents of no time"
    return Row("store", work, "rollouts/s", rates, at_least=340)


async def _settle(store: Stored, database: Database, redis_url: str, run: tables.Run) -> float:
    """Rollouts a second: runners lease, start and settle them, and a controller ends them."""
    ids_ = await _admit(database, run)
    notifications = Notifications(redis_url)
    queue = RolloutQueue(redis_url)
    began = time.perf_counter()
    await queue.enqueue(ids_)
    done = asyncio.Event()
    runners = [asyncio.create_task(_runner(store.dsn, redis_url, notifications, n, done)) for n in range(RUNNERS)]
    while await _tick(database, run.id):
        await asyncio.sleep(TICK_SECONDS)
    done.set()
    await asyncio.gather(*runners)
    seconds = time.perf_counter() - began
    await queue.close()
    await notifications.close()
    with psycopg.connect(store.dsn) as connection:
        row = connection.execute(
            _SETTLED,
            (ids_,),
        ).fetchone()
    if row != (len(ids_), len(ids_)):
        raise AssertionError(f"of {len(ids_)} rollouts {row} are settled and complete")
    return len(ids_) / seconds


async def _admit(database: Database, run: tables.Run) -> list[str]:
    async with database.session() as session:
        [facts] = [one for one in (await load_runs(session)).runs if one.id == run.id]
        config = facts.config.model_copy(update={"sampling": Sampling(group_size=SIBLINGS)})
        admitted = admission.training_groups(replace(facts, config=config), ROLLOUTS // SIBLINGS, served_version=0)
        await admit_groups(session, admitted, {})
    return [rollout for group in admitted for rollout in group.rollout_ids]


async def _runner(dsn: str, redis_url: str, notifications: Notifications, number: int, done: asyncio.Event) -> None:
    """The writes of a runner whose agents end at once."""
    database, queue, owner = Database(dsn), RolloutQueue(redis_url), f"runner-{number}"
    writer = AttemptWriter(database, notifications, hold_seconds=60)
    writing = asyncio.create_task(writer.run())
    while not done.is_set():
        deliveries = await queue.deliver(owner, CONCURRENCY, 0.2)
        async with database.session() as session:
            leased = await leases.lease_rollouts(session, [one.rollout_id for one in deliveries], owner, 60)
        await queue.ack(deliveries)
        await asyncio.gather(*(_attempt(writer, lease) for lease in leased))
    writing.cancel()
    await asyncio.wait({writing})
    await queue.close()
    await database.close()


async def _attempt(writer: AttemptWriter, lease: Lease) -> None:
    reward = float(int(lease.rollout_id.rpartition(".")[2]) % 2)
    line = f'{{"reward": {reward}}}'
    outcome = Outcome(
        OutcomeKind.SUCCEEDED, reward=reward, facts={"reward": reward}, exit_code=0, stdout_tail="looked\n" * 100 + line
    )
    if not await writer.start(lease) or not await writer.settle(lease, outcome):
        raise AssertionError(f"{lease.rollout_id} lost its lease")


async def _tick(database: Database, run_id: str) -> bool:
    """A poll of the controller; returns whether the run has open groups."""
    async with database.session() as session:
        await settling.settle(session, groups_without_success=4, retry_base=0.5)
        await leases.expire_overdue(session)
        runs = (await load_runs(session)).runs
        await queued_rollouts(session)
    return any(run.open_training_groups for run in runs if run.id == run_id)


async def _polls(store: Stored, repeats: int) -> Row:
    """The polls of idle services over a run with many old groups."""
    database = Database(store.dsn)
    run = await add_run(database)
    with psycopg.connect(store.dsn, autocommit=True) as connection:
        add_past(connection, run.id, GROUPS_PRESENT)
        _rest(connection)
    found = [await _poll_milliseconds(store, database, run.id) for _ in range(repeats)]
    await database.close()
    work = f"one poll of controller and credit over {GROUPS_PRESENT:,} groups"
    return Row("store", work, "ms CPU", found, at_most=12)


async def _poll_milliseconds(store: Stored, database: Database, run_id: str) -> float:
    before = time.process_time() + store.cpu_seconds()
    for _ in range(POLLS):
        if await _tick(database, run_id):
            raise AssertionError("nothing should be open")
        async with database.session() as session:
            await claim_groups(session, 8, recent=True)
    spent = time.process_time() + store.cpu_seconds() - before
    async with database.session() as session:
        [facts] = [one for one in (await load_runs(session)).runs if one.id == run_id]
    with psycopg.connect(store.dsn) as connection:
        counted = _count(connection, "groups", run_id)
    if (facts.next_group, facts.counting_groups) != (counted, counted):
        raise AssertionError(f"{counted} groups are counted as {facts.counting_groups}")
    return spent * 1000 / POLLS
