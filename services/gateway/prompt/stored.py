"""Reads answered calls back: those that a prompt continues, answers to repeats, and responses by their ids."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from leyden.libs.contracts.conversation import Dialect, Json, Tool, Turn, parse_turn
from leyden.libs.contracts.ids import weight_version
from leyden.libs.contracts.states import CONTEXT_EXCEEDED, CallStatus
from leyden.libs.store.records.calls import EVER
from leyden.libs.store.records.chains import FullCall
from leyden.libs.store.tables import ModelCall
from leyden.services.gateway.calls.context import Answer, Attempt, Completion, ModelRequest, SampledTokens
from leyden.services.gateway.errors import BadRequest
from leyden.services.gateway.prompt.answer import reasoning_tokens, text_and_stop, token_logprobs
from leyden.services.gateway.prompt.prefix import Conversation, StoredCall
from leyden.services.gateway.prompt.template import ChatModel
from leyden.services.gateway.records.reader import Reader


class StoredAnswer(NamedTuple):
    """A completed call in full: the request's parameters, the conversation, the answer without log-probabilities."""

    parameters: Json
    conversation: Conversation
    completion: Completion


class Refusal(NamedTuple):
    """A call that was refused, and the error that answers it."""

    request_id: str
    error: BadRequest


class StoredCalls:
    """The answered calls of all attempts. Args: model_of: the model of a run."""

    def __init__(self, reader: Reader, model_of: Callable[[str], Awaitable[ChatModel]]) -> None:
        self._reader = reader
        self._model_of = model_of

    async def calls(self, attempt: Attempt, known: Collection[str], policy_id: str) -> list[StoredCall]:
        """Reads the calls that the policy of a run answered, oldest first, except those in `known`."""
        defaults = await self._reader.defaults(attempt.run_id)
        return [
            StoredCall(
                row.id,
                _conversation(row, full),
                _answer_turn(row),
                np.frombuffer(full.prompt_ids, dtype="<i4"),
                np.frombuffer(row.sampled_ids, dtype="<i4"),
            )
            for row, full in await self._reader.completed(attempt.of_run, known)
            # A raw prompt is no conversation that a later one continues.
            if row.dialect != Dialect.COMPLETIONS
            and row.role not in defaults.provided
            and defaults.policy_id(attempt.run_id, row.role) == policy_id
        ]

    async def completions(
        self, attempt: Attempt, request: ModelRequest, request_sha256: bytes, arrived: tuple[float, float] = EVER
    ) -> list[Completion | Refusal]:
        """Reads the attempt's earlier answers to this request, latest first; the store has no `top_logprobs`.

        Args: arrived: between these moments
        """
        found = list[Completion | Refusal]()
        rows = await self._reader.requests(attempt.of_run, request_sha256, arrived)
        for _, group in groupby(rows, key=lambda row: row.request_id):
            choices = list(group)
            if choices[0].status == CallStatus.REFUSED:
                found.append(_refusal(choices[0]))
                continue
            policy_id = await self._policy_id(choices[0])
            model = await self._model_of(policy_id)
            answers = [answer_of(model, request, row) for row in choices]
            found.append(_completion(request.model, choices, answers, policy_id))
        return found

    async def answers(self, attempt: Attempt, dialect: Dialect, call_ids: Collection[str]) -> list[StoredAnswer]:
        """Reads the calls of the attempt that have these ids, completed and in this wire format."""
        return [
            await self._stored_answer(row, full)
            for row, full in await self._reader.by_id(attempt.of_run, call_ids)
            if row.dialect == dialect
        ]

    async def _stored_answer(self, row: ModelCall, full: FullCall) -> StoredAnswer:
        policy_id = await self._policy_id(row)
        count = _reasoning_tokens(await self._model_of(policy_id), row)
        finish = row.finish_reason or "stop"
        answer = Answer(row.choice, _answer_turn(row), finish, None, reasoning_tokens=count)
        completion = _completion(row.request["model"], [row], [answer], policy_id)
        return StoredAnswer(row.request, _conversation(row, full), completion)

    async def _policy_id(self, row: ModelCall) -> str:
        return (await self._reader.defaults(row.run_id)).policy_id(row.run_id, row.role)


def _conversation(row: ModelCall, full: FullCall) -> Conversation:
    return Conversation(full.turns, tuple(map(Tool, full.tools)), row.request.get("chat_template_kwargs") or {})


def _completion(model_name: str, rows: Sequence[ModelCall], answers: Sequence[Answer], policy_id: str) -> Completion:
    first = rows[0]
    version = first.max_policy_version
    return Completion(
        request_id=first.request_id,
        model=model_name,
        created=first.sequence // 1_000_000_000,
        weight_version=None if version is None else weight_version(policy_id, version),
        answers=tuple(answers),
        prompt_tokens=first.prompt_tokens,
        completion_tokens=sum(row.completion_tokens for row in rows),
        cached_tokens=first.cached_tokens,
    )


def _refusal(row: ModelCall) -> Refusal:
    param = "messages" if row.finish_reason == CONTEXT_EXCEEDED else None
    message = row.untrainable_reason or "The request was refused."
    return Refusal(row.request_id, BadRequest(message, param=param, code=row.finish_reason))


def answer_of(model: ChatModel, request: ModelRequest, row: ModelCall) -> Answer:
    """Returns the answer of a completed call; the store has no `top_logprobs`."""
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
        reasoning_tokens=_reasoning_tokens(model, row),
    )


def _reasoning_tokens(model: ChatModel, row: ModelCall) -> int | None:
    """None for another provider's answer, which has no sampled tokens."""
    sampled_ids = np.frombuffer(row.sampled_ids, dtype="<i4").tolist()
    return reasoning_tokens(model, _answer_turn(row), sampled_ids) if sampled_ids else None


def _answer_turn(row: ModelCall) -> Turn:
    return Turn("assistant", "") if row.answer is None else parse_turn(row.answer)
