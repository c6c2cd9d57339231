"""Spans of the agent's tools, in the words of OpenTelemetry's GenAI conventions, sent over OTLP/HTTP.

OpenTelemetry's own variables name the destination; without `OTEL_EXPORTER_OTLP_ENDPOINT` every span is a no-op.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from opentelemetry import propagate, trace
from opentelemetry.trace import Status, StatusCode
from world import ToolError

TRACER = trace.get_tracer("flight_agent")


@contextmanager
def telemetry() -> Iterator[None]:
    """Export the spans created inside the block; flush them before the block ends."""
    if not os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
        yield
        return
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    try:
        with TRACER.start_as_current_span("invoke_agent flight", attributes={"gen_ai.operation.name": "invoke_agent"}):
            yield
    finally:
        provider.force_flush()
        provider.shutdown()


def trace_headers() -> dict[str, str]:
    """Return the `traceparent` header of the current span, or nothing where spans are off."""
    headers: dict[str, str] = {}
    propagate.inject(headers)
    return headers


def execute(name: str, tool: Callable[[str], str], query: str, response_id: str) -> str:
    """Run a tool inside its span; `response_id` names the model call that asked for it, and may be empty.

    Raises: ToolError: the tool's own, after the span took it as its status
    """
    attributes = {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": name,
        "gen_ai.tool.call.arguments": json.dumps({"query": query}),
        **({"gen_ai.response.id": response_id} if response_id else {}),
    }
    with TRACER.start_as_current_span(
        f"execute_tool {name}", attributes=attributes, record_exception=False, set_status_on_exception=False
    ) as span:
        try:
            result = tool(query)
        except ToolError as error:
            span.set_attribute("error.type", error.kind)
            span.set_status(Status(StatusCode.ERROR, str(error)))
            raise
        span.set_attribute("gen_ai.tool.call.result", result)
        span.set_status(Status(StatusCode.OK))
        return result
