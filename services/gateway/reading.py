"""What the gateway reads back from the store: answers of an attempt, repeats, engines, a run's default temperature."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from itertools import groupby
from typing import TypeVar

import numpy as np

from leyden.libs.contracts.conversation import Turn, parse_turn
from leyden.libs.contracts.ids import weight_version
from leyden.libs.store.calls import (
    QuickReader,
    StoreAway,
    completed_calls,
    completed_requests,
    default_temperature,
    reading,
)
from leyden.libs.store.chains import FullCall
from leyden.libs.store.database import Database
from leyden.libs.store.tables import ModelCall
from leyden.services.gateway.answer import Answer, Completion, message_of
from leyden.services.gateway.choice import Choice
from leyden.services.gateway.door import Door
from leyden.services.gateway.engines import Endpoint
from leyden.services.gateway.errors import Unavailable
from leyden.services.gateway.history import StoredAnswer
from leyden.services.gateway.request import Json
from leyden.services.gateway.written import Conversation

T = TypeVar("T")
SpellLogprobs = Callable[[Choice], Json | None]
RETRY_SECONDS = 0.25


class Reader:
    """The store as the gateway reads it; while Postgres is away a request waits here, at most `hold_seconds`."""

    def __init__(self, database: Database, engines: QuickReader, calls: QuickReader, *, hold_seconds: float) -> None:
        self._database = database
        self._engines, self._calls = engines, calls
        self._hold_seconds = hold_seconds
        self._temperatures: dict[str, float | None] = {}

    async def endpoints(self) -> list[Endpoint]:
        """The serving engines.

        Raises: StoreAway
        """
        serving = await self._engines.serving()
        return [Endpoint(one.url.rstrip("/"), one.run_id, one.policy_version) for one in serving]

    async def temperature(self, run_id: str) -> float:
        """What a call that names no temperature gets: the run's, else OpenAI's default of 1."""
        if run_id not in self._temperatures:

            async def read() -> float | None:
                async with reading(self._database) as session:
                    return await default_temperature(session, run_id)

            # A run's document never changes.
            self._temperatures[run_id] = await self._held(read)
        temperature = self._temperatures[run_id]
        return 1.0 if temperature is None else temperature

    async def answers(self, door: Door, known: Collection[str]) -> list[StoredAnswer]:
        """The attempt's completed calls but those known by id, and those of which a part is lost, oldest first."""

        async def read() -> list[StoredAnswer]:
            # Mostly all are known: each turn of an agent that changes what it said asks. Counted first, as calls end
            # meanwhile; those known are in the store, or were lost by it, and then a row of another gateway may count
            # for one of them: its answer is encoded anew.
            count = len(known)
            if count and count == await self._calls.completed(door.run_id, door.rollout_id, door.attempt):
                return []
            async with reading(self._database) as session:
                calls = await completed_calls(session, door.run_id, door.rollout_id, door.attempt, except_ids=known)
                return [_stored_answer(row, full) for row, full in calls]

        return await self._held(read)

    async def completions(self, door: Door, request_sha256: bytes, spell: SpellLogprobs) -> list[Completion]:
        """What the attempt has already been answered to this body, latest first.

        Args: spell: log-probabilities of a choice as the request wants them; alternatives to a token are not kept
        """

        async def read() -> list[Completion]:
            async with reading(self._database) as session:
                rows = await completed_requests(
                    session, door.run_id, door.rollout_id, door.attempt, request_sha256=request_sha256
                )
                return [_completion(list(group), spell) for _, group in groupby(rows, key=lambda row: row.request_id)]

        return await self._held(read)

    async def _held(self, read: Callable[[], Awaitable[T]]) -> T:
        deadline = asyncio.get_running_loop().time() + self._hold_seconds
        while True:
            try:
                return await read()
            except StoreAway as error:
                if asyncio.get_running_loop().time() >= deadline:
                    raise Unavailable(
                        "The store is away; try again.", code="store_unavailable", retry_after_seconds=5
                    ) from error
                await asyncio.sleep(RETRY_SECONDS)


def _stored_answer(row: ModelCall, full: FullCall) -> StoredAnswer:
    return StoredAnswer(
        row.id,
        Conversation(full.turns, full.tools, row.request.get("chat_template_kwargs") or {}),
        _answer_turn(row),
        np.frombuffer(full.prompt_ids, dtype="<i4"),
        np.frombuffer(row.sampled_ids, dtype="<i4"),
    )


def _answer_turn(row: ModelCall) -> Turn:
    return Turn("assistant", "") if row.answer is None else parse_turn(row.answer)


def _completion(rows: Sequence[ModelCall], spell: SpellLogprobs) -> Completion:
    first = rows[0]
    version = first.max_policy_version
    return Completion(
        request_id=first.request_id,
        model=str(first.request.get("model")),
        created=first.sequence // 1_000_000_000,
        fingerprint=None if version is None else weight_version(first.run_id, version),
        answers=tuple(_answer(row, spell) for row in rows),
        prompt_tokens=first.prompt_tokens,
        completion_tokens=sum(row.completion_tokens for row in rows),
        cached_tokens=first.cached_tokens,
    )


def _answer(row: ModelCall, spell: SpellLogprobs) -> Answer:
    choice = Choice(
        row.id,
        row.choice,
        None,
        sampled_ids=np.frombuffer(row.sampled_ids, dtype="<i4").tolist(),
        logprobs=np.frombuffer(row.generator_logprobs, dtype="<f4").tolist(),
    )
    return Answer(row.choice, message_of(_answer_turn(row)), row.finish_reason or "stop", spell(choice))
