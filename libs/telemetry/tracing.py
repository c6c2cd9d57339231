"""W3C trace context and the platform's own spans, through the OpenTelemetry SDK.

Spans have ids even without an exporter, so that queue rows, requests and agents' environments have the same trace
context on a laptop and in a cluster. Every trace is sampled: an agent's SDK follows its parent's sampled flag, and
would otherwise send no tool spans.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from opentelemetry import trace
from opentelemetry.context import Context, attach, detach
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

_PROPAGATOR = TraceContextTextMapPropagator()
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(?:-.*)?")
_tracer: trace.Tracer | None = None
"""None in a process that exports no spans."""
_ids = RandomIdGenerator()
_SAMPLED = trace.TraceFlags(trace.TraceFlags.SAMPLED)


class TraceParent(NamedTuple):
    """The two ids of a `traceparent` header, lower-case hex."""

    trace_id: str
    span_id: str


def configure_tracing(service: str, endpoint: str | None = None) -> None:
    """Exports the process's spans to an OTLP/HTTP endpoint (`http://host:4318`); exports nothing when it is None."""
    global _tracer
    if endpoint is None:
        _tracer = None
        return
    # Imported late: the exporter loads an HTTP client, which a process without an endpoint does not need.
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    provider = TracerProvider(sampler=ALWAYS_ON, resource=Resource.create({"service.name": f"leyden-{service}"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")))
    # Created once: a provider compares a new tracer with all earlier ones.
    _tracer = provider.get_tracer("leyden")


@contextmanager
def span(
    name: str, *, parent: str | None = None, attributes: dict[str, AttributeValue] | None = None
) -> Iterator[trace.Span]:
    """Encloses a block in a span; inside it `inject()` returns the span's context.

    Args: parent: a `traceparent` to continue; None continues the current span, or starts a trace.
    """
    context = extract(parent) if parent is not None else None
    if _tracer is not None:
        with _tracer.start_as_current_span(name, context=context, attributes=attributes) as current:
            yield current
        return
    # Why: without an exporter ids are enough; a span of the SDK costs twenty times as much.
    ids = _id_span(trace.get_current_span(context).get_span_context())
    token = attach(trace.set_span_in_context(ids, context))
    try:
        yield ids
    finally:
        detach(token)


def _id_span(parent: trace.SpanContext) -> trace.Span:
    trace_id = parent.trace_id if parent.is_valid else _ids.generate_trace_id()
    return trace.NonRecordingSpan(
        trace.SpanContext(trace_id, _ids.generate_span_id(), False, _SAMPLED, parent.trace_state)
    )


def inject() -> str | None:
    """Returns the `traceparent` of the current span; None outside a span."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    return carrier.get("traceparent")


def extract(traceparent: str | None) -> Context:
    """Converts a `traceparent` to a context; an absent or malformed one gives the empty context."""
    return _PROPAGATOR.extract({"traceparent": traceparent} if traceparent else {})


def parse_traceparent(traceparent: str | None) -> TraceParent | None:
    """Parses trace id and span id of a `traceparent`; None when it is absent, malformed or all zeros.

    >>> parse_traceparent("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01").span_id
    'b7ad6b7169203331'
    """
    match = _TRACEPARENT.fullmatch(traceparent.strip().lower()) if traceparent else None
    if match is None or not int(match[1], 16) or not int(match[2], 16):
        return None
    return TraceParent(match[1], match[2])
