"""Model calls: the gateway's durable record, and what it reads back (answers of an attempt, engines, defaults)."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from typing import Any, NewType, cast

import orjson
import psycopg
from psycopg import sql
from psycopg.abc import PQGen
from psycopg.errors import error_from_result
from psycopg.generators import copy_to, execute, fetch_many, send
from psycopg.pq import ExecStatus
from psycopg.pq.abc import PGconn, PGresult
from sqlalchemy import ARRAY, Text, all_, literal, select

from leyden.libs.contracts.conversation import Dialect, Json, Turn, turn_json
from leyden.libs.contracts.states import CallStatus, EngineState
from leyden.libs.store import tables
from leyden.libs.store.binary import HEADER, TRAILER, Piece, encoded, formats, row_pieces
from leyden.libs.store.chains import FullCall, MissingParent, full_calls
from leyden.libs.store.connection import BoundedConnection, arguments, connect
from leyden.libs.store.database import AWAY, RECYCLE_SECONDS, Database, ReadSession, cause

UNSENT_BYTES = 2**20
"""What libpq may hold of a batch before it is waited for."""
FEW_CALLS = 4
"""So many rows cost less as statements than as a COPY: half of the client's time, and no answer to wait for between."""

# Postgres stores no NUL in JSON; the escape counts only after an even number of backslashes.
_NUL = re.compile(rb"(?<!\\)((?:\\\\)*)\\u0000")


JsonText = NewType("JsonText", bytes)
"""The text of a JSON document that Postgres stores as it is: `storable_json` makes one."""


class StoreAway(Exception):
    """Postgres cannot be reached, or did not say whether it committed: write again with `may_exist`."""


class CallRefused(Exception):
    """A call that Postgres will never store: its run has no partition, or a value is out of range."""


@dataclass(frozen=True, slots=True)
class NewCall:
    """One row of `model_calls`, columns in the table's words; arrays as bytes.

    A call with a parent, an earlier and durable call of its attempt, holds only what it adds: `turns` follow the first
    `shared_turns` turns of the parent (its turns, then its answer), `prompt_ids` the first `shared_tokens` tokens (its
    prompt, then its sampled tokens); `tools` is None where they are the parent's.
    """

    run_id: str
    id: str
    rollout_id: str
    attempt: int
    request_id: str
    choice: int
    sequence: int
    status: CallStatus
    trainable: bool
    untrainable_reason: str | None
    request_sha256: bytes
    dialect: Dialect
    request: Json
    parent_call_id: str | None
    shared_turns: int
    shared_tokens: int
    turns: Sequence[Turn]
    tools: Sequence[Json] | None
    answer: Turn | None
    prompt_ids: Piece
    sampled_ids: bytes
    generator_logprobs: bytes
    policy_versions: bytes
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    min_policy_version: int | None
    max_policy_version: int | None
    temperature: float
    finish_reason: str | None
    trace_id: str | None
    parent_span_id: str | None
    queued_seconds: float
    first_token_seconds: float | None
    total_seconds: float


@dataclass(frozen=True, slots=True)
class ServingEngine:
    """An engine, and the policy version of a run that it serves."""

    url: str
    run_id: str
    policy_version: int | None


_COLUMNS = tuple(field.name for field in fields(NewCall))
_OTHER_TYPES = {
    "attempt": "int4", "choice": "int4", "sequence": "int8", "trainable": "bool", "request_sha256": "bytea",
    "request": "jsonb", "shared_turns": "int4", "shared_tokens": "int4", "turns": "jsonb", "tools": "json",
    "answer": "jsonb", "prompt_ids": "bytea", "sampled_ids": "bytea", "generator_logprobs": "bytea",
    "policy_versions": "bytea", "prompt_tokens": "int4", "completion_tokens": "int4",
    "cached_tokens": "int4", "min_policy_version": "int4", "max_policy_version": "int4", "temperature": "float8",
    "queued_seconds": "float8", "first_token_seconds": "float8", "total_seconds": "float8",
}  # fmt: skip
_TYPES = [_OTHER_TYPES.get(name, "text") for name in _COLUMNS]
_NAMES = sql.SQL(", ").join(map(sql.Identifier, _COLUMNS))
_TABLE = sql.Identifier("model_calls")
_INCOMING = sql.Identifier("incoming_model_calls")
# Texts, because composing one costs as much as sending a row.
_COPY_HERE, _COPY_INCOMING = (
    sql.SQL("COPY {} ({}) FROM STDIN (FORMAT BINARY)").format(target, _NAMES).as_bytes()
    for target in (_TABLE, _INCOMING)
)
_INSERT = (
    sql.SQL("INSERT INTO {} ({}) VALUES ({})")
    .format(_TABLE, _NAMES, sql.SQL(", ").join(sql.SQL(f"${n}::{kind}") for n, kind in enumerate(_TYPES, start=1)))
    .as_bytes()
)
_INSERT_NAME = b"insert_call"
_FORMATS = formats(_TYPES)
_WELL = {ExecStatus.COMMAND_OK, ExecStatus.PIPELINE_SYNC}

_SERVING = (
    sql.SQL("SELECT url, run_id, policy_version FROM engines WHERE state = {} AND run_id IS NOT NULL ORDER BY url")
    .format(str(EngineState.SERVING))
    .as_bytes()
)
_COMPLETED = (
    sql.SQL("SELECT count(*) FROM {} WHERE run_id = %s AND rollout_id = %s AND attempt = %s AND status = {}")
    .format(_TABLE, str(CallStatus.COMPLETED))
    .as_bytes()
)


class _OwnConnection:
    """One connection, opened when it is wanted and again after it was closed; for one statement at a time.

    Outside a transaction block a statement commits by itself.

    Args: client: as for `Database`; timeout_seconds: bound on an answer, after which the store counts as away
    """

    def __init__(self, dsn: str, client: str = "leyden", *, timeout_seconds: float = 10.0) -> None:
        self._dsn = dsn
        self._client = client
        self._timeout_seconds = timeout_seconds
        self._connection: BoundedConnection | None = None
        self._opened_at = 0.0

    async def close(self) -> None:
        """Closes the connection; what comes next opens another."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def _connected(self) -> BoundedConnection:
        current = self._connection
        if current is not None and (current.closed or time.monotonic() - self._opened_at > RECYCLE_SECONDS):
            await self.close()
        if self._connection is None:
            async with asyncio.timeout(self._timeout_seconds):
                self._connection = await connect(
                    self._dsn,
                    answer_seconds=self._timeout_seconds,
                    autocommit=True,
                    **arguments(self._dsn, self._client, self._timeout_seconds),
                )
            self._connection.listen()
            self._opened_at = time.monotonic()
        return self._connection


class CallWriter(_OwnConnection):
    """Writes calls, a transaction per `write`: few are durable after one round trip, as a prepared INSERT each, many
    after two, by COPY.
    """

    _prepared_on: BoundedConnection | None = None

    async def write(self, calls: Sequence[NewCall], *, may_exist: bool = False) -> None:
        """Makes the calls durable, all or none; returns after the commit.

        Args: may_exist: an earlier try may have committed; calls whose id exists are left as they are
        Raises: StoreAway: try again; CallRefused: one of the calls cannot be stored, so none was
        """
        try:
            connection = await self._connected()
            if len(calls) <= FEW_CALLS and not may_exist:
                # The connection itself bounds the wait for an answer.
                await self._insert(connection, calls)
            else:
                async with asyncio.timeout(self._timeout_seconds):
                    await (_merge(connection, calls) if may_exist else _copy(connection, _COPY_HERE, calls))
        except (psycopg.DataError, psycopg.IntegrityError, psycopg.ProgrammingError, ValueError) as error:
            await self.close()
            raise CallRefused(str(error)) from error
        except (psycopg.Error, OSError, TimeoutError) as error:
            await self.close()
            raise StoreAway(cause(error)) from error

    async def _insert(self, connection: BoundedConnection, calls: Sequence[NewCall]) -> None:
        server = connection.pgconn
        if self._prepared_on is not connection:
            server.send_prepare(_INSERT_NAME, _INSERT)
            await _done(connection)
            self._prepared_on = connection
        server.enter_pipeline_mode()
        for call in calls:
            values = [encoded(value, kind) for value, kind in zip(_values(call), _TYPES, strict=True)]
            server.send_query_prepared(_INSERT_NAME, values, param_formats=_FORMATS)
        # All statements before it are one transaction.
        server.pipeline_sync()
        results = await connection.wait(_answers(server, len(calls)))
        for result in results:
            if result.status not in _WELL:
                raise error_from_result(result)
        if len(results) != len(calls) + 1:
            raise psycopg.OperationalError("Postgres has not answered to every row and to their end")
        server.exit_pipeline_mode()


class QuickReader(_OwnConnection):
    """Reads what is asked many times a second, one question after another: a prepared statement costs an eighth of a
    session of `Database`."""

    def __init__(self, dsn: str, client: str = "leyden", *, timeout_seconds: float = 10.0) -> None:
        super().__init__(dsn, client, timeout_seconds=timeout_seconds)
        self._turn = asyncio.Lock()

    async def serving(self) -> list[ServingEngine]:
        """The engines that the controller last saw serving a run's policy.

        Raises: StoreAway
        """
        rows = await self._rows(_SERVING)
        return [ServingEngine(str(url), str(run_id), cast(int, version)) for url, run_id, version in rows]

    async def completed(self, run_id: str, rollout_id: str, attempt: int) -> int:
        """How many calls of an attempt are completed.

        Raises: StoreAway
        """
        [(count,)] = await self._rows(_COMPLETED, run_id, rollout_id, attempt)
        return cast(int, count)

    async def _rows(self, statement: bytes, *values: object) -> list[tuple[Any, ...]]:
        try:
            # Those who wait for their turn are away from the store as well.
            async with asyncio.timeout(self._timeout_seconds), self._turn:
                cursor = await (await self._connected()).execute(statement, values, prepare=True)
                return await cursor.fetchall()
        except (psycopg.Error, OSError, TimeoutError) as error:
            raise StoreAway(cause(error)) from error


@asynccontextmanager
async def reading(database: Database) -> AsyncIterator[ReadSession]:
    """A read-only transaction in which a store that is away raises `StoreAway`."""
    try:
        async with database.read() as session:
            yield session
    except AWAY as error:
        raise StoreAway(cause(error)) from error


def storable_json(document: object) -> JsonText:
    """The document's text, each U+0000 in it replaced by U+FFFD."""
    text = orjson.dumps(document)
    return JsonText(_NUL.sub(rb"\1\\ufffd", text) if rb"\u0000" in text else text)


async def completed_calls(
    session: ReadSession, run_id: str, rollout_id: str, attempt: int, *, except_ids: Collection[str]
) -> list[tuple[tables.ModelCall, FullCall]]:
    """Completed calls of an attempt, oldest first, choices of a request in order, without those that lack a parent.

    Args: except_ids: calls that the reader has already
    """
    table = tables.ModelCall
    rows = await session.scalars(
        select(table)
        .where(
            table.run_id == run_id,
            table.rollout_id == rollout_id,
            table.attempt == attempt,
            table.id != all_(literal(list(except_ids), ARRAY(Text))),
            table.status == CallStatus.COMPLETED,
        )
        .order_by(table.sequence, table.choice)
    )
    calls = rows.all()
    found = zip(calls, await full_calls(session, calls), strict=True)
    return [(call, full) for call, full in found if not isinstance(full, MissingParent)]


async def completed_requests(
    session: ReadSession, run_id: str, rollout_id: str, attempt: int, *, request_sha256: bytes
) -> Sequence[tables.ModelCall]:
    """The completed calls that answered one body within an attempt, latest request first, its choices in order.

    Their rows hold only what each call adds to its parent.
    """
    table = tables.ModelCall
    rows = await session.scalars(
        select(table)
        .where(
            table.run_id == run_id,
            table.rollout_id == rollout_id,
            table.attempt == attempt,
            table.request_sha256 == request_sha256,
            table.status == CallStatus.COMPLETED,
        )
        .order_by(table.sequence.desc(), table.choice)
    )
    return rows.all()


async def default_temperature(session: ReadSession, run_id: str) -> float | None:
    """The temperature that a run gives to calls that name none; None when it names none either, or is unknown."""
    config = await session.scalar(select(tables.Run.config).where(tables.Run.id == run_id))
    temperature = ((config or {}).get("sampling") or {}).get("temperature")
    return None if temperature is None else float(temperature)


async def _copy(
    connection: psycopg.AsyncConnection[tuple[object, ...]], statement: bytes, calls: Sequence[NewCall]
) -> None:
    async with connection.cursor() as cursor, cursor.copy(statement) as copy:
        await copy.write(HEADER)
        await connection.wait(_hand_over(connection.pgconn, calls))


def _answers(server: PGconn, count: int) -> PQGen[list[PGresult]]:
    """The results of so many statements, and the end of their transaction."""
    yield from send(server)
    results: list[PGresult] = []
    for _ in range(count + 1):
        results += yield from fetch_many(server)
    return results


def _hand_over(server: PGconn, calls: Sequence[NewCall]) -> PQGen[None]:
    """Gives the rows and what ends them to libpq, which sends while it takes them."""
    unsent = 0
    for call in calls:
        for piece in row_pieces(_values(call), _TYPES):
            unsent += len(piece)
            yield from copy_to(server, piece, flush=unsent > UNSENT_BYTES)
            unsent = 0 if unsent > UNSENT_BYTES else unsent
    yield from copy_to(server, TRAILER, flush=False)


async def _merge(connection: psycopg.AsyncConnection[tuple[object, ...]], calls: Sequence[NewCall]) -> None:
    async with connection.transaction():
        await connection.execute(
            sql.SQL("CREATE TEMPORARY TABLE {} ON COMMIT DROP AS SELECT {} FROM {} WITH NO DATA").format(
                _INCOMING, _NAMES, _TABLE
            )
        )
        await _copy(connection, _COPY_INCOMING, calls)
        await connection.execute(
            sql.SQL("INSERT INTO {} ({}) SELECT {} FROM {} ON CONFLICT DO NOTHING").format(
                _TABLE, _NAMES, _NAMES, _INCOMING
            )
        )


async def _done(connection: BoundedConnection) -> None:
    """Raises: psycopg.Error: what was sent has failed"""
    for result in await connection.wait(execute(connection.pgconn)):
        if result.status != ExecStatus.COMMAND_OK:
            raise error_from_result(result)


def _document(value: object) -> object:
    if isinstance(value, Turn):
        return turn_json(value)
    return list(map(_document, value)) if isinstance(value, tuple | list) else value


def _values(call: NewCall) -> list[object]:
    """The columns in their order, JSON as text."""
    # `dataclasses.astuple` would copy the documents.
    values = (_document(getattr(call, name)) for name in _COLUMNS)
    return [
        storable_json(value) if kind in {"json", "jsonb"} and value is not None else value
        for value, kind in zip(values, _TYPES, strict=True)
    ]
