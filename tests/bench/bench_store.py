"""What the store bears: model calls made durable, rollouts from lease to verdict, and the looks of the controller."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import psycopg
from psycopg import sql

from libs.contracts import ids
from libs.store.calls import CallWriter, NewCall
from libs.store.database import Database
from services.gateway.record import Recorder
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
    with stored() as store:
        return [asyncio.run(_calls(store, repeats))]


async def _calls(store: Stored, repeats: int) -> Row:
    database = Database(store.dsn)
    run, grown = await add_run(database), await add_run(database)
    _, rollouts = await add_group(database, run)
    await database.close()
    calls = lone_calls(run.id, rollouts[0].id, CALLS // 8, PROMPT_TOKENS, SAMPLED_TOKENS)
    found: list[Measured] = []
    copied: list[float] = []
    await _record(store, calls, [])
    for _ in range(repeats):
        copied.append(_copy_bytes(store.dsn, CALLS))
        await _record(store, calls * 8, found)
    costs = [await _record_beside(store, [replace(one, run_id=grown.id) for one in calls], n) for n in CALLS_PRESENT]
    return Row(
        part="store",
        name=f"model calls recorded, {PROMPT_TOKENS} + {SAMPLED_TOKENS} tokens, {IN_FLIGHT} in flight",
        unit="calls/s",
        repeats=[one.rate for one in found],
        baseline_name=f"COPY of the same bytes, {IN_FLIGHT} a commit",
        baseline=copied,
        goal=Goal(at_least=2000),
        growth=Growth("calls of the run", "ms CPU a call", CALLS_PRESENT, costs),
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
    if row != tuple(getattr(call, field.name) for field in fields(NewCall)):
        raise AssertionError(f"call {call.id} is stored otherwise than it was given")


async def _record_beside(store: Stored, calls: Sequence[NewCall], present: int) -> float:
    """The cost of a call, in ms of CPU time, while its run has so many already."""
    run_id = calls[0].run_id
    with psycopg.connect(store.dsn, autocommit=True) as connection:
        before = _count(connection, "model_calls", run_id)
        if not before:
            await _record(store, calls, [])
            before = len(calls)
        # Copied by Postgres itself, under other ids.
        fresh = sql.SQL("'c' || left(replace(gen_random_uuid()::text, '-', ''), 24)")
        names = [fresh if field.name == "id" else sql.Identifier(field.name) for field in fields(NewCall)]
        connection.execute(
            sql.SQL(
                "INSERT INTO model_calls ({}) SELECT {} FROM (SELECT * FROM model_calls WHERE run_id = %s LIMIT %s) c,"
                " generate_series(1, %s) n LIMIT %s"
            ).format(_COLUMNS, sql.SQL(", ").join(names)),
            (run_id, len(calls), present // len(calls), present - before),
        )
        connection.execute("CHECKPOINT")
    found: list[Measured] = []
    for _ in range(3):
        await _record(store, calls, found)
    return statistics.median(one.cpu_ms for one in found)


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
