"""One attempt of the flight agent, in a process that plays many at a time.

The flight agent's own code plays it, unchanged. Its tools make spans as ever; here the spans of each attempt are kept
apart, and sent with its key when it is over.
"""

import json
from contextvars import ContextVar
from typing import Any

from agent import converse
from grade import verdict
from openai import OpenAI
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from telemetry import TRACER
from world import Task

SPANS: ContextVar[list[ReadableSpan]] = ContextVar("SPANS")
"""The ended spans of the attempt that this thread plays."""


class OfAttempts(SpanProcessor):
    """Keeps each span with its attempt."""

    def on_end(self, span: ReadableSpan) -> None:
        SPANS.get().append(span)


provider = TracerProvider(shutdown_on_exit=False)
provider.add_span_processor(OfAttempts())
trace.set_tracer_provider(provider)


def play(row: dict[str, Any], model: OpenAI, collector: str) -> dict[str, Any]:
    """Return the grade of the conversation about a task: its reward, and facts.

    Args: row: of the dataset; model: with the attempt's key; collector: OpenTelemetry's endpoint
    """
    SPANS.set([])
    task = Task.from_row(row)
    with TRACER.start_as_current_span("invoke_agent flight", attributes={"gen_ai.operation.name": "invoke_agent"}):
        transcript = converse(model, task)
    exporter = OTLPSpanExporter(f"{collector}/v1/traces", headers={"x-api-key": model.api_key})
    if exporter.export(SPANS.get()) is not SpanExportResult.SUCCESS:
        raise RuntimeError(f"the spans of an attempt did not reach {collector}: its tool calls would earn nothing")
    exporter.shutdown()
    grade: dict[str, Any] = json.loads(verdict(transcript, task.carrier))
    return grade
