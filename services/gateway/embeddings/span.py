"""The record of one request for embeddings: a span of kind `tool`, with OpenTelemetry's names of attributes."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from itertools import islice

import orjson

from leyden.libs.contracts.states import GATEWAY_SCOPE, SpanStatus
from leyden.libs.store.records.spans import REQUEST_SHA256, TRUNCATED, NewSpan
from leyden.libs.telemetry import parse_traceparent
from leyden.services.gateway.calls.context import Attempt
from leyden.services.gateway.embeddings.request import Embedded, EmbeddingRequest

TOOL = "embeddings"
MAX_TEXTS, MAX_CHARACTERS = 100, 16_384
"""The most that is stored of a request's texts, as many characters as of any attribute of a span."""


def embedding_span(
    attempt: Attempt,
    request: EmbeddingRequest,
    answer: Embedded,
    *,
    server: str,
    digest: str,
    error: str | None,
    traceparent: str | None,
    start_ns: int,
    end_ns: int,
) -> NewSpan:
    """Returns the row.

    Args: server: the name of the one who answers; digest: of the request; error: the code or the HTTP status of a
        refusal, None for an answer; times in nanoseconds since the epoch
    """
    parent = parse_traceparent(traceparent)
    texts, is_cut = _kept(request.texts)
    attributes = {
        "gen_ai.operation.name": TOOL,
        "gen_ai.provider.name": server,
        "gen_ai.request.model": _short(request.model),
        "gen_ai.response.model": _short(answer.model),
        "gen_ai.embeddings.dimension.count": answer.dimensions,
        "gen_ai.usage.input_tokens": answer.tokens,
        "leyden.embeddings.inputs": len(request.inputs),
        "leyden.embeddings.texts": texts,
        REQUEST_SHA256: digest,
        TRUNCATED: is_cut or None,
    }
    return NewSpan(
        run_id=attempt.run_id,
        rollout_id=attempt.rollout_id,
        attempt=attempt.attempt,
        trace_id=parent.trace_id if parent else secrets.token_hex(16),
        span_id=secrets.token_hex(8),
        parent_span_id=parent.span_id if parent else None,
        name=TOOL,
        kind="tool",
        tool=TOOL,
        status=SpanStatus.OK if error is None else SpanStatus.ERROR,
        error_type=error,
        tool_call_id=None,
        response_id=None,
        start_ns=start_ns,
        end_ns=end_ns,
        scope=GATEWAY_SCOPE,
        attributes=orjson.dumps({name: value for name, value in attributes.items() if value is not None}).decode(),
    )


def _kept(texts: Iterable[str]) -> tuple[list[str], bool]:
    """The beginning of the texts, and whether anything is missing."""
    kept, left, is_cut = list[str](), MAX_CHARACTERS, False
    waiting = iter(texts)
    for text in islice(waiting, MAX_TEXTS):
        if left <= 0:
            return kept, True
        is_cut = is_cut or len(text) > left
        kept.append(_storable(text[:left]))
        left -= len(text)
    return kept, is_cut or next(waiting, None) is not None


def _short(text: str | None) -> str | None:
    return None if text is None else _storable(text[:512])


def _storable(text: str) -> str:
    """Postgres stores no NUL."""
    return text.replace("\0", "\ufffd")
