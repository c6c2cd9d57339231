"""The form that answers of chat completions and of completions share."""

from __future__ import annotations

from abc import ABC, abstractmethod

import orjson

from leyden.libs.contracts.conversation import Json
from leyden.services.gateway.calls.context import Answer, Completion, ModelRequest
from leyden.services.gateway.dialects.base import COMMENT
from leyden.services.gateway.errors import GatewayError


class Chunks(ABC):
    """The chunks of one stream; a wire format adds its choices.

    Args: answer_id: of every chunk; created: seconds since the epoch
    """

    keepalive = COMMENT
    error_is_final = False
    kind: str

    def __init__(self, request: ModelRequest, answer_id: str, created: int) -> None:
        self._request = request
        self._answer_id = answer_id
        self._created = created

    @abstractmethod
    def _ended(self, answer: Answer) -> Json:
        """Returns the choice with an answer's finish reason."""

    def end(self, completion: Completion) -> bytes:
        """Encodes a chunk with the finish reason of every choice, one with usage, and `[DONE]`."""
        version = completion.weight_version
        chunks = [self._document([self._ended(answer)], version) for answer in completion.answers]
        if self._request.include_usage:
            chunks.append({**self._document([], version), "usage": _usage(completion)})
        return b"".join(map(_event, chunks)) + b"data: [DONE]\n\n"

    def error(self, error: GatewayError) -> bytes:
        """Encodes an event with OpenAI's error object."""
        return _event(error.body())

    def _encode(self, choice: Json) -> bytes:
        """Encodes a chunk of an answer that goes on."""
        return _event(self._document([choice], None))

    def _document(self, choices: list[Json], weight_version: str | None) -> Json:
        envelope = _envelope(self.kind, self._answer_id, self._request.model, self._created, weight_version)
        return {**envelope, "choices": choices}


def answer_body(kind: str, answer_id: str, completion: Completion, choices: list[Json]) -> Json:
    """Returns the body of a request without streaming."""
    envelope = _envelope(kind, answer_id, completion.model, completion.created, completion.weight_version)
    return {**envelope, "choices": choices, "usage": _usage(completion)}


def _envelope(kind: str, answer_id: str, model: str, created: int, weight_version: str | None) -> Json:
    return {
        "id": answer_id,
        "object": kind,
        "created": created,
        "model": model,
        "system_fingerprint": weight_version,
    }


def _usage(completion: Completion) -> Json:
    count = completion.reasoning_tokens
    return {
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": completion.completion_tokens,
        "total_tokens": completion.prompt_tokens + completion.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": completion.cached_tokens},
        **({} if count is None else {"completion_tokens_details": {"reasoning_tokens": count}}),
    }


def _event(document: Json) -> bytes:
    return b"data: " + orjson.dumps(document) + b"\n\n"
