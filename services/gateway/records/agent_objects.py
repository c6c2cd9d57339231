"""Reads and writes what agents store by the Responses API; while Postgres is down, both retry for `hold_seconds`."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import orjson

from leyden.libs.contracts.conversation import Json
from leyden.libs.store.attempts import AttemptKey
from leyden.libs.store.database import Database
from leyden.libs.store.records.agent_objects import (
    AttemptOfRun,
    add_objects,
    objects_by_id,
    owned_objects,
    replace_object,
)
from leyden.services.gateway.records.quotas import AttemptQuota
from leyden.services.gateway.records.reader import HeldStore

MAX_ID = 256
OBJECT_BYTES = 300
"""A row without its document."""


class AgentObjects(HeldStore):
    """The objects of all attempts; each attempt sees its own. Raises: Unavailable, in every method."""

    def __init__(self, database: Database, *, hold_seconds: float, quota: AttemptQuota) -> None:
        super().__init__(database, hold_seconds=hold_seconds)
        self._quota = quota

    async def owned(self, attempt: AttemptOfRun, owner_id: str) -> dict[str, Json]:
        """Returns an object and its items, by id, in order; empty where it is unknown or deleted."""
        if not _is_storable(owner_id):
            return {}
        return await self._read(lambda session: owned_objects(session, attempt, owner_id))

    async def by_id(self, attempt: AttemptOfRun, ids: Collection[str]) -> dict[str, Json | None]:
        """Returns items and deleted responses (None) with these ids."""
        storable = list(filter(_is_storable, ids))
        return await self._read(lambda session: objects_by_id(session, attempt, storable))

    async def add(self, attempt: AttemptOfRun, owner_id: str, documents: Mapping[str, Json | None]) -> None:
        """Stores documents after all earlier ones; those that exist stay as they are. Raises: BadRequest: too many."""
        sizes = list(map(_size, documents.values()))
        self._quota.check(_key(attempt), sizes)
        with self._quota.storing(_key(attempt), sizes):
            await self._write(lambda session: add_objects(session, attempt, owner_id, documents))

    async def replace(self, attempt: AttemptOfRun, owner_id: str, name: str, document: Json) -> None:
        """Replaces a document. Raises: BadRequest: too large."""
        self._quota.check(_key(attempt), [_size(document)])
        await self._write(lambda session: replace_object(session, attempt, owner_id, name, document))

    async def delete(self, attempt: AttemptOfRun, owner_id: str, name: str | None = None) -> None:
        """Deletes an item; without a name, the object with all its items."""
        await self._write(lambda session: replace_object(session, attempt, owner_id, name, None))


def _size(document: Json | None) -> int:
    return OBJECT_BYTES + len(orjson.dumps(document))


def _is_storable(name: str) -> bool:
    """Whether Postgres takes the text as a key; an id from a path may be any."""
    return "\0" not in name and len(name) <= MAX_ID


def _key(attempt: AttemptOfRun) -> AttemptKey:
    return AttemptKey(attempt.rollout_id, attempt.attempt)
