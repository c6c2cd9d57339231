"""The chunks of a stream: of each choice what may be shown, as soon as it may be."""

from __future__ import annotations

import orjson

from leyden.services.gateway.answer import Answer, delta_of, envelope, logprobs_of
from leyden.services.gateway.choice import Choice
from leyden.services.gateway.render import ChatModel
from leyden.services.gateway.request import ChatRequest, Json
from leyden.services.gateway.text import ByteStream, TextStream, showable


def head_of_chunks(request_id: str, model: str, created: int) -> bytes:
    """What every chunk of a stream begins with, up to its choice."""
    head = orjson.dumps(envelope("chat.completion.chunk", request_id, model, created, None))
    return b"data: " + head[:-1] + b',"choices":['


class ChoiceStream:
    """One choice of a stream: what may be shown of it, and has not been yet. Events are empty where there is nothing.

    Args: head: of `head_of_chunks`
    """

    __slots__ = (
        "_after", "_before", "_choice", "_eos_ids", "_fed", "_feed", "_has_role", "_head", "_held", "_holds_back",
        "_is_plain", "_logprobs_shown", "_model", "_request", "_shown",
    )  # fmt: skip

    def __init__(self, model: ChatModel, request: ChatRequest, choice: Choice, head: bytes) -> None:
        self._model = model
        self._request = request
        self._choice = choice
        self._head = head
        # Most events differ in their text alone.
        self._before = head + b'{"index":%d,"delta":{"content":' % choice.index
        self._after = b'},"logprobs":null,"finish_reason":null}]}\n\n'
        self._holds_back = bool(request.sampling.stop) or request.calls_tools
        spelling = model.spelling
        self._feed = (TextStream(model.decode) if spelling is None else ByteStream(spelling)).feed
        self._eos_ids = model.eos_ids
        self._held = ""
        self._fed = 0
        self._shown = 0
        self._logprobs_shown = 0
        self._has_role = self._is_plain = False

    def event(self) -> bytes:
        """The text that has become showable."""
        new = self._choice.sampled_ids[self._fed :]
        # As `shown_ids` has it.
        if new and new[-1] in self._eos_ids:
            new.pop()
        if not new:
            return b""
        self._fed += len(new)
        text = self._held + self._feed(new)
        if self._holds_back:
            # No mark begins in what was shown.
            length = showable(text, self._request.sampling.stop, calls_tools=self._request.calls_tools)
            text, self._held = text[:length], text[length:]
        if not text:
            return b""
        self._shown += len(text)
        if self._is_plain:
            return self._before + orjson.dumps(text) + self._after
        return self._event({"content": text})

    def last_event(self, answer: Answer) -> bytes:
        """What of the finished answer has not been shown: the rest of its text, and its tool calls."""
        delta = delta_of(answer.message)
        content = delta.pop("content", "")[self._shown :]
        delta.pop("role")
        if content:
            delta["content"] = content
        if not delta and self._has_role and (answer.logprobs is None or self._logprobs_shown == self._total()):
            return b""
        return self._event(delta)

    def _event(self, delta: Json) -> bytes:
        if not self._has_role:
            delta = {"role": "assistant", **delta}
            self._has_role, self._is_plain = True, not self._request.logprobs
        logprobs = logprobs_of(self._model, self._request, self._choice, self._logprobs_shown)
        self._logprobs_shown = self._total()
        chunk = {"index": self._choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        return self._head + orjson.dumps(chunk) + b"]}\n\n"

    def _total(self) -> int:
        return len(self._choice.sampled_ids)
