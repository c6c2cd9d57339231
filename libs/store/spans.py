"""Telemetry: spans and rewards, written in bulk by the collector so that a repeat changes nothing.

TelemetryRefused   these rows will never be stored; nothing of their transaction was
  AttemptEnded     the attempt that they are for does not run any more
  RewardConflict   the reward's key has given another reward before
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import psycopg
import sqlalchemy.exc
from psycopg import sql
from sqlalchemy import text

from leyden.libs.faults import fault_point
from leyden.libs.store.attempts import AttemptKey, hold_attempts
from leyden.libs.store.calls import StoreAway
from leyden.libs.store.database import Database, Session, copy_rows, raw_connection

# Measured on two cores: INSERT takes half of COPY's time for 1 to 128 rows, twice its time for 512.
MAX_INSERT_ROWS = 128
DOOR = "door"
"""Source of rewards that came through the reward door, where a key that is used for two rewards is a mistake."""

_KEPT = text("""
    SELECT r.rollout_id, r.attempt, r.key, r.run_id, r.source, r.name, r.value, r.response_id, r.tool_call_id
    FROM unnest(CAST(:rollout_ids AS text[]), CAST(:attempts AS integer[]), CAST(:keys AS text[]))
        AS asked (rollout_id, attempt, key)
    JOIN rewards r ON r.rollout_id = asked.rollout_id AND r.attempt = asked.attempt AND r.key = asked.key
""")


class TelemetryRefused(Exception):
    """Rows that Postgres will never store: their run has no partition (its data was dropped), or a value is wrong."""


class AttemptEnded(TelemetryRefused):
    """The attempt that rows are for was settled, expired or cancelled before they were committed."""


class RewardConflict(TelemetryRefused):
    """The key of a reward has given another one before, which is kept."""


class NewSpan(NamedTuple):
    """One row of `spans`, columns in the table's words and order of `COPY`. `attributes` is a JSON text."""

    run_id: str
    rollout_id: str
    attempt: int
    trace_id: str
    span_id: str
    parent_span_id: str | None
    name: str
    kind: str
    tool: str | None
    status: str
    error_type: str | None
    tool_call_id: str | None
    response_id: str | None
    start_ns: int
    end_ns: int
    scope: str | None
    attributes: str


class NewReward(NamedTuple):
    """One row of `rewards`. `key` is unique within the attempt."""

    rollout_id: str
    attempt: int
    key: str
    run_id: str
    source: str
    name: str
    value: float
    response_id: str | None
    tool_call_id: str | None


async def write_telemetry(database: Database, spans: Sequence[NewSpan], rewards: Sequence[NewReward]) -> None:
    """Makes rows durable in one transaction, all or none; rows whose key exists are left as they are.

    Idempotency keys: rollout, attempt, trace and span; rollout, attempt and the reward's key. No attempt of theirs can
    end before the commit, so whatever is stored for an attempt was there when it was settled.

    Raises: StoreAway: try again, a repeat is harmless; TelemetryRefused: a row cannot be stored, so none was
    """
    try:
        try:
            await _write(database, spans, rewards, may_exist=False)
        except psycopg.errors.UniqueViolation:
            # Spans are rarely sent again: only then they are compared with what is there, which takes twice the time.
            await _write(database, spans, rewards, may_exist=True)
    except (psycopg.DataError, psycopg.IntegrityError, psycopg.ProgrammingError) as error:
        raise TelemetryRefused(str(error).splitlines()[0]) from error
    except (psycopg.Error, sqlalchemy.exc.SQLAlchemyError, OSError) as error:
        raise StoreAway(str(error)) from error


async def _write(
    database: Database, spans: Sequence[NewSpan], rewards: Sequence[NewReward], *, may_exist: bool
) -> None:
    async with database.session() as session:
        await _hold(session, spans, rewards)
        if may_exist:
            await _write_rows(session, "spans", NewSpan._fields, spans)
        elif spans:
            await copy_rows(session, "spans", NewSpan._fields, spans)
        fault_point("collector.spans_written")
        await _write_rows(session, "rewards", NewReward._fields, rewards)
        await _compare(session, [reward for reward in rewards if reward.source == DOOR])


async def _hold(session: Session, spans: Sequence[NewSpan], rewards: Sequence[NewReward]) -> None:
    attempts = {AttemptKey(span.rollout_id, span.attempt) for span in spans}
    attempts |= {AttemptKey(reward.rollout_id, reward.attempt) for reward in rewards}
    ended = attempts - await hold_attempts(session, attempts)
    if ended:
        raise AttemptEnded(f"{len(ended)} attempts have ended")


async def _compare(session: Session, rewards: Sequence[NewReward]) -> None:
    """Raises: RewardConflict: what is stored under a reward's key is not this reward."""
    if not rewards:
        return
    keys = [(one.rollout_id, one.attempt, one.key) for one in rewards]
    columns = map(list, zip(*keys, strict=True))
    found = await session.execute(_KEPT, dict(zip(("rollout_ids", "attempts", "keys"), columns, strict=True)))
    kept = {row[:3]: row for row in (NewReward(*row) for row in found)}
    for reward in rewards:
        if (before := kept[reward[:3]]) != reward:
            place = before.response_id or before.tool_call_id or "the rollout"
            raise RewardConflict(
                f"key {before.key!r} has given {before.name!r} = {before.value:g} to {place}, which is kept: send"
                " another reward with another key"
            )


async def _write_rows(
    session: Session, table: str, columns: Sequence[str], rows: Sequence[NewSpan] | Sequence[NewReward]
) -> None:
    if len(rows) > MAX_INSERT_ROWS:
        await copy_rows(session, table, columns, rows, on_conflict_do_nothing=True)
    elif rows:
        statement = sql.SQL("INSERT INTO {} ({}) VALUES ({}) ON CONFLICT DO NOTHING").format(
            sql.Identifier(table),
            sql.SQL(", ").join(map(sql.Identifier, columns)),
            sql.SQL(", ").join([sql.Placeholder()] * len(columns)),
        )
        async with (await raw_connection(session)).cursor() as cursor:
            await cursor.executemany(statement, rows)
