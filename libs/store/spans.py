"""Telemetry: spans and rewards, written in bulk by the collector so that a repeat changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import psycopg
import sqlalchemy.exc
from psycopg import sql

from libs.faults import passes
from libs.store.calls import StoreAway
from libs.store.database import Database, Session, copy_rows, raw_connection

# Measured on two cores: INSERT takes half of COPY's time for 1 to 128 rows, twice its time for 512.
MAX_INSERT_ROWS = 128


class TelemetryRefused(Exception):
    """Rows that Postgres will never store: their run has no partition (its data was dropped), or a value is wrong."""


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

    Raises: StoreAway: try again, a repeat is harmless; TelemetryRefused: a row cannot be stored, so none was
    """
    try:
        async with database.session() as session:
            await _write_rows(session, "spans", NewSpan._fields, spans)
            passes("collector.spans_written")
            await _write_rows(session, "rewards", NewReward._fields, rewards)
    except (psycopg.DataError, psycopg.IntegrityError, psycopg.ProgrammingError) as error:
        raise TelemetryRefused(str(error).splitlines()[0]) from error
    except (psycopg.Error, sqlalchemy.exc.SQLAlchemyError, OSError) as error:
        raise StoreAway(str(error)) from error


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
