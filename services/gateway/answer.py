"""Finished choices in OpenAI's words: messages, usage, log-probabilities, and the end of a stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from leyden.libs.contracts.conversation import ToolCall, Turn
from leyden.services.gateway.choice import Choice
from leyden.services.gateway.render import ChatModel
from leyden.services.gateway.request import ChatRequest, Json
from leyden.services.gateway.text import cut_at_stop
from leyden.services.gateway.tools import parse_calls

DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": waiting for an engine\n\n"


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice as the agent gets it; `message` is also what the record keeps."""

    index: int
    message: Json
    finish_reason: str
    logprobs: Json | None


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer: what a stream ends with, and what a repeat gets again."""

    request_id: str
    model: str
    created: int
    fingerprint: str | None
    answers: tuple[Answer, ...]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def body(self) -> Json:
        """The answer to a request without `stream`."""
        choices = [
            {
                "index": answer.index,
                "message": answer.message,
                "logprobs": answer.logprobs,
                "finish_reason": answer.finish_reason,
            }
            for answer in self.answers
        ]
        return {**self._envelope("chat.completion"), "choices": choices, "usage": self.usage()}

    def usage(self) -> Json:
        """Token counts; of the prompt, `cached_tokens` came from the engine's prefix cache."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def last_chunks(self, *, include_usage: bool) -> bytes:
        """The finish reason of every choice, usage where it was asked for, and the end of the stream."""
        envelope = self._envelope("chat.completion.chunk")
        finishes: list[Json] = [
            {"index": answer.index, "delta": {}, "logprobs": None, "finish_reason": answer.finish_reason}
            for answer in self.answers
        ]
        documents = [{**envelope, "choices": [finish]} for finish in finishes]
        if include_usage:
            documents.append({**envelope, "choices": [], "usage": self.usage()})
        return b"".join(map(event, documents)) + DONE

    def whole_chunks(self) -> bytes:
        """Every message in one chunk each, for a repeat that streams."""
        envelope = self._envelope("chat.completion.chunk")
        return b"".join(
            event(
                {
                    **envelope,
                    "choices": [
                        {
                            "index": answer.index,
                            "delta": delta_of(answer.message),
                            "logprobs": answer.logprobs,
                            "finish_reason": None,
                        }
                    ],
                }
            )
            for answer in self.answers
        )

    def _envelope(self, kind: str) -> Json:
        return envelope(kind, self.request_id, self.model, self.created, self.fingerprint)


def envelope(kind: str, request_id: str, model: str, created: int, fingerprint: str | None) -> Json:
    """What every answer and chunk begins with."""
    return {
        "id": f"chatcmpl-{request_id}",
        "object": kind,
        "created": created,
        "model": model,
        "system_fingerprint": fingerprint,
    }


def event(document: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(document) + b"\n\n"


def finished_answer(model: ChatModel, request: ChatRequest, choice: Choice) -> Answer:
    """A finished choice as the agent gets it.

    The text ends before the first stop string and before the token that ended the turn. Tool calls get the ids
    `call_<call id>_<k>`; all text stays content when one of them cannot be parsed.
    """
    content, stop = cut_at_stop(model.decode(shown_ids(model, choice)), request.sampling.stop)
    finish: str = "stop" if stop is not None else (choice.finish or "stop")
    content, calls = parse_calls(content) if request.calls_tools else (content, ())
    kept = calls if request.parallel_tool_calls else calls[:1]
    tool_calls = (
        ToolCall(f"call_{choice.call_id}_{number}", call.name, call.arguments) for number, call in enumerate(kept)
    )
    message = message_of(Turn("assistant", content, tool_calls=tuple(tool_calls)))
    if kept:
        finish = "tool_calls" if finish == "stop" else finish
    return Answer(choice.index, message, finish, logprobs_of(model, request, choice, 0))


def message_of(turn: Turn) -> Json:
    """An assistant's turn as OpenAI spells it."""
    message: Json = {
        "role": "assistant",
        "content": turn.content or (None if turn.tool_calls else ""),
        "refusal": None,
    }
    if turn.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in turn.tool_calls
        ]
    return message


def shown_ids(model: ChatModel, choice: Choice) -> list[int]:
    """The sampled tokens without the one that ended the turn."""
    ids = choice.sampled_ids
    return ids[:-1] if ids and ids[-1] in model.eos_ids else ids


def logprobs_of(model: ChatModel, request: ChatRequest, choice: Choice, start: int) -> Json | None:
    """OpenAI's log-probabilities of the tokens from `start` on; natural logs, temperature-scaled. None if not asked."""
    if not request.logprobs:
        return None
    entries = []
    for position in range(start, len(choice.sampled_ids)):
        entry = _token_entry(model, choice.sampled_ids[position], choice.logprobs[position])
        tops = choice.top_logprobs[position] if position < len(choice.top_logprobs) else []
        entry["top_logprobs"] = [_token_entry(model, token, logprob) for logprob, token in tops]
        entries.append(entry)
    return {"content": entries, "refusal": None}


def delta_of(message: Json) -> Json:
    """A message as a chunk's delta: tool calls carry their index."""
    delta = {name: value for name, value in message.items() if value is not None and name != "tool_calls"}
    if message.get("tool_calls"):
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(message["tool_calls"])]
        if not delta.get("content"):
            delta.pop("content", None)
    return delta


def models_body(name: str) -> Json:
    """The list of models: one, and any name is accepted in its place."""
    return {"object": "list", "data": [model_body(name)]}


def model_body(name: str) -> Json:
    """One model."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "leyden"}


def _token_entry(model: ChatModel, token: int, logprob: float) -> dict[str, Any]:
    text = model.decode([token])
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
