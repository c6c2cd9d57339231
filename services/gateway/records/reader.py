"""Reads the store for the gateway: an attempt's calls, engines, a run's defaults; retries while Postgres is down."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from cachetools import LRUCache, TTLCache

from leyden.libs.contracts.config import BrokenDocument
from leyden.libs.contracts.conversation import Json
from leyden.libs.store.attempts import AttemptKey, attempt_began_at
from leyden.libs.store.database import Database, ReadSession, Session, StoreAway
from leyden.libs.store.datasets import task_of_rollout
from leyden.libs.store.engines import (
    EngineStatus,
    RunModel,
    ServingEngine,
    embedding_engines,
    newest_policy_version,
    read_run_model,
    read_serving_engines,
)
from leyden.libs.store.records.agent_names import agent_name
from leyden.libs.store.records.agent_objects import AttemptOfRun
from leyden.libs.store.records.calls import (
    EVER,
    CallDefaults,
    answered_requests,
    call_defaults,
    calls_by_id,
    completed_calls,
)
from leyden.libs.store.records.chains import FullCall
from leyden.libs.store.records.recorded import Reroll, reroll_of
from leyden.libs.store.tables import ModelCall
from leyden.services.gateway.errors import GatewayError, Unavailable

T = TypeVar("T")
RETRY_SECONDS = 0.25
MAX_RUNS = 1000
"""Runs whose document is in memory."""
MAX_ATTEMPTS = MAX_AGENTS = 10_000
UNNAMED_SECONDS = 5.0
"""An agent without a name is looked up again after this time."""


class HeldStore:
    """Repeats a read or a write for `hold_seconds` while Postgres is down. Raises: Unavailable: it was for longer."""

    def __init__(self, database: Database, *, hold_seconds: float) -> None:
        self._database = database
        self._hold_seconds = hold_seconds

    async def _read(self, work: Callable[[ReadSession], Awaitable[T]]) -> T:
        async def read() -> T:
            async with self._database.read() as session:
                return await work(session)

        return await self._held(read)

    async def _write(self, work: Callable[[Session], Awaitable[None]]) -> None:
        async def write() -> None:
            async with self._database.session() as session:
                await work(session)

        await self._held(write)

    async def _held(self, work: Callable[[], Awaitable[T]]) -> T:
        deadline = asyncio.get_running_loop().time() + self._hold_seconds
        while True:
            try:
                return await work()
            except StoreAway as error:
                if asyncio.get_running_loop().time() >= deadline:
                    raise Unavailable(
                        "The store is down; try again.", code="store_unavailable", retry_after_seconds=5
                    ) from error
                await asyncio.sleep(RETRY_SECONDS)


class Reader(HeldStore):
    """Reads for requests. A run's document never changes, so it is cached without expiry."""

    def __init__(self, database: Database, *, hold_seconds: float) -> None:
        super().__init__(database, hold_seconds=hold_seconds)
        self._defaults: LRUCache[str, CallDefaults] = LRUCache(MAX_RUNS)
        self._models: LRUCache[str, RunModel] = LRUCache(MAX_RUNS)
        self._began: LRUCache[AttemptKey, float] = LRUCache(MAX_ATTEMPTS)
        self._names: LRUCache[tuple[str, str], str] = LRUCache(MAX_AGENTS)
        self._unnamed: TTLCache[tuple[str, str], None] = TTLCache(MAX_AGENTS, UNNAMED_SECONDS)

    async def serving(self) -> Sequence[ServingEngine]:
        """Reads the engines that serve a run. Raises: StoreAway."""
        return await read_serving_engines(self._database)

    async def embedding_engines(self, pool: str) -> Sequence[EngineStatus] | None:
        """Reads the engines of a pool that embeds; None where there is no such pool."""
        return await self._read(lambda session: embedding_engines(session, pool))

    async def newest_version(self, run_id: str) -> int | None:
        """Reads the run's newest policy version; None before its first."""
        return await self._read(lambda session: newest_policy_version(session, run_id))

    async def defaults(self, run_id: str) -> CallDefaults:
        """Reads what the run's document says of its calls. Raises: GatewayError: it does not parse"""
        found = self._defaults.get(run_id)
        if found is None:
            with _parsed(run_id):
                found = self._defaults[run_id] = await self._read(lambda session: call_defaults(session, run_id))
        return found

    async def task(self, rollout_id: str) -> Json | None:
        """Reads the task of a rollout; None without one."""
        return await self._read(lambda session: task_of_rollout(session, rollout_id))

    async def agent_name(self, run_id: str, agent: str, seen: str | None) -> str | None:
        """Returns the name of an agent's fingerprint in a run. Args: seen: the name in its call, which comes first"""
        key = (run_id, agent)
        if seen is not None:
            self._names.setdefault(key, seen)
            return seen
        if (name := self._names.get(key)) is not None or key in self._unnamed:
            return name
        name = await self._read(lambda session: agent_name(session, run_id, agent))
        if name is None:
            self._unnamed[key] = None
        else:
            self._names[key] = name
        return name

    async def run_model(self, run_id: str) -> RunModel:
        """Reads the run's pool and model.

        Raises: Unavailable: the pool no longer exists; GatewayError: the run's document does not parse
        """
        found = self._models.get(run_id)
        if found is None:
            with _parsed(run_id):
                found = await self._read(lambda session: read_run_model(session, run_id))
            if found is None:
                message = "The pool of this run no longer exists; try again."
                raise Unavailable(message, code="engine_unavailable", retry_after_seconds=10)
            self._models[run_id] = found
        return found

    async def completed(self, attempt: AttemptOfRun, known: Collection[str]) -> list[tuple[ModelCall, FullCall]]:
        """Reads the completed calls, oldest first, except those in `known` and those with a missing parent."""
        return await self._read(lambda session: completed_calls(session, *attempt, except_ids=known))

    async def requests(
        self, attempt: AttemptOfRun, request_sha256: bytes, arrived: tuple[float, float] = EVER
    ) -> Sequence[ModelCall]:
        """Reads completed and refused calls of equal requests, latest first. Args: arrived: between these moments."""
        return await self._read(
            lambda session: answered_requests(session, *attempt, request_sha256=request_sha256, arrived=arrived)
        )

    async def began_at(self, attempt: AttemptKey) -> float:
        """Reads when an attempt began, in seconds since the epoch; 0 for one that is deleted."""
        found = self._began.get(attempt)
        if found is None:
            read = await self._read(lambda session: attempt_began_at(session, attempt))
            found = self._began[attempt] = read or 0.0
        return found

    async def reroll(self, attempt: AttemptOfRun) -> Reroll | None:
        """Reads the next request of an attempt, if its rollout is a re-roll; None for a sibling."""
        return await self._read(lambda session: reroll_of(session, *attempt))

    async def by_id(self, attempt: AttemptOfRun, ids: Collection[str]) -> list[tuple[ModelCall, FullCall]]:
        """Reads the completed calls that have these ids."""
        return await self._read(lambda session: calls_by_id(session, *attempt, ids=ids))


@contextmanager
def _parsed(run_id: str) -> Iterator[None]:
    """Raises: GatewayError: the run's document does not parse"""
    try:
        yield
    except BrokenDocument as error:
        raise GatewayError(f"run {run_id}: {error}", code="broken_document") from error
