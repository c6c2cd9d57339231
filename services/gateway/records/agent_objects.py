"""Reads and writes what agents store by the Responses API; while Postgres is down, both retry for `hold_seconds`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping

import orjson

from leyden.libs.contracts.conversation import Json
from leyden.libs.store.database import Database, ReadSession, Session
from leyden.libs.store.records.agent_objects import (
    AttemptOfRun,
    add_objects,
    objects_by_id,
    owned_objects,
    replace_object,
)
from leyden.services.gateway.auth import Attempt
from leyden.services.gateway.records.quotas import AttemptQuota
from leyden.services.gateway.records.reader import T, hold

MAX_ID = 256
OBJECT_BYTES = 300
"""A row without its document."""


class AgentObjects:
    """The objects of all attempts; each attempt sees its own. Raises: Unavailable, in every method."""

    def __init__(self, database: Database, *, hold_seconds: float, quota: AttemptQuota) -> None:
        self._database = database
        self._quota = quota
        self._hold_seconds = hold_seconds

    async def owned(self, attempt: Attempt, owner_id: str) -> dict[str, Json]:
        """Returns an object and its items, by id, in order; empty where it is unknown or deleted."""
        if not _is_storable(owner_id):
            return {}
        return await self._read(lambda session: owned_objects(session, _key(attempt), owner_id))

    async def by_id(self, attempt: Attempt, ids: Collection[str]) -> dict[str, Json | None]:
        """Returns items and deleted responses (None) with these ids."""
        storable = list(filter(_is_storable, ids))
        return await self._read(lambda session: objects_by_id(session, _key(attempt), storable))

    async def add(self, attempt: Attempt, owner_id: str, documents: Mapping[str, Json | None]) -> None:
        """Stores documents after all earlier ones; those that exist stay as they are. Raises: BadRequest: too many."""
        sizes = list(map(_size, documents.values()))
        self._quota.check(attempt.key, sizes)
        with self._quota.storing(attempt.key, sizes):
            await self._write(lambda session: add_objects(session, _key(attempt), owner_id, documents))

    async def replace(self, attempt: Attempt, owner_id: str, name: str, document: Json) -> None:
        """Replaces a document. Raises: BadRequest: too large."""
        self._quota.check(attempt.key, [_size(document)])
        await self._write(lambda session: replace_object(session, _key(attempt), owner_id, name, document))

    async def delete(self, attempt: Attempt, owner_id: str, name: str | None = None) -> None:
        """Deletes an item; without a name, the object with all its items."""
        await self._write(lambda session: replace_object(session, _key(attempt), owner_id, name, None))

    async def _read(self, work: Callable[[ReadSession], Awaitable[T]]) -> T:
        async def read() -> T:
            async with self._database.read() as session:
                return await work(session)

        return await hold(read, self._hold_seconds)

    async def _write(self, work: Callable[[Session], Awaitable[None]]) -> None:
        async def write() -> None:
            async with self._database.session() as session:
                await work(session)

        await hold(write, self._hold_seconds)


def _size(document: Json | None) -> int:
    return OBJECT_BYTES + len(orjson.dumps(document))


def _is_storable(name: str) -> bool:
    """Whether Postgres takes the text as a key; an id from a path may be any."""
    return "\0" not in name and len(name) <= MAX_ID


def _key(attempt: Attempt) -> AttemptOfRun:
    return AttemptOfRun(attempt.run_id, attempt.rollout_id, attempt.attempt)
