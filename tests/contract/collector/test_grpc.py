"""OTLP over gRPC through OpenTelemetry's own exporter: HTTP's keys, limits and rows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult

from leyden.libs.capability import KeyRing, write_keys
from leyden.libs.contracts.capability import Scope
from leyden.libs.service import serving
from leyden.libs.store.database import Database
from leyden.services.collector.app import create_collector
from leyden.services.collector.settings import Settings
from tests.contract.collector.test_otlp import Collector
from tests.support.builders import add_attempt, add_group, add_run


@pytest.fixture
async def collector(database: Database, tmp_path: Path) -> AsyncIterator[Collector]:
    """Its `url` is the gRPC address."""
    keys = tmp_path / "keys.json"
    write_keys(keys)
    run = await add_run(database)
    _, rollouts = await add_group(database, run)
    await add_attempt(database, rollouts[0])
    settings = Settings(
        port=0, grpc_port=0, database_url=database.dsn, capability_keys_file=keys, max_body_bytes=100_000
    )
    app = create_collector(settings)
    async with serving(app), httpx.AsyncClient() as client:
        yield Collector(database, rollouts[0], KeyRing(keys), f"http://127.0.0.1:{app.state.grpc_port}", client)


async def export(collector: Collector, key: str, text: str = "") -> SpanExportResult:
    """The exporter's result for one span that holds this text."""
    results = []

    class Exporter(OTLPSpanExporter):
        def export(self, spans):  # type: ignore[no-untyped-def]
            results.append(super().export(spans))
            return results[-1]

    def agent() -> None:
        provider = TracerProvider(shutdown_on_exit=False)
        exporter = Exporter(endpoint=collector.url, headers=f"x-api-key={key}", timeout=20)
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        tool = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "search", "text": text}
        provider.get_tracer("agent").start_span("execute_tool search", attributes=tool).end()
        provider.shutdown()

    await asyncio.to_thread(agent)
    return results[0]


async def test_the_exporter_delivers_spans_of_the_attempt_that_its_key_names(collector: Collector) -> None:
    assert await export(collector, collector.key()) is SpanExportResult.SUCCESS
    [span] = await collector.spans()
    assert (span.rollout_id, span.attempt, span.kind, span.tool) == (collector.rollout.id, 1, "tool", "search")


@pytest.mark.parametrize("key", ["garbage", "expired", "other scope", "ended"])
async def test_a_key_that_http_refuses_is_refused(collector: Collector, key: str) -> None:
    keys = {
        "garbage": "no.such.key",
        "expired": collector.key(seconds=-60),
        "other scope": collector.key(frozenset({Scope.MODEL})),
        "ended": collector.key(rollout=collector.rollout.id[:-1] + "1"),
    }
    assert await export(collector, keys[key]) is SpanExportResult.FAILURE
    assert await collector.spans() == []


async def test_a_message_beyond_the_limit_is_refused(collector: Collector) -> None:
    assert await export(collector, collector.key(), "x" * 200_000) is SpanExportResult.FAILURE
    assert await collector.spans() == []
