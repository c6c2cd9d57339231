"""The collector against the OpenTelemetry SDK's own exporter, raw OTLP bodies, and a Postgres that comes and goes."""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from google.rpc.status_pb2 import Status
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import Status as SpanStatus
from opentelemetry.trace import StatusCode
from sqlalchemy import select, text

from leyden.libs.capability import KeyRing, sign, write_keys
from leyden.libs.contracts.capability import Capability, Scope
from leyden.libs.service import serving
from leyden.libs.store import tables
from leyden.libs.store.attempts import AttemptKey, lock_running_attempts
from leyden.libs.store.database import Database, StoreAway
from leyden.libs.store.records.spans import AttemptEnded, NewReward, write_telemetry
from leyden.libs.store.runs.retention import prune_run
from leyden.services.collector import batch as batch_module
from leyden.services.collector import places as places_module
from leyden.services.collector.app import create_collector
from leyden.services.collector.routes import MISPLACED
from leyden.services.collector.settings import Settings
from tests.support.builders import add_attempt, add_call, add_group, add_run, end_attempt, end_run
from tests.support.waiting import eventually, waiting_transactions, waits_for_a_table

PROTOBUF = {"content-type": "application/x-protobuf"}
EVERYTHING = frozenset(Scope)


@dataclass
class Collector:
    """A served collector, one rollout to send to, and a client."""

    database: Database
    rollout: tables.Rollout
    ring: KeyRing
    url: str
    client: httpx.AsyncClient

    def key(self, scopes: frozenset[Scope] = EVERYTHING, *, rollout: str | None = None, seconds: int = 60) -> str:
        capability = Capability(
            run_id=self.rollout.run_id,
            rollout_id=rollout or self.rollout.id,
            attempt=1,
            scopes=scopes,
            expires_at=int(time.time()) + seconds,
        )
        return sign(self.ring, capability)

    async def post(
        self, path: str, content: Any, headers: dict[str, str] = PROTOBUF, key: str | None = None
    ) -> httpx.Response:
        authorization = {"authorization": f"Bearer {key or self.key()}"}
        return await self.client.post(f"{self.url}{path}", content=content, headers={**authorization, **headers})

    async def spans(self) -> Sequence[tables.Span]:
        async with self.database.read() as session:
            return (await session.scalars(select(tables.Span).order_by(tables.Span.start_ns))).all()

    async def rewards(self) -> list[tuple[str, float, str | None, str]]:
        async with self.database.read() as session:
            rows = await session.scalars(select(tables.Reward).order_by(tables.Reward.key))
            return [(row.name, row.value, row.response_id, row.source) for row in rows]


@pytest.fixture
async def collector(request: pytest.FixtureRequest, database: Database, tmp_path: Path) -> AsyncIterator[Collector]:
    keys = tmp_path / "keys.json"
    write_keys(keys)
    run = await add_run(database)
    _, rollouts = await add_group(database, run)
    await add_attempt(database, rollouts[0])
    values: dict[str, Any] = {"max_body_bytes": 1_000_000, "write_seconds": 5, **getattr(request, "param", {})}
    settings = Settings(port=0, database_url=database.dsn, capability_keys_file=keys, **values)
    async with serving(create_collector(settings)) as port, httpx.AsyncClient(timeout=30) as client:
        url = f"http://127.0.0.1:{port}/r/{rollouts[0].id}/1"
        yield Collector(database, rollouts[0], KeyRing(keys), url, client)


def body(*spans: dict[str, Any]) -> bytes:
    """An ExportTraceServiceRequest of one scope."""
    request = ExportTraceServiceRequest()
    scope = request.resource_spans.add().scope_spans.add()
    scope.scope.name = "test"
    for number, span in enumerate(spans):
        ids = {"trace_id": b"\1" * 16, "span_id": bytes([number % 255 + 1]) * 8}
        scope.spans.add(**{"name": "a", "start_time_unix_nano": number + 1, "end_time_unix_nano": 9, **ids, **span})
    return request.SerializeToString()


@pytest.mark.parametrize("compression", [Compression.NoCompression, Compression.Gzip])
async def test_sdk_exporter_delivers_tool_spans(collector: Collector, compression: Compression) -> None:
    def agent() -> None:
        provider = TracerProvider(shutdown_on_exit=False)
        exporter = OTLPSpanExporter(
            endpoint=f"{collector.url}/v1/traces",
            headers={"authorization": f"Bearer {collector.key()}"},
            compression=compression,
        )
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        tracer = provider.get_tracer("agent")
        tool = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "search", "gen_ai.tool.call.id": "call_1"}
        with tracer.start_as_current_span("execute_tool search", attributes=tool) as span:
            span.set_attribute("count", 3)
        with tracer.start_as_current_span("execute_tool memory", attributes=tool) as span:
            span.set_status(SpanStatus(StatusCode.ERROR, "no such place"))
        provider.shutdown()

    await asyncio.to_thread(agent)
    first, second = await collector.spans()
    assert (first.kind, first.tool, first.status, first.tool_call_id) == ("tool", "search", "ok", "call_1")
    assert first.attributes["count"] == 3
    assert first.scope == "agent"
    assert (second.status, second.rollout_id, second.attempt) == ("error", collector.rollout.id, 1)


async def test_a_repeat_makes_no_second_row(collector: Collector) -> None:
    sent = body({}, {})
    answers = [await collector.post("/v1/traces", sent) for _ in range(3)]
    answers += await asyncio.gather(*(collector.post("/v1/traces", sent) for _ in range(20)))
    assert {answer.status_code for answer in answers} == {200}
    assert ExportTraceServiceResponse.FromString(answers[0].content) == ExportTraceServiceResponse()
    assert len(await collector.spans()) == 2


async def test_large_requests_are_written_in_bulk_and_once(collector: Collector) -> None:
    sent = body(*({"span_id": (n + 1).to_bytes(8, "big")} for n in range(1000)))
    answers = [await collector.post("/v1/traces", sent) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert len(await collector.spans()) == 1000


async def test_json_ids_are_hex_and_integers_are_texts_or_numbers(collector: Collector) -> None:
    span = {
        "traceId": "5B8EFFF798038103D269B633813FC60C",
        "spanId": "EEE19B7EC3C1B174",
        "name": "execute_tool search",
        "startTimeUnixNano": "1700000000000000001",
        "endTimeUnixNano": 1700000000000000002,
        "unknownField": {"ignored": True},
        "attributes": [
            {"key": "openinference.span.kind", "value": {"stringValue": "TOOL"}},
            {"key": "count", "value": {"intValue": "7"}},
            {"key": "list", "value": {"arrayValue": {"values": [{"intValue": 1}, {"boolValue": True}]}}},
        ],
    }
    document = {"resourceSpans": [{"scopeSpans": [{"scope": {"name": "js"}, "spans": [span]}]}]}
    answer = await collector.client.post(
        f"{collector.url}/v1/traces", json=document, headers={"x-api-key": collector.key()}
    )
    assert (answer.status_code, answer.json()) == (200, {})
    (row,) = await collector.spans()
    assert (row.trace_id, row.span_id) == ("5b8efff798038103d269b633813fc60c", "eee19b7ec3c1b174")
    assert (row.start_ns, row.end_ns, row.tool) == (1700000000000000001, 1700000000000000002, "search")
    assert (row.attributes["count"], row.attributes["list"]) == (7, [1, True])


async def test_invalid_spans_are_rejected_and_the_others_stored(collector: Collector) -> None:
    sent = body({}, {"trace_id": b"short"}, {"span_id": b"\0" * 8}, {"start_time_unix_nano": 2**64 - 1}, {})
    answer = await collector.post("/v1/traces", sent)
    partial = ExportTraceServiceResponse.FromString(answer.content).partial_success
    assert (answer.status_code, partial.rejected_spans) == (200, 3)
    assert partial.error_message
    assert len(await collector.spans()) == 2


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"not protobuf", PROTOBUF, 400),
        (b"{", {"content-type": "application/json"}, 400),
        (b'{"resourceSpans": 5}', {"content-type": "application/json"}, 400),
        (b'{"resourceSpans": [{"scopeSpans": [{"spans": [7]}]}]}', {"content-type": "application/json"}, 400),
        (b"not gzip", {**PROTOBUF, "content-encoding": "gzip"}, 400),
        (gzip.compress(b"x" * 100, mtime=0)[:-6], {**PROTOBUF, "content-encoding": "gzip"}, 400),
        (gzip.compress(b"\0" * 200_000_000, 1, mtime=0), {**PROTOBUF, "content-encoding": "gzip"}, 413),
        (b"x" * 1_000_001, PROTOBUF, 413),
        (b"x", {**PROTOBUF, "content-encoding": "br"}, 415),
        (b"x", {"content-type": "text/plain"}, 415),
    ],
)
async def test_bad_data_gets_an_error_status(
    collector: Collector, content: bytes, headers: dict[str, str], status: int
) -> None:
    answer = await collector.post("/v1/traces", content, headers)
    assert answer.status_code == status
    if headers["content-type"] == "application/json":
        assert answer.json()["message"]
    else:
        assert Status.FromString(answer.content).message
    assert await collector.spans() == []


async def test_chunked_bodies_are_accepted_up_to_the_limit(collector: Collector) -> None:
    async def pieces(content: bytes) -> AsyncIterator[bytes]:
        for start in range(0, len(content), 50_000):
            yield content[start : start + 50_000]

    assert (await collector.post("/v1/traces", pieces(body({})))).status_code == 200
    assert (await collector.post("/v1/traces", pieces(b"x" * 3_000_000))).status_code == 413
    assert len(await collector.spans()) == 1


async def test_empty_request_succeeds(collector: Collector) -> None:
    for encoding in ({}, {"content-encoding": "gzip"}):
        content = gzip.compress(b"") if encoding else b""
        answer = await collector.post("/v1/traces", content, {**PROTOBUF, **encoding})
        assert (answer.status_code, answer.content) == (200, b"")


async def test_a_key_is_valid_only_for_its_own_attempt_and_scope(collector: Collector) -> None:
    keys = {
        collector.key(rollout="run-other.0.0"): 403,
        collector.key(frozenset({Scope.MODEL})): 403,
        collector.key(seconds=-60): 401,
        "nonsense": 401,
    }
    for key, status in keys.items():
        assert (await collector.post("/v1/traces", body({}), key=key)).status_code == status
    assert (await collector.client.post(f"{collector.url}/v1/traces", content=body({}))).status_code == 401
    assert await collector.spans() == []


async def test_an_unreachable_store_is_503_with_retry_after(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: object) -> None:
        raise StoreAway("connection refused")

    with monkeypatch.context() as patch:
        patch.setattr(batch_module, "write_telemetry", away)
        answer = await collector.post("/v1/traces", body({}))
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert (await collector.post("/v1/traces", body({}))).status_code == 200
    assert len(await collector.spans()) == 1


async def test_a_postgres_that_does_not_listen_is_503_and_not_ready(
    collector: Collector, tmp_path: Path, unused_tcp_port: int
) -> None:
    dsn = f"postgresql://leyden@127.0.0.1:{unused_tcp_port}/leyden"
    settings = Settings(port=0, database_url=dsn, capability_keys_file=tmp_path / "keys.json")
    app = create_collector(settings)
    async with serving(app) as port:
        collector.url = f"http://127.0.0.1:{port}/r/{collector.rollout.id}/1"
        answer = await collector.post("/v1/traces", body({}))
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        checks = await app.state.checks.run()
        assert checks["database"] != "ok"


async def test_memory_is_bounded_by_answering_503(database: Database, tmp_path: Path) -> None:
    write_keys(tmp_path / "keys.json")
    settings = Settings(
        port=0, database_url=database.dsn, capability_keys_file=tmp_path / "keys.json", max_bytes_in_flight=1024
    )
    async with serving(create_collector(settings)) as port, httpx.AsyncClient() as client:
        _, (rollout, _) = await add_group(database, await add_run(database))
        await add_attempt(database, rollout)
        url = f"http://127.0.0.1:{port}/r/{rollout.id}/1"
        small = Collector(database, rollout, KeyRing(tmp_path / "keys.json"), url, client)
        answer = await small.post("/v1/traces", body({"name": "x" * 2000}))
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert (await small.post("/v1/traces", b"")).status_code == 200


async def test_refused_rows_fail_only_their_own_request(collector: Collector) -> None:
    dropped = await add_run(collector.database)
    _, (rollout, _) = await add_group(collector.database, dropped)
    await add_attempt(collector.database, rollout)
    await end_run(collector.database, dropped)
    await prune_run(collector.database, dropped.id)
    stranger = Capability(
        run_id=dropped.id,
        rollout_id=rollout.id,
        attempt=1,
        scopes=EVERYTHING,
        expires_at=int(time.time()) + 60,
    )
    url = collector.url.replace(collector.rollout.id, rollout.id)
    headers = {"authorization": f"Bearer {sign(collector.ring, stranger)}", **PROTOBUF}
    good = [collector.post("/v1/traces", body({"trace_id": bytes([n + 1]) * 16})) for n in range(8)]
    bad = [collector.client.post(f"{url}/v1/traces", content=body({}), headers=headers) for _ in range(4)]
    answers = await asyncio.gather(*good, *bad)
    assert [answer.status_code for answer in answers] == [200] * 8 + [400] * 4
    assert len(await collector.spans()) == 8


async def test_nul_characters_are_stored_as_replacements(collector: Collector) -> None:
    sent = body({"name": "a\0b", "attributes": [{"key": "k\0", "value": {"string_value": "\0\\u0000\\\0"}}]})
    assert (await collector.post("/v1/traces", sent)).status_code == 200
    (row,) = await collector.spans()
    assert (row.name, row.attributes) == ("a\ufffdb", {"k\ufffd": "\ufffd\\u0000\\\ufffd"})


def evaluation(value: float, response_id: str = "chatcmpl-c1") -> dict[str, Any]:
    return {
        "name": "gen_ai.evaluation.result",
        "attributes": [
            {"key": "gen_ai.evaluation.name", "value": {"string_value": "correct"}},
            {"key": "gen_ai.evaluation.score.value", "value": {"double_value": value}},
            {"key": "gen_ai.response.id", "value": {"string_value": response_id}},
        ],
    }


async def test_rewards_in_telemetry_are_stored_once_and_only_when_granted(collector: Collector) -> None:
    await add_call(collector.database, collector.rollout, request_id="c1")
    sent = body(
        {"attributes": [{"key": "rl.reward", "value": {"double_value": 0.5}}]},
        {"events": [evaluation(1.0), evaluation(float("nan"))]},
    )
    denied = await collector.post("/v1/traces", sent, key=collector.key(frozenset({Scope.TELEMETRY})))
    message = ExportTraceServiceResponse.FromString(denied.content).partial_success
    assert (denied.status_code, message.rejected_spans, bool(message.error_message)) == (200, 0, True)
    assert await collector.rewards() == []
    for _ in range(2):
        assert (await collector.post("/v1/traces", sent)).status_code == 200
    assert await collector.rewards() == [
        ("rl.reward", 0.5, None, "telemetry"),
        ("correct", 1.0, "chatcmpl-c1", "telemetry"),
    ]


async def test_a_reward_in_telemetry_for_an_answer_that_the_attempt_does_not_have_is_left_out(
    collector: Collector,
) -> None:
    await add_call(collector.database, collector.rollout, request_id="c1")
    sent = body({"events": [evaluation(1.0), evaluation(2.0, "chatcmpl-c2")]})
    given = await collector.post("/v1/traces", sent)
    partial = ExportTraceServiceResponse.FromString(given.content).partial_success
    assert (given.status_code, partial.rejected_spans) == (200, 0)
    assert "no answer of this attempt has response_id 'chatcmpl-c2'" in partial.error_message
    assert [(value, answer) for _, value, answer, _ in await collector.rewards()] == [(1.0, "chatcmpl-c1")]


def with_reward(kind: str, value: float, **ids: str) -> dict[str, Any]:
    """A span of an operation with a reward; its ids are given without `gen_ai.` and with `_` for dots."""
    texts = {"operation.name": kind, **{name.replace("_", "."): text for name, text in ids.items()}}
    attributes: list[dict[str, Any]] = [
        {"key": f"gen_ai.{name}", "value": {"string_value": text}} for name, text in texts.items()
    ]
    return {
        "span_id": bytes([int(value * 10)]) * 8,
        "attributes": [*attributes, {"key": "rl.reward", "value": {"double_value": value}}],
    }


async def test_a_reward_on_a_span_of_no_answer_or_tool_call_of_the_attempt_is_left_out(collector: Collector) -> None:
    asked = {"role": "assistant", "content": "", "tool_calls": [{"id": "call_1", "name": "f", "arguments": "{}"}]}
    await add_call(collector.database, collector.rollout, [1], [2], answer=asked, request_id="c1")
    before = MISPLACED._value.get()
    sent = body(
        with_reward("chat", 0.1, response_id="chatcmpl-c1"),
        with_reward("chat", 0.2, response_id="chatcmpl-of-another-model"),
        with_reward("execute_tool", 0.3, tool_call_id="call_1"),
        with_reward("execute_tool", 0.4, tool_call_id="call_2"),
        # The answer is known: a library's own id of the tool call takes nothing from it.
        with_reward("execute_tool", 0.5, tool_call_id="call_2", response_id="chatcmpl-c1"),
        with_reward("invoke_agent", 0.6),
    )
    given = await collector.post("/v1/traces", sent)
    partial = ExportTraceServiceResponse.FromString(given.content).partial_success
    assert (given.status_code, partial.rejected_spans) == (200, 0)
    assert "no answer of this attempt has response_id 'chatcmpl-of-another-model'" in partial.error_message
    assert sorted(value for _, value, _, _ in await collector.rewards()) == [0.1, 0.3, 0.5, 0.6]
    assert (len(await collector.spans()), MISPLACED._value.get() - before) == (6, 2)


async def test_evaluation_results_arrive_as_log_records(collector: Collector) -> None:
    score = {"key": "gen_ai.evaluation.score.value", "value": {"doubleValue": 0.25}}
    records = [
        {"eventName": "gen_ai.evaluation.result", "timeUnixNano": "5", "attributes": [score]},
        {"body": {"stringValue": "anything else"}},
    ]
    document = {"resourceLogs": [{"scopeLogs": [{"logRecords": records}]}]}
    for _ in range(2):
        answer = await collector.client.post(
            f"{collector.url}/v1/logs", json=document, headers={"authorization": f"Bearer {collector.key()}"}
        )
        assert (answer.status_code, answer.json()) == (200, {})
    assert await collector.rewards() == [("gen_ai.evaluation.result", 0.25, None, "telemetry")]


async def test_an_evaluation_that_an_sdk_bridges_into_its_span_is_one_reward(collector: Collector) -> None:
    ids = {"traceId": "1" * 32, "spanId": "2" * 16}
    score = {"attributes": [{"key": "gen_ai.evaluation.score.value", "value": {"doubleValue": 0.25}}]}
    record = {**ids, **score, "eventName": "gen_ai.evaluation.result", "observedTimeUnixNano": "5"}
    event = {**score, "name": "gen_ai.evaluation.result", "timeUnixNano": "5"}
    sent = {
        "/v1/logs": {"resourceLogs": [{"scopeLogs": [{"logRecords": [record]}]}]},
        "/v1/traces": {"resourceSpans": [{"scopeSpans": [{"spans": [{**ids, "events": [event]}]}]}]},
    }
    headers = {"authorization": f"Bearer {collector.key()}"}
    for path, document in [*sent.items()] * 2:
        answer = await collector.client.post(f"{collector.url}{path}", json=document, headers=headers)
        assert (answer.status_code, answer.json()) == (200, {})
    assert await collector.rewards() == [("gen_ai.evaluation.result", 0.25, None, "telemetry")]


@pytest.mark.parametrize("paths", [("/v1/logs", "/v1/traces"), ("/v1/traces", "/v1/logs")])
async def test_a_bridged_evaluation_has_the_place_that_either_exporter_names(
    collector: Collector, paths: tuple[str, str]
) -> None:
    await add_call(collector.database, collector.rollout, request_id="c1")
    ids = {"traceId": "1" * 32, "spanId": "2" * 16}
    score = {"attributes": [{"key": "gen_ai.evaluation.score.value", "value": {"doubleValue": 0.25}}]}
    record = {**ids, **score, "eventName": "gen_ai.evaluation.result", "timeUnixNano": "5"}
    event = {**score, "name": "gen_ai.evaluation.result", "timeUnixNano": "5"}
    place = [{"key": "gen_ai.response.id", "value": {"stringValue": "chatcmpl-c1"}}]
    sent = {
        "/v1/logs": {"resourceLogs": [{"scopeLogs": [{"logRecords": [record]}]}]},
        "/v1/traces": {
            "resourceSpans": [{"scopeSpans": [{"spans": [{**ids, "events": [event], "attributes": place}]}]}]
        },
    }
    headers = {"authorization": f"Bearer {collector.key()}"}
    for path in paths:
        answer = await collector.client.post(f"{collector.url}{path}", json=sent[path], headers=headers)
        assert (answer.status_code, answer.json()) == (200, {})
    assert await collector.rewards() == [("gen_ai.evaluation.result", 0.25, "chatcmpl-c1", "telemetry")]


def named(name: str, value: float) -> dict[str, Any]:
    attributes = {"name": {"stringValue": name}, "score.value": {"doubleValue": value}}
    return {
        "eventName": "gen_ai.evaluation.result",
        "attributes": [{"key": f"gen_ai.evaluation.{key}", "value": one} for key, one in attributes.items()],
    }


async def with_components(collector: Collector, *components: dict[str, Any]) -> str:
    """Gives the run these components; returns a key that gives values to those from telemetry."""
    async with collector.database.session() as session:
        run = await session.get_one(tables.Run, collector.rollout.run_id)
        run.config = {**run.config, "reward": {"components": list(components), "wait": {"seconds": 60.0}}}
    return collector.key(frozenset({Scope.TELEMETRY, Scope.FEEDBACK}))


async def values_given(collector: Collector) -> list[tuple[str, int, float]]:
    async with collector.database.read() as session:
        rows = (await session.scalars(select(tables.Feedback).order_by(tables.Feedback.created_at))).all()
    return [(one.component, one.attempt, one.value) for one in rows]


async def test_evaluation_results_give_the_components_that_are_from_otlp_and_no_others(collector: Collector) -> None:
    key = await with_components(collector, {"name": "quality", "from": "otlp"}, {"name": "thumbs", "from": "feedback"})
    records = [named("quality", 0.25), named("quality", 0.75), named("thumbs", 1.0), named("Quality", 1.0)]
    headers = {"authorization": f"Bearer {key}"}
    for _ in range(2):
        document = {"resourceLogs": [{"scopeLogs": [{"logRecords": records}]}]}
        answer = await collector.client.post(f"{collector.url}/v1/logs", json=document, headers=headers)
        partial = answer.json()["partialSuccess"]
        assert (answer.status_code, partial["rejectedLogRecords"]) == (200, 0)
        assert partial["errorMessage"].endswith("has the name 'Quality', 'thumbs'")
    assert await values_given(collector) == [("quality", 1, 0.25), ("quality", 1, 0.75)]
    assert await collector.rewards() == []
    refused = await collector.client.post(f"{collector.url}/reward", json={"value": 1}, headers=headers)
    assert refused.status_code == 403


async def test_an_evaluation_gives_its_component_on_a_span_of_another_model_too(collector: Collector) -> None:
    key = await with_components(collector, {"name": "correct", "from": "otlp"})
    judge = with_reward("chat", 0.1, response_id="chatcmpl-of-another-model")
    answer = await collector.post(
        "/v1/traces", body({**judge, "attributes": judge["attributes"][:-1], "events": [evaluation(1.0)]}), key=key
    )
    assert (answer.status_code, answer.content) == (200, b"")
    assert await values_given(collector) == [("correct", 1, 1.0)]


async def test_the_times_of_evaluations_order_them_and_not_their_arrival(collector: Collector) -> None:
    key = await with_components(collector, {"name": "correct", "from": "otlp"})
    # A span is sent when it ends: the root with an early event after an inner one with a late event.
    late, early = (
        {"events": [{**evaluation(value), "time_unix_nano": at}]} for value, at in ((0.9, 5000), (0.2, 1000))
    )
    untimed = {"end_time_unix_nano": 0, "events": [evaluation(0.5)]}
    for sent in (
        body(late, early, untimed),
        body({"span_id": b"\x77" * 8, "events": [{**evaluation(0.4), "time_unix_nano": 3000}]}),
    ):
        assert (await collector.post("/v1/traces", sent, key=key)).status_code == 200
    assert [value for _, _, value in await values_given(collector)] == [0.2, 0.4, 0.9, 0.5]


async def test_the_reward_endpoint_accepts_valid_rewards_alone(collector: Collector) -> None:
    async def give(document: dict[str, Any], **options: Any) -> int:
        headers = {"authorization": f"Bearer {collector.key(**options)}"}
        return (await collector.client.post(f"{collector.url}/reward", json=document, headers=headers)).status_code

    assert [await give({"value": 1}), await give({"value": 1})] == [200, 200]
    assert await give({"values": {"speed": 0.5, "style": 0.25}, "key": "k"}) == 200
    call = await add_call(collector.database, collector.rollout, [1], [2])
    turn = f"chatcmpl-{call.request_id}"
    assert await give({"value": 2, "response_id": turn, "name": "turn"}) == 200
    assert await give({"value": 1}, scopes=frozenset({Scope.TELEMETRY, Scope.MODEL})) == 403
    for wrong in ({}, {"value": "NaN"}, {"value": 1, "values": {"a": 1}}, {"value": 1, "extra": 2}, {"values": {}}):
        assert await give(wrong) == 422
    assert sorted(await collector.rewards()) == [
        ("reward", 1.0, None, "endpoint"),
        ("speed", 0.5, None, "endpoint"),
        ("style", 0.25, None, "endpoint"),
        ("turn", 2.0, turn, "endpoint"),
    ]


async def test_ready_while_the_store_answers_and_the_writer_lives(database: Database, tmp_path: Path) -> None:
    write_keys(tmp_path / "keys.json")
    settings = Settings(database_url=database.dsn, capability_keys_file=tmp_path / "keys.json")
    app = create_collector(settings)
    async with app.router.lifespan_context(app):
        assert await app.state.checks.run() == {"database": "ok", "schema": "ok", "writer": "ok"}


async def give(collector: Collector, **document: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {collector.key()}"}
    return await collector.client.post(f"{collector.url}/reward", json=document, headers=headers)


async def test_a_reward_for_an_answer_that_the_attempt_does_not_have_is_refused(collector: Collector) -> None:
    asked = {"role": "assistant", "content": "", "tool_calls": [{"id": "call_1", "name": "f", "arguments": "{}"}]}
    call = await add_call(collector.database, collector.rollout, [1], [2], answer=asked)
    for known in ({"response_id": f"resp_{call.request_id}"}, {"tool_call_id": "call_1"}):
        assert (await give(collector, value=1.0, **known)).status_code == 200
    for unknown in ({"response_id": "chatcmpl-nothing"}, {"tool_call_id": "call_2"}):
        refused = await give(collector, value=1.0, key="k", **unknown)
        assert (refused.status_code, refused.json()["cause"]) == (422, "unknown_call")
        assert next(iter(unknown.values())) in refused.json()["detail"]
    assert len(await collector.rewards()) == 2


async def test_a_flood_of_invented_ids_keeps_no_other_attempt_from_the_store(collector: Collector) -> None:
    """The lock of the table stands for look-ups that take long."""
    _, (sibling, _) = await add_group(collector.database, await add_run(collector.database))
    await add_attempt(collector.database, sibling)
    capability = Capability(
        run_id=sibling.run_id, rollout_id=sibling.id, attempt=1, scopes=EVERYTHING, expires_at=int(time.time()) + 60
    )
    url = collector.url.replace(collector.rollout.id, sibling.id)
    headers = {"authorization": f"Bearer {sign(collector.ring, capability)}"}
    async with collector.database.session() as session:
        await session.execute(text("LOCK TABLE model_calls IN ACCESS EXCLUSIVE MODE"))
        flood = [asyncio.create_task(give(collector, value=1.0, tool_call_id=f"call_{n}")) for n in range(20)]
        await eventually(lambda: waits_for_a_table(collector.database), "a look-up waits")
        for n in range(3):
            stored = await collector.client.post(f"{url}/reward", json={"value": 1, "key": f"{n}"}, headers=headers)
            assert stored.status_code == 200
        assert (await waiting_transactions(collector.database), any(one.done() for one in flood)) == (1, False)
    refused = await asyncio.gather(*flood)
    assert {one.json()["cause"] for one in refused} == {"unknown_call"}
    # Each is told of its own id, though all of them share two look-ups.
    assert all(f"'call_{n}'" in one.json()["detail"] for n, one in enumerate(refused))
    assert len(await collector.rewards()) == 3


LIMITS = {"max_attempt_spans": 10, "max_attempt_span_bytes": 100_000, "max_attempt_rewards": 3}


@pytest.mark.parametrize("collector", [LIMITS], indirect=True)
async def test_spans_beyond_the_limit_of_an_attempt_are_rejected_with_the_setting(collector: Collector) -> None:
    spans = [{"span_id": (n + 1).to_bytes(8, "big")} for n in range(15)]
    first = await collector.post("/v1/traces", body(*spans[:8]))
    assert ExportTraceServiceResponse.FromString(first.content) == ExportTraceServiceResponse()
    for rejected in (5, 7):
        answer = await collector.post("/v1/traces", body(*spans[8:]))
        partial = ExportTraceServiceResponse.FromString(answer.content).partial_success
        assert (answer.status_code, partial.rejected_spans) == (200, rejected)
        assert "may store 10 spans (COLLECTOR_MAX_ATTEMPT_SPANS)" in partial.error_message
    assert len(await collector.spans()) == 10


@pytest.mark.parametrize("collector", [LIMITS], indirect=True)
async def test_bytes_of_spans_and_rewards_of_an_attempt_are_bounded(collector: Collector) -> None:
    text = [{"key": "k", "value": {"string_value": "x" * 15_000}}]
    answers = [
        await collector.post("/v1/traces", body({"span_id": bytes([n + 1]) * 8, "attributes": text})) for n in range(8)
    ]
    found = [ExportTraceServiceResponse.FromString(one.content).partial_success.rejected_spans for one in answers]
    assert found[:6] == [0] * 6
    assert [(await give(collector, value=1.0, key=str(n))).status_code for n in range(5)] == [200] * 3 + [422] * 2
    refused = await give(collector, value=1.0, key="more")
    assert refused.json()["cause"] == "attempt_limit"
    records = [
        {
            "eventName": "gen_ai.evaluation.result",
            "attributes": [{"key": "gen_ai.evaluation.score.value", "value": {"doubleValue": 1}}],
        }
    ]
    document = {"resourceLogs": [{"scopeLogs": [{"logRecords": records}]}]}
    log = await collector.client.post(
        f"{collector.url}/v1/logs", json=document, headers={"authorization": f"Bearer {collector.key()}"}
    )
    assert log.json()["partialSuccess"]["rejectedLogRecords"] == 1


@pytest.mark.parametrize("collector", [LIMITS], indirect=True)
@pytest.mark.parametrize("spent", ["stored", "invented"])
async def test_no_place_is_looked_up_for_an_attempt_that_has_spent_its_rewards(
    collector: Collector, spent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await add_call(collector.database, collector.rollout, request_id="c1")
    for n in range(3):
        named = {} if spent == "stored" else {"tool_call_id": f"call_{n}"}
        assert (await give(collector, value=1.0, key=str(n), **named)).status_code == (
            200 if spent == "stored" else 422
        )

    async def unknown_places(*_: object) -> None:
        raise AssertionError("looked up")

    monkeypatch.setattr(places_module, "unknown_places", unknown_places)
    refused = await give(collector, value=1.0, key="more", response_id="chatcmpl-c1")
    assert (refused.status_code, refused.json()["cause"]) == (422, "attempt_limit")
    assert "COLLECTOR_MAX_ATTEMPT_REWARDS" in refused.json()["detail"]
    sent = body(with_reward("chat", 0.1, response_id="chatcmpl-c1"), with_reward("invoke_agent", 0.2))
    partial = ExportTraceServiceResponse.FromString((await collector.post("/v1/traces", sent)).content).partial_success
    assert "COLLECTOR_MAX_ATTEMPT_REWARDS" in partial.error_message
    # A reward of the rollout needs no look-up.
    assert [value for _, value, _, _ in await collector.rewards()] == ([1.0] * 3 if spent == "stored" else [0.2])
    assert len(await collector.spans()) == 2


async def test_repeating_a_reward_key_adds_no_second_reward(collector: Collector) -> None:
    assert (await give(collector, value=1.0, key="k")).status_code == 200
    again, other = await give(collector, value=1.0, key="k"), await give(collector, value=2.0, key="k")
    assert (again.status_code, other.status_code, other.json()["cause"]) == (200, 409, "conflict")
    assert "'reward' = 1 to the rollout" in other.json()["detail"]
    several = await give(collector, values={"speed": 0.5, "style": 1.0}, key="s")
    half_new = await give(collector, values={"depth": 0.5, "style": 0.0}, key="s")
    assert (several.status_code, half_new.status_code) == (200, 409)
    # All or nothing: what conflicts takes the rest of its request with it.
    assert [(name, value) for name, value, _, _ in await collector.rewards()] == [
        ("reward", 1.0),
        ("speed", 0.5),
        ("style", 1.0),
    ]


async def test_concurrent_duplicates_are_one_row_and_conflicts_one_winner(collector: Collector) -> None:
    same = await asyncio.gather(*(give(collector, value=0.5, key="same") for _ in range(20)))
    assert {answer.status_code for answer in same} == {200}
    answers = await asyncio.gather(*(give(collector, value=float(n), key="race") for n in range(10)))
    assert sorted(answer.status_code for answer in answers) == [200] + [409] * 9
    winner = next(n for n, answer in enumerate(answers) if answer.status_code == 200)
    rewards = await collector.rewards()
    assert sorted(value for _, value, _, _ in rewards) == sorted([0.5, float(winner)])


@pytest.mark.parametrize(
    "value", ["NaN", "Infinity", "-Infinity", "1e400", "1e300", "-1e300", '"1"', "true", "null", "[1]"]
)
async def test_a_reward_that_is_no_number_of_a_usable_size_is_refused(collector: Collector, value: str) -> None:
    headers = {"authorization": f"Bearer {collector.key()}", "content-type": "application/json"}
    for body in (f'{{"value": {value}}}', f'{{"values": {{"a": {value}}}}}'):
        answer = await collector.client.post(f"{collector.url}/reward", content=body, headers=headers)
        assert answer.status_code == 422, body
    assert await collector.rewards() == []


async def test_a_reward_of_a_size_that_none_has_is_refused_unread(collector: Collector) -> None:
    names = {f"{number:03}" + "\N{SNOWMAN}" * 197: 0.5 for number in range(100)}
    assert (await give(collector, values=names)).status_code == 200
    answer = await give(collector, value=1.0, key=" " * 300_000)
    assert (answer.status_code, answer.json()["cause"]) == (413, "too_large")
    assert len(await collector.rewards()) == 100


async def test_telemetry_of_an_ended_attempt_is_refused(collector: Collector) -> None:
    assert (await give(collector, value=1.0)).status_code == 200
    await end_attempt(collector.database, collector.rollout.id, state="settled")
    # The door still believes that the attempt runs; the transaction that would store the rows does not.
    late = await give(collector, value=2.0)
    spans = await collector.post("/v1/traces", body({}))
    assert (late.status_code, late.json()["cause"], spans.status_code) == (403, "ended", 403)
    assert Status.FromString(spans.content).message == late.json()["detail"]
    assert [value for _, value, _, _ in await collector.rewards()] == [1.0]
    assert await collector.spans() == []


async def test_a_batch_of_an_ended_attempt_fails_no_other_batch(collector: Collector) -> None:
    run = await add_run(collector.database)
    _, (sibling, _) = await add_group(collector.database, run)
    await add_attempt(collector.database, sibling)
    capability = Capability(
        run_id=run.id, rollout_id=sibling.id, attempt=1, scopes=EVERYTHING, expires_at=int(time.time()) + 60
    )
    url = collector.url.replace(collector.rollout.id, sibling.id)
    headers = {"authorization": f"Bearer {sign(collector.ring, capability)}", **PROTOBUF}

    async def send(number: int) -> int:
        sent = body({"trace_id": bytes([number + 1]) * 16})
        return (await collector.client.post(f"{url}/v1/traces", content=sent, headers=headers)).status_code

    assert await send(0) == 200
    await end_attempt(collector.database, collector.rollout.id)
    late = [collector.post("/v1/traces", body({"trace_id": bytes([n + 1]) * 16})) for n in range(4)]
    answers, statuses = await asyncio.gather(asyncio.gather(*late), asyncio.gather(*map(send, range(1, 9))))
    assert ([answer.status_code for answer in answers], statuses) == ([403] * 4, [200] * 8)
    assert {span.rollout_id for span in await collector.spans()} == {sibling.id}


async def test_an_attempt_cannot_end_while_its_rows_are_being_stored(collector: Collector) -> None:
    reward = NewReward(collector.rollout.id, 1, "k", collector.rollout.run_id, "endpoint", "reward", 1.0, None, None)
    async with collector.database.session() as session:
        held = await lock_running_attempts(session, [AttemptKey(collector.rollout.id, 1)])
        assert held == {AttemptKey(collector.rollout.id, 1)}
        ending = asyncio.create_task(end_attempt(collector.database, collector.rollout.id, state="settled"))
        await asyncio.wait({ending}, timeout=0.3)
        assert not ending.done()
    await ending
    with pytest.raises(AttemptEnded):
        await write_telemetry(collector.database, [], [reward])
    assert await collector.rewards() == []
