"""What the store bears: model calls made durable, rollouts from lease to verdict, and the looks of the controller."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from leyden.libs.contracts import ids
from leyden.libs.contracts.config import Sampling
from leyden.libs.contracts.conversation import Turn, turn_json
from leyden.libs.contracts.states import OutcomeKind
from leyden.libs.queue import leases
from leyden.libs.queue.leases import Lease, Outcome
from leyden.libs.queue.notifications import Notifications
from leyden.libs.queue.stream import RolloutQueue
from leyden.libs.store import groups, tables
from leyden.libs.store.calls import CallWriter, NewCall
from leyden.libs.store.database import Database
from leyden.libs.store.embedded import EmbeddedRedis
from leyden.libs.store.samples import lock_pending_groups
from leyden.libs.telemetry import configure_logs
from leyden.services.controller import admission, settling
from leyden.services.gateway.records.writer import Recorder
from leyden.services.runner.attempt_writer import AttemptWriter
from tests.bench.history import add_past
from tests.bench.rows import Goal, Growth, Row
from tests.bench.stored import Stored, stored
from tests.bench.trajectories import lone_calls
from tests.builders import add_group, add_run

CALLS = 2048
"""In one measurement."""
PROMPT_TOKENS, SAMPLED_TOKENS = 2000, 500
IN_FLIGHT = 64
"""Agents that each wait until their answer is recorded."""
CALLS_PRESENT = (1024, 4096, 16_384)
"""Calls that a run has already."""

RUNNERS, CONCURRENCY, ROLLOUTS = 4, 8, 480
"""Runner processes' worth of leases at once, and rollouts in one measurement."""
SIBLINGS = 8
GROUPS_PRESENT = (1250, 5000, 20_000)
"""Groups of two rollouts that a run has already."""
TICK_SECONDS = 0.1
"""The controller's shortest pause."""

_SETTLED = """
    SELECT count(*) FILTER (WHERE r.state = 'finished' AND r.reward = r.sibling %% 2 AND a.state = 'settled'
                            AND o.reward = r.reward AND g.state = 'complete'), count(*)
    FROM rollouts r JOIN groups g ON g.id = r.group_id JOIN attempts a ON a.rollout_id = r.id
    JOIN outcomes o ON o.rollout_id = r.id AND o.attempt = a.number WHERE r.id = ANY(%s)
"""
_COLUMNS = sql.SQL(", ").join(sql.Identifier(field.name) for field in fields(NewCall))


@dataclass(frozen=True)
class Measured:
    """One measurement: units of work a second by the clock, and ms of CPU time for one, ours and Postgres' together."""

    rate: float
    cpu_ms: float


@contextmanager
def measured(store: Stored, units: int, into: list[Measured]) -> Iterator[None]:
    """Measures the block, which does so many units of work in this process and in Postgres."""
    cpu, began = time.process_time() + store.cpu_seconds(), time.perf_counter()
    yield
    seconds, busy = time.perf_counter() - began, time.process_time() + store.cpu_seconds() - cpu
    into.append(Measured(units / seconds, busy * 1000 / units))


def rows(repeats: int) -> list[Row]:
    """Calls recorded, rollouts settled, looks at runs."""
    configure_logs("bench", "warning")
    with stored() as store, tempfile.TemporaryDirectory(prefix="bench-redis-") as folder:
        redis = EmbeddedRedis(Path(folder))
        redis_url = redis.start()
        try:
            return [
                asyncio.run(_calls(store, repeats)),
                asyncio.run(_rollouts(store, redis_url, repeats)),
                asyncio.run(_looks(store, repeats)),
            ]
        finally:
            redis.stop()


async def _calls(store: Stored, repeats: int) -> Row:
    database = Database(store.dsn)
    run, *grown = [await add_run(database) for _ in (0, *CALLS_PRESENT)]
    _, rollouts = await add_group(database, run)
    await database.close()
    calls = lone_calls(run.id, rollouts[0].id, CALLS // 8, PROMPT_TOKENS, SAMPLED_TOKENS)
    found: list[Measured] = []
    copied: list[float] = []
    await _record(store, calls, [])
    for _ in range(repeats):
        copied.append(_copy_bytes(store.dsn, CALLS))
        await _record(store, calls * 8, found)
    by_size = [[replace(one, run_id=other.id) for one in calls] for other in grown]
    for mine, present in zip(by_size, CALLS_PRESENT, strict=True):
        await _add_calls(store, mine, present)
    beside: list[list[Measured]] = [[] for _ in by_size]
    for _ in range(repeats):
        for mine, into in zip(by_size, beside, strict=True):
            await _record(store, mine, into)
    return Row(
        part="store",
        name=f"model calls recorded, {PROMPT_TOKENS} + {SAMPLED_TOKENS} tokens, {IN_FLIGHT} in flight",
        unit="calls/s",
        repeats=[one.rate for one in found],
        baseline_name=f"COPY of the same bytes, {IN_FLIGHT} a commit",
        baseline=copied,
        goal=Goal(at_least=2000),
        growth=Growth("calls of the run", "ms CPU a call", CALLS_PRESENT, _costs(beside)),
        note="Through the gateway's recorder; every call counted in Postgres afterwards, some compared whole.",
    )


async def _record(store: Stored, calls: Sequence[NewCall], into: list[Measured]) -> None:
    """Records calls as the gateway does, `IN_FLIGHT` of them at a time."""
    recorder = Recorder(writer := CallWriter(store.dsn), hold_seconds=60)
    writing = asyncio.create_task(recorder.run())
    fresh = [replace(call, id=ids.new_call_id()) for call in calls]
    left = iter(fresh)

    async def agent() -> None:
        for call in left:
            await recorder.record([call])

    with psycopg.connect(store.dsn, autocommit=True) as connection:
        before = _count(connection, "model_calls")
        with measured(store, len(calls), into):
            await asyncio.gather(*(agent() for _ in range(IN_FLIGHT)))
        found = _count(connection, "model_calls") - before
        if found != len(calls):
            raise AssertionError(f"{len(calls)} calls were recorded and {found} are stored")
        for call in fresh[:: len(fresh) // 8]:
            _prove(connection, call)
    writing.cancel()
    await asyncio.wait({writing})
    await writer.close()


def _prove(connection: psycopg.Connection[Any], call: NewCall) -> None:
    """Raises where a call is stored otherwise than it was given."""
    question = sql.SQL("SELECT {} FROM model_calls WHERE run_id = %s AND id = %s").format(_COLUMNS)
    row = connection.execute(question, (call.run_id, call.id)).fetchone()
    if row != tuple(_as_stored(getattr(call, field.name)) for field in fields(NewCall)):
        raise AssertionError(f"call {call.id} is stored otherwise than it was given")


def _as_stored(value: object) -> object:
    if isinstance(value, Turn):
        return turn_json(value)
    return list(map(_as_stored, value)) if isinstance(value, tuple) else value


async def _add_calls(store: Stored, calls: Sequence[NewCall], present: int) -> None:
    """Fills a run up to so many calls: some are recorded, and Postgres copies them under other ids."""
    await _record(store, calls, [])
    fresh = sql.SQL("'c' || left(replace(gen_random_uuid()::text, '-', ''), 24)")
    names = [fresh if field.name == "id" else sql.Identifier(field.name) for field in fields(NewCall)]
    copies = sql.SQL(
        "INSERT INTO model_calls ({}) SELECT {} FROM (SELECT * FROM model_calls WHERE run_id = %s LIMIT %s) c,"
        " generate_series(1, %s) n LIMIT %s"
    )
    with psycopg.connect(store.dsn, autocommit=True) as connection:
        connection.execute(
            copies.format(_COLUMNS, sql.SQL(", ").join(names)),
            (calls[0].run_id, len(calls), present // len(calls), present - len(calls)),
        )
        _rest(connection)


def _costs(by_size: Sequence[Sequence[Measured]]) -> list[float]:
    return [statistics.median(one.cpu_ms for one in found) for found in by_size]


def _rest(connection: psycopg.Connection[Any]) -> None:
    """Does what Postgres would do by itself after so many rows, so that it does not while something is measured."""
    connection.execute("VACUUM ANALYZE")
    connection.execute("CHECKPOINT")


def _count(connection: psycopg.Connection[Any], table: str, run_id: str | None = None) -> int:
    where = "" if run_id is None else "WHERE run_id = %(run)s"
    row = connection.execute(f"SELECT count(*) FROM {table} {where}", {"run": run_id}).fetchone()
    assert row is not None
    return int(row[0])


def _copy_bytes(dsn: str, calls: int) -> float:
    """Calls a second where Postgres alone works: the bytes of its own COPY, made before the clock starts."""
    out = sql.SQL("COPY (SELECT {} FROM model_calls LIMIT {}) TO STDOUT (FORMAT BINARY)")
    with psycopg.connect(dsn, autocommit=True) as connection, connection.cursor() as cursor:
        with cursor.copy(out.format(_COLUMNS, IN_FLIGHT)) as reading:
            content = b"".join(reading)
        cursor.execute(
            "CREATE TABLE ceiling (LIKE model_calls INCLUDING DEFAULTS INCLUDING STORAGE INCLUDING COMPRESSION)"
        )
        cursor.execute("CREATE INDEX ON ceiling (run_id, id)")
        cursor.execute("CREATE INDEX ON ceiling (rollout_id, attempt, sequence)")
        began = time.perf_counter()
        for _ in range(calls // IN_FLIGHT):
            with cursor.copy(sql.SQL("COPY ceiling ({}) FROM STDIN (FORMAT BINARY)").format(_COLUMNS)) as writing:
                writing.write(content)
        seconds = time.perf_counter() - began
        cursor.execute("DROP TABLE ceiling")
    return calls / seconds


async def _rollouts(store: Stored, redis_url: str, repeats: int) -> Row:
    database = Database(store.dsn, pool_size=RUNNERS + 2)
    run, *grown = [await add_run(database) for _ in (0, *GROUPS_PRESENT)]
    found: list[Measured] = []
    bare: list[float] = []
    for _ in range(repeats):
        bare.append(await _bare_commits(store.dsn))
        await _settle(store, database, redis_url, run, found)
    with psycopg.connect(store.dsn, autocommit=True) as connection:
        for other, present in zip(grown, GROUPS_PRESENT, strict=True):
            add_past(connection, other.id, present)
        _rest(connection)
    beside: list[list[Measured]] = [[] for _ in grown]
    for _ in range(repeats):
        for other, into in zip(grown, beside, strict=True):
            await _settle(store, database, redis_url, other, into)
    await database.close()
    return Row(
        part="store",
        name=f"rollouts from queue to verdict, {RUNNERS} runners of {CONCURRENCY}",
        unit="rollouts/s",
        repeats=[one.rate for one in found],
        baseline_name="three bare commits each, as many clients",
        baseline=bare,
        goal=Goal(at_least=60),
        growth=Growth("groups of the run", "ms CPU a rollout", GROUPS_PRESENT, _costs(beside)),
        note="Redis' delivery, lease, start and settle with the runner's group commit, the controller's poll every"
        " 0.1 s; agents take no time. Every attempt, outcome and reward is checked afterwards.",
    )


async def _settle(store: Stored, database: Database, redis_url: str, run: tables.Run, into: list[Measured]) -> None:
    """Admits rollouts, has runners lease, start and settle them, and a controller end them."""
    ids_ = await _admit(database, run)
    notifications = Notifications(redis_url)
    queue = RolloutQueue(redis_url)
    with measured(store, len(ids_), into):
        await queue.enqueue(ids_)
        done = asyncio.Event()
        runners = [asyncio.create_task(_runner(store.dsn, redis_url, notifications, n, done)) for n in range(RUNNERS)]
        while await _tick(database, run.id):
            await asyncio.sleep(TICK_SECONDS)
        done.set()
        await asyncio.gather(*runners)
    await queue.close()
    await notifications.close()
    with psycopg.connect(store.dsn) as connection:
        row = connection.execute(
            _SETTLED,
            (ids_,),
        ).fetchone()
    if row != (len(ids_), len(ids_)):
        raise AssertionError(f"of {len(ids_)} rollouts {row} are settled and complete")


async def _admit(database: Database, run: tables.Run) -> list[str]:
    async with database.session() as session:
        [facts] = [one for one in await groups.load_runs(session) if one.id == run.id]
        config = facts.config.model_copy(update={"sampling": Sampling(group_size=SIBLINGS)})
        admitted = admission.training_groups(replace(facts, config=config), ROLLOUTS // SIBLINGS, served_version=0)
        await groups.admit_groups(session, admitted, {})
    return [rollout for group in admitted for rollout in group.rollout_ids]


async def _runner(dsn: str, redis_url: str, notifications: Notifications, number: int, done: asyncio.Event) -> None:
    """What a runner writes, for agents that end at once."""
    database, queue, owner = Database(dsn), RolloutQueue(redis_url), f"runner-{number}"
    writer = AttemptWriter(database, notifications)
    writing = asyncio.create_task(writer.run())
    while not done.is_set():
        deliveries = await queue.deliver(owner, CONCURRENCY, 0.2)
        async with database.session() as session:
            taken = await leases.lease_rollouts(session, [one.rollout_id for one in deliveries], owner, 60)
        await queue.ack(deliveries)
        await asyncio.gather(*(_attempt(writer, lease) for lease in taken))
    writer.close()
    await writing
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
    """The controller's look at everything; whether rollouts of the run are left."""
    async with database.session() as session:
        ended = await groups.ended_attempts(session)
        resolved = [settling.resolve(one, Sampling()) for one in ended]
        await groups.resolve_rollouts(session, [one for one in resolved if one is not None])
        if ended:
            await groups.complete_groups(session)
            await groups.runs_without_success(session, 4)
        await leases.expire_overdue(session)
        runs = await groups.load_runs(session)
        await groups.queued_rollouts(session)
    return any(run.open_training_groups for run in runs if run.id == run_id)


async def _bare_commits(dsn: str) -> float:
    """Rollouts a second where each is three rows, committed one by one."""

    async def client() -> None:
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
            for _ in range(3 * ROLLOUTS // RUNNERS):
                await connection.execute("INSERT INTO bare VALUES (%s)", [bytes(1000)])

    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE bare (content bytea)")
        began = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(RUNNERS)))
        seconds = time.perf_counter() - began
        connection.execute("DROP TABLE bare")
    return ROLLOUTS / seconds


async def _looks(store: Stored, repeats: int) -> Row:
    """What the services ask again and again while nothing happens, at a run with a long past."""
    database = Database(store.dsn)
    run = await add_run(database)
    found: dict[int, list[float]] = {}
    with psycopg.connect(store.dsn, autocommit=True) as connection:
        for present in GROUPS_PRESENT:
            add_past(connection, run.id, present)
            _rest(connection)
            found[present] = [await _look_milliseconds(store, database, run.id) for _ in range(repeats)]
    await database.close()
    least, most = found[GROUPS_PRESENT[0]], found[GROUPS_PRESENT[-1]]
    costs = [statistics.median(one) for one in found.values()]
    return Row(
        part="store",
        name=f"one look of controller and credit, {GROUPS_PRESENT[-1]:,} groups",
        unit="ms CPU",
        repeats=most,
        baseline_name=f"at {GROUPS_PRESENT[0]:,} groups",
        baseline=least,
        growth=Growth("groups of the run", "ms CPU a look", GROUPS_PRESENT, costs),
        note="The run's facts are compared with what was written.",
    )


async def _look_milliseconds(store: Stored, database: Database, run_id: str) -> float:
    looks = 20
    taken: list[Measured] = []
    with measured(store, looks, taken):
        for _ in range(looks):
            if await _tick(database, run_id):
                raise AssertionError("nothing should be open")
            async with database.session() as session:
                await lock_pending_groups(session, 8, recent=True)
    async with database.session() as session:
        [facts] = [one for one in await groups.load_runs(session) if one.id == run_id]
    with psycopg.connect(store.dsn) as connection:
        counted = _count(connection, "groups", run_id)
    if (facts.next_group, facts.counting_groups) != (counted, counted):
        raise AssertionError(f"{counted} groups are counted as {facts.counting_groups}")
    return taken[0].cpu_ms
