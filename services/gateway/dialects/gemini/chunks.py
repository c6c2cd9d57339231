"""A stream of Gemini's answers: server-sent events for `alt=sse`, else the items of one JSON array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import orjson

from leyden.libs.contracts.conversation import Json
from leyden.services.gateway.calls.context import Answer, Completion, ModelRequest, TokenLogprob
from leyden.services.gateway.dialects.gemini.answers import (
    candidate,
    document_of,
    error_of,
    finished,
    logprobs_of,
    parts_of_rest,
    usage_of,
)
from leyden.services.gateway.errors import GatewayError

Form = Literal["events", "array"]


class Chunks:
    """The chunks of one stream. The last one has the rest of every candidate: clients refuse one without parts."""

    error_is_final = False

    def __init__(self, request: ModelRequest, request_id: str, form: Form) -> None:
        self._request = request
        self._request_id = request_id
        self._form = form
        self._opening = b"["
        self._rest: dict[int, tuple[str, Sequence[TokenLogprob] | None]] = {}

    @property
    def keepalive(self) -> bytes:
        """White space: Google's clients read a comment of an event stream as a broken answer."""
        return b"\r\n\r\n" if self._form == "events" else b"\n"

    def reasoning(self, index: int, text: str) -> bytes:
        """Encodes more thoughts; none where the request asks for none."""
        if not self._request.asks_for_reasoning:
            return b""
        return self._chunk([candidate(index, [{"text": text, "thought": True}])])

    def text(self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None) -> bytes:
        """Encodes more text."""
        return self._chunk([candidate(index, [{"text": text}]) | logprobs_of(logprobs)])

    def rest(self, answer: Answer, text: str, logprobs: Sequence[TokenLogprob] | None) -> bytes:
        """Keeps the last text for the last chunk."""
        self._rest[answer.index] = text, logprobs
        return b""

    def end(self, completion: Completion) -> bytes:
        """Encodes the chunk with the rest, the reasons of the ends, and the numbers of tokens."""
        candidates = []
        for answer in completion.answers:
            text, logprobs = self._rest.get(answer.index, ("", None))
            rest = candidate(answer.index, parts_of_rest(answer.turn, text))
            candidates.append(rest | logprobs_of(logprobs) | finished(answer))
        last = self._chunk(candidates, {"usageMetadata": usage_of(completion)})
        return last if self._form == "events" else last + b"]"

    def error(self, error: GatewayError) -> bytes:
        """Encodes the error as the last item."""
        last = self._item(error_of(error))
        return last if self._form == "events" else last + b"]"

    def _chunk(self, candidates: list[Json], more: Json | None = None) -> bytes:
        return self._item(document_of(candidates, self._request.model, self._request_id) | (more or {}))

    def _item(self, document: Json) -> bytes:
        if self._form == "events":
            return b"data: " + orjson.dumps(document) + b"\r\n\r\n"
        opening, self._opening = self._opening, b",\r\n"
        return opening + orjson.dumps(document)
