"""The OpenAI Agents SDK's agent with OpenInference's instrumentation in place of the SDK's own exporter."""

import os
import runpy
from pathlib import Path

os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "0"

from openinference.instrumentation.openai_agents import OpenAIAgentsInstrumentor
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
trace.set_tracer_provider(provider)
OpenAIAgentsInstrumentor().instrument()

here = Path(__file__)
runpy.run_path(str(here.parents[1] / here.name), run_name="__main__")
