"""Reads the store for the gateway: an attempt's calls, answers to retries, engines, a run's defaults."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple, TypeVar

import numpy as np
from cachetools import LRUCache

from leyden.libs.contracts.conversation import Dialect, Json, Turn, parse_turn
from leyden.libs.contracts.ids import weight_version
from leyden.libs.store.database import Database, StoreAway
from leyden.libs.store.engines import RunModel, newest_policy_version, read_run_model, serving_engines
from leyden.libs.store.records.calls import (
    EVER,
    CallDefaults,
    call_defaults,
    calls_by_id,
    completed_calls,
    completed_requests,
)
from leyden.libs.store.records.chains import FullCall
from leyden.libs.store.tables import ModelCall
from leyden.services.gateway.auth import Attempt
from leyden.services.gateway.calls.context import Answer, Completion, ModelRequest, SampledTokens
from leyden.services.gateway.engine.pool import Endpoint
from leyden.services.gateway.errors import Unavailable
from leyden.services.gateway.prompt.answer import text_and_stop, token_logprobs
from leyden.services.gateway.prompt.prefix import Conversation, StoredCall
from leyden.services.gateway.prompt.template import ChatModel

T = TypeVar("T")
RETRY_SECONDS = 0.25
MAX_RUNS = 1000
"""Runs whose document is in memory."""


class StoredAnswer(NamedTuple):
    """A completed call in full: the request's parameters, the conversation, the answer without log-probabilities."""

    parameters: Json
    conversation: Conversation
    completion: Completion


class Reader:
    """Reads for requests; while Postgres is down, a read retries for at most `hold_seconds`."""

    def __init__(self, database: Database, *, hold_seconds: float) -> None:
        self._database = database
        self._hold_seconds = hold_seconds
        self._defaults: LRUCache[str, CallDefaults] = LRUCache(MAX_RUNS)
        self._models: LRUCache[str, RunModel] = LRUCache(MAX_RUNS)

    async def endpoints(self) -> list[Endpoint]:
        """Reads the engines that serve a run. Raises: StoreAway."""
        async with self._database.read() as session:
            serving = await serving_engines(session)
        return [Endpoint(one.url.rstrip("/"), *one[1:]) for one in serving]

    async def newest_version(self, run_id: str) -> int | None:
        """Reads the run's newest policy version; None before its first."""

        async def read() -> int | None:
            async with self._database.read() as session:
                return await newest_policy_version(session, run_id)

        return await self._hold(read)

    async def defaults(self, run_id: str) -> CallDefaults:
        """Reads what the run's document says of its calls."""
        found = self._defaults.get(run_id)
        if found is None:

            async def read() -> CallDefaults:
                async with self._database.read() as session:
                    return await call_defaults(session, run_id)

            # A run's configuration never changes, so it is cached without expiry.
            found = self._defaults[run_id] = await self._hold(read)
        return found

    async def run_model(self, run_id: str) -> RunModel:
        """Reads the run's pool and model. Raises: Unavailable: the pool no longer exists."""
        found = self._models.get(run_id)
        if found is None:

            async def read() -> RunModel | None:
                async with self._database.read() as session:
                    return await read_run_model(session, run_id)

            found = await self._hold(read)
            if found is None:
                message = "The pool of this run no longer exists; try again."
                raise Unavailable(message, code="engine_unavailable", retry_after_seconds=10)
            self._models[run_id] = found
        return found

    async def policy_run(self, run_id: str, role: str | None) -> str:
        """Reads the run whose policy answers calls of a role."""
        return (await self.defaults(run_id)).policy_runs.get(role or "", run_id)

    async def calls(self, attempt: Attempt, known: Collection[str], policy_run: str) -> list[StoredCall]:
        """Reads the completed calls that the policy of a run answered, oldest first, except those in `known` and those
        with a missing parent."""
        defaults = await self.defaults(attempt.run_id)

        async def read() -> list[StoredCall]:
            async with self._database.read() as session:
                found = await completed_calls(
                    session, attempt.run_id, attempt.rollout_id, attempt.attempt, except_ids=known
                )
                # A raw prompt is no conversation that a later one continues.
                return [
                    _stored_call(row, full)
                    for row, full in found
                    if row.dialect != Dialect.COMPLETIONS
                    and row.role not in defaults.provided
                    and defaults.policy_runs.get(row.role or "", attempt.run_id) == policy_run
                ]

        return await self._hold(read)

    async def completions(
        self,
        model_of: Callable[[str], Awaitable[ChatModel]],
        attempt: Attempt,
        request: ModelRequest,
        request_sha256: bytes,
        arrived: tuple[float, float] = EVER,
    ) -> list[Completion]:
        """Reads the attempt's earlier answers to this request, latest first; the store has no `top_logprobs`.

        Args: model_of: the model of a run; arrived: between these moments
        """

        async def read() -> Sequence[ModelCall]:
            async with self._database.read() as session:
                return await completed_requests(
                    session,
                    attempt.run_id,
                    attempt.rollout_id,
                    attempt.attempt,
                    request_sha256=request_sha256,
                    arrived=arrived,
                )

        found = []
        for _, group in groupby(await self._hold(read), key=lambda row: row.request_id):
            rows = list(group)
            policy_run = await self.policy_run(attempt.run_id, rows[0].role)
            model = await model_of(policy_run)
            found.append(_completion(request.model, rows, [_answer(model, request, row) for row in rows], policy_run))
        return found

    async def answers(self, attempt: Attempt, dialect: Dialect, call_ids: Collection[str]) -> list[StoredAnswer]:
        """Reads the calls of the attempt that have these ids, completed and in this wire format."""

        async def read() -> list[StoredAnswer]:
            async with self._database.read() as session:
                found = await calls_by_id(session, attempt.run_id, attempt.rollout_id, attempt.attempt, ids=call_ids)
                return [_stored_answer(row, full, policy_runs) for row, full in found if row.dialect == dialect]

        policy_runs = (await self.defaults(attempt.run_id)).policy_runs
        return await self._hold(read)

    async def _hold(self, read: Callable[[], Awaitable[T]]) -> T:
        return await hold(read, self._hold_seconds)


async def hold(work: Callable[[], Awaitable[T]], seconds: float) -> T:
    """Returns the result of a read or of a write that may be repeated; retries while Postgres is down.

    Raises: Unavailable: it was down for longer
    """
    deadline = asyncio.get_running_loop().time() + seconds
    while True:
        try:
            return await work()
        except StoreAway as error:
            if asyncio.get_running_loop().time() >= deadline:
                raise Unavailable(
                    "The store is down; try again.", code="store_unavailable", retry_after_seconds=5
                ) from error
            await asyncio.sleep(RETRY_SECONDS)


def _stored_call(row: ModelCall, full: FullCall) -> StoredCall:
    return StoredCall(
        row.id,
        _conversation(row, full),
        _answer_turn(row),
        np.frombuffer(full.prompt_ids, dtype="<i4"),
        np.frombuffer(row.sampled_ids, dtype="<i4"),
    )


def _stored_answer(row: ModelCall, full: FullCall, policy_runs: Mapping[str, str]) -> StoredAnswer:
    answer = Answer(row.choice, _answer_turn(row), row.finish_reason or "stop", None)
    policy_run = policy_runs.get(row.role or "", row.run_id)
    completion = _completion(row.request["model"], [row], [answer], policy_run)
    return StoredAnswer(row.request, _conversation(row, full), completion)


def _conversation(row: ModelCall, full: FullCall) -> Conversation:
    return Conversation(full.turns, full.tools, row.request.get("chat_template_kwargs") or {})


def _completion(model_name: str, rows: Sequence[ModelCall], answers: Sequence[Answer], policy_run: str) -> Completion:
    first = rows[0]
    version = first.max_policy_version
    return Completion(
        request_id=first.request_id,
        model=model_name,
        created=first.sequence // 1_000_000_000,
        weight_version=None if version is None else weight_version(policy_run, version),
        answers=tuple(answers),
        prompt_tokens=first.prompt_tokens,
        completion_tokens=sum(row.completion_tokens for row in rows),
        cached_tokens=first.cached_tokens,
    )


def _answer(model: ChatModel, request: ModelRequest, row: ModelCall) -> Answer:
    sampled = SampledTokens(
        row.id,
        row.choice,
        None,
        ids=np.frombuffer(row.sampled_ids, dtype="<i4").tolist(),
        logprobs=np.frombuffer(row.generator_logprobs, dtype="<f4").tolist(),
    )
    return Answer(
        row.choice,
        _answer_turn(row),
        row.finish_reason or "stop",
        token_logprobs(model, request, sampled),
        text_and_stop(model, request, sampled)[1],
    )


def _answer_turn(row: ModelCall) -> Turn:
    return Turn("assistant", "") if row.answer is None else parse_turn(row.answer)
