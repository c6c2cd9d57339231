"""OTLP over gRPC through OpenTelemetry's own exporter: HTTP's keys, limits and rows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult

from leyden.libs.capability import KeyRing, write_keys
from leyden.libs.contracts.capability import Scope
from leyden.libs.service import Budget, serving
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.services.collector import grpc as grpc_module
from leyden.services.collector.app import create_collector
from leyden.services.collector.settings import Settings
from tests.contract.collector.test_otlp import Collector
from tests.contract.collector.test_otlp import body as spans_of
from tests.support.builders import add_attempt, add_group, add_run
from tests.support.waiting import eventually

MESSAGE_BYTES = 100_000
TRACES = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


@dataclass
class GrpcCollector(Collector):
    """Its `url` is the gRPC address, and a second rollout runs beside its own."""

    sibling: tables.Rollout
    budget: Budget
    whole_bytes: int

    def held(self) -> float:
        """How many of the longest messages those in memory count."""
        return (self.whole_bytes - self.budget.free_bytes) / MESSAGE_BYTES

    async def holds(self, messages: int) -> None:
        """Waits until messages count so much."""
        await eventually(lambda: self.held() == messages, f"messages count as {messages}")

    @asynccontextmanager
    async def call(self, key: str, deadline: float = 60) -> AsyncIterator[Call]:
        """A call whose message is not sent yet."""
        async with grpc.aio.insecure_channel(self.url.removeprefix("http://")) as channel:
            export = channel.stream_unary(TRACES)(metadata=(("x-api-key", key),), timeout=deadline)
            yield Call(export)
            export.cancel()


@dataclass
class Call:
    """A call of OTLP's export."""

    export: Any

    async def send(self, message: bytes) -> None:
        await self.export.write(message)
        await self.export.done_writing()

    async def code(self) -> tuple[grpc.StatusCode, str]:
        return await self.export.code(), await self.export.details()


@pytest.fixture
async def collector(request: pytest.FixtureRequest, database: Database, tmp_path: Path) -> AsyncIterator[GrpcCollector]:
    """It has room for two messages of the longest and a half, or for so many."""
    whole_bytes = int(getattr(request, "param", 2.5) * MESSAGE_BYTES)
    keys = tmp_path / "keys.json"
    write_keys(keys)
    run = await add_run(database)
    _, (rollout, sibling) = await add_group(database, run)
    for one in (rollout, sibling):
        await add_attempt(database, one)
    settings = Settings(
        port=0,
        grpc_port=0,
        database_url=database.dsn,
        capability_keys_file=keys,
        max_body_bytes=MESSAGE_BYTES,
        max_bytes_in_flight=whole_bytes,
    )
    app = create_collector(settings)
    async with serving(app), httpx.AsyncClient() as client:
        url = f"http://127.0.0.1:{app.state.grpc_port}"
        yield GrpcCollector(database, rollout, KeyRing(keys), url, client, sibling, app.state.budget, whole_bytes)


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
        "ended": collector.key(rollout=collector.rollout.id[:-1] + "9"),
    }
    assert await export(collector, keys[key]) is SpanExportResult.FAILURE
    assert await collector.spans() == []


async def test_a_message_beyond_the_limit_is_refused(collector: GrpcCollector) -> None:
    assert await export(collector, collector.key(), "x" * 200_000) is SpanExportResult.FAILURE
    async with collector.call(collector.key()) as call:
        await call.send(bytes(MESSAGE_BYTES + 1))
        refused = "SERVER: Received message larger than max (100001 vs. 100000)"
        assert await call.code() == (grpc.StatusCode.RESOURCE_EXHAUSTED, refused)
    assert (await collector.spans(), collector.held()) == ([], 0)


async def test_a_call_is_refused_by_its_key_before_its_message_is_read(collector: GrpcCollector) -> None:
    refused = {
        "no.such.key": grpc.StatusCode.UNAUTHENTICATED,
        collector.key(frozenset({Scope.MODEL})): grpc.StatusCode.PERMISSION_DENIED,
        collector.key(rollout=collector.rollout.id[:-1] + "9"): grpc.StatusCode.PERMISSION_DENIED,
    }
    for key, code in refused.items():
        async with collector.call(key, deadline=10) as call:
            assert (await call.code())[0] is code


async def test_a_message_without_room_is_sent_again(collector: GrpcCollector) -> None:
    with collector.budget.share() as share:
        share.acquire(2 * MESSAGE_BYTES)
        async with collector.call(collector.key()) as call:
            again = "too much is waiting to be stored: send again"
            assert await call.code() == (grpc.StatusCode.UNAVAILABLE, again)
        exporting = asyncio.create_task(export(collector, collector.key()))
    assert await exporting is SpanExportResult.SUCCESS
    await collector.holds(0)


async def test_messages_that_are_read_count_as_the_longest_and_others_wait_for_half_of_the_room(
    collector: GrpcCollector,
) -> None:
    async with collector.call(collector.key()) as first:
        await collector.holds(1)
        exporting = asyncio.create_task(export(collector, collector.key(rollout=collector.sibling.id)))
        async with collector.call(collector.key()) as second:
            await second.send(spans_of({"trace_id": bytes([2]) * 16}))
            await collector.holds(1)
            assert await collector.spans() == []
            await first.send(spans_of({"trace_id": bytes([1]) * 16}))
            assert {(await call.code())[0] for call in (first, second)} == {grpc.StatusCode.OK}
        assert await exporting is SpanExportResult.SUCCESS
    await collector.holds(0)
    assert len(await collector.spans()) == 3


@pytest.mark.parametrize("collector", [10], indirect=True)
async def test_one_attempt_has_two_messages_read_at_once_and_its_others_wait(collector: GrpcCollector) -> None:
    mine, sibling = collector.key(), collector.key(rollout=collector.sibling.id)
    async with AsyncExitStack() as calls:
        first, _ = [await calls.enter_async_context(collector.call(mine)) for _ in range(2)]
        await collector.holds(2)
        waiting = [await calls.enter_async_context(collector.call(mine)) for _ in range(6)]
        for number, call in enumerate(waiting):
            await call.send(spans_of({"trace_id": bytes([number + 1]) * 16}))
        assert await export(collector, sibling) is SpanExportResult.SUCCESS
        assert (collector.held(), len(await collector.spans())) == (2, 1)
        first.export.cancel()
        assert {(await call.code())[0] for call in waiting} == {grpc.StatusCode.OK}
    await collector.holds(0)
    assert len(await collector.spans()) == 7


async def test_a_call_without_its_message_ends(collector: GrpcCollector, monkeypatch: pytest.MonkeyPatch) -> None:
    async with collector.call(collector.key()) as call:
        await call.export.done_writing()
        assert (await call.code())[0] is grpc.StatusCode.INVALID_ARGUMENT
    monkeypatch.setattr(grpc_module, "MESSAGE_SECONDS", 0.05)
    async with collector.call(collector.key()) as call:
        assert (await call.code())[0] is grpc.StatusCode.DEADLINE_EXCEEDED
    monkeypatch.undo()
    # One whose turn does not come is sent again.
    async with collector.call(collector.key()):
        await collector.holds(1)
        monkeypatch.setattr(grpc_module, "BODY_SECONDS", 0.05)
        async with collector.call(collector.key(rollout=collector.sibling.id)) as call:
            assert (await call.code())[0] is grpc.StatusCode.UNAVAILABLE
    await collector.holds(0)
