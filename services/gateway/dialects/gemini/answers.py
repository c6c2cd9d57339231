"""Gemini's answers: candidates with their parts, the numbers of tokens, and errors."""

from __future__ import annotations

from collections.abc import Sequence

from leyden.libs.contracts.conversation import Json, ToolCall, Turn
from leyden.services.gateway.calls.context import Answer, Completion, TokenLogprob
from leyden.services.gateway.dialects.arguments import arguments_object
from leyden.services.gateway.errors import GatewayError

STATUSES = {
    400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND",
    405: "UNIMPLEMENTED", 408: "DEADLINE_EXCEEDED", 413: "INVALID_ARGUMENT", 415: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED", 503: "UNAVAILABLE",
}  # fmt: skip
"""Google's name of an HTTP status; any other is `INTERNAL`."""


def answer_body(completion: Completion, *, shows_thoughts: bool) -> Json:
    """Returns the body of a request without streaming."""
    candidates = [
        candidate(answer.index, _parts(answer.turn, shows_thoughts=shows_thoughts))
        | logprobs_of(answer.logprobs)
        | finished(answer)
        for answer in completion.answers
    ]
    document = document_of(candidates, completion.model, completion.request_id)
    return document | {"usageMetadata": usage_of(completion)}


def document_of(candidates: list[Json], model: str, request_id: str) -> Json:
    """Returns an answer or a chunk of one, without the numbers of tokens."""
    return {"candidates": candidates, "modelVersion": model, "responseId": request_id}


def candidate(index: int, parts: list[Json]) -> Json:
    """Returns a choice, without its end."""
    return {"content": {"role": "model", "parts": parts}, "index": index}


def parts_of_rest(turn: Turn, text: str) -> list[Json]:
    """Returns the last parts of a streamed choice, at least one: its rest of text and its function calls."""
    calls = list(map(_call, turn.tool_calls))
    return [*([{"text": text}] if text or not calls else []), *calls]


def finished(answer: Answer) -> Json:
    """Returns the part of a candidate that ends it."""
    return {"finishReason": "MAX_TOKENS" if answer.finish_reason == "length" else "STOP"}


def logprobs_of(logprobs: Sequence[TokenLogprob] | None) -> Json:
    """Returns the part of a candidate with its log-probabilities; empty where the request asks for none."""
    if logprobs is None:
        return {}
    alternatives = [{"candidates": list(map(_token, entry.top))} for entry in logprobs]
    return {"logprobsResult": {"chosenCandidates": list(map(_token, logprobs)), "topCandidates": alternatives}}


def usage_of(completion: Completion) -> Json:
    """Returns the numbers of tokens; an unknown number of thoughts' is among the candidates'."""
    thoughts = completion.reasoning_tokens or 0
    return {
        "promptTokenCount": completion.prompt_tokens,
        "candidatesTokenCount": completion.completion_tokens - thoughts,
        "thoughtsTokenCount": thoughts,
        "totalTokenCount": completion.prompt_tokens + completion.completion_tokens,
        "cachedContentTokenCount": completion.cached_tokens,
    }


def error_of(error: GatewayError) -> Json:
    """Returns Google's error object."""
    status = STATUSES.get(error.status, "INTERNAL")
    return {"error": {"code": error.status, "message": error.message, "status": status}}


def _parts(turn: Turn, *, shows_thoughts: bool) -> list[Json]:
    thoughts = [{"text": turn.reasoning, "thought": True}] if turn.reasoning and shows_thoughts else []
    return [*thoughts, *parts_of_rest(turn, turn.content)]


def _call(call: ToolCall) -> Json:
    return {"functionCall": {"id": call.id, "name": call.name, "args": arguments_object(call.arguments)}}


def _token(entry: TokenLogprob) -> Json:
    return {"token": entry.text, "logProbability": entry.logprob}
