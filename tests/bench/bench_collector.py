"""Spans that the collector makes durable: OTLP over HTTP to its process, counted in Postgres afterwards."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

import psycopg
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from leyden.libs.capability import KeyRing, sign, write_keys
from leyden.libs.contracts.capability import Capability, Scope
from leyden.libs.store.database import Database
from leyden.libs.store.records.spans import NewSpan
from leyden.services.collector.conventions import Sender
from leyden.services.collector.decode import decode_traces
from tests.bench.rows import Row
from tests.bench.served import Server, served
from tests.bench.stored import Stored, stored
from tests.support.builders import add_attempt, add_group, add_run

SPANS = 24_576
"""In one measurement."""
LARGE, SMALL = 512, 32
"""Spans of a request: a full batch of the SDK's exporter, and the spans of a busy agent in 0.2 s."""
LARGE_AGENTS, SMALL_AGENTS = 8, 32


@dataclass(frozen=True)
class Endpoint:
    """The telemetry endpoint of one attempt."""

    sender: Sender
    key: str

    def request(self, body: bytes) -> bytes:
        """The bytes that an exporter sends."""
        head = (
            f"POST /r/{self.sender.rollout_id}/1/v1/traces HTTP/1.1\r\nhost: 127.0.0.1\r\n"
            f"authorization: Bearer {self.key}\r\nuser-agent: OTel-OTLP-Exporter-Python\r\n"
            "content-type: application/x-protobuf\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


@dataclass(frozen=True)
class Stand:
    """A collector between agents and a durable store. `endpoints` have stored nothing: an attempt may store so many."""

    store: Stored
    collector: Server
    endpoints: Iterator[Endpoint]

    def count(self) -> int:
        """Spans in the store."""
        with psycopg.connect(self.store.dsn) as connection:
            return cast(tuple[int], connection.execute("SELECT count(*) FROM spans").fetchone())[0]


def rows(repeats: int) -> list[Row]:
    """Large and small requests. The load generator works on the same cores."""
    with _stand(repeats * (LARGE_AGENTS + SMALL_AGENTS)) as stand:
        large = [_send(stand, SPANS, LARGE, LARGE_AGENTS) for _ in range(repeats)]
        small = [_send(stand, SPANS, SMALL, SMALL_AGENTS) for _ in range(repeats)]
    return [
        Row("collector", f"spans stored, {LARGE} a request, {LARGE_AGENTS} agents", "spans/s", large, at_least=18_000),
        Row("collector", f"spans stored, {SMALL} a request, {SMALL_AGENTS} agents", "spans/s", small, at_least=13_000),
    ]


@contextmanager
def _stand(attempts: int) -> Iterator[Stand]:
    with stored() as store, tempfile.TemporaryDirectory(prefix="bench-collector-") as name:
        folder = Path(name)
        write_keys(folder / "keys.json")
        environment = {
            "LEYDEN_DATABASE_URL": store.dsn,
            "LEYDEN_CAPABILITY_KEYS_FILE": str(folder / "keys.json"),
            # Nothing listens there: this does not measure ends of attempts.
            "LEYDEN_REDIS_URL": "redis://127.0.0.1:1/0",
        }
        senders = asyncio.run(_attempts(store.dsn, attempts))
        endpoints = [Endpoint(sender, _key(KeyRing(folder / "keys.json"), sender)) for sender in senders]
        with served(folder, "leyden.services.collector", environment) as collector:
            yield Stand(store, collector, iter(endpoints))


async def _attempts(dsn: str, count: int) -> list[Sender]:
    database = Database(dsn)
    try:
        run = await add_run(database)
        _, rollouts = await add_group(database, run, size=count)
        for rollout in rollouts:
            await add_attempt(database, rollout)
        return [Sender(run.id, rollout.id, 1) for rollout in rollouts]
    finally:
        await database.close()


def _key(ring: KeyRing, sender: Sender) -> str:
    until = int(time.time()) + 3600
    facts = {"run_id": sender.run_id, "rollout_id": sender.rollout_id, "attempt": sender.attempt}
    return sign(ring, Capability(**facts, scopes=frozenset({Scope.TELEMETRY}), expires_at=until))


def _send(stand: Stand, spans: int, size: int, agents: int) -> float:
    """Spans a second, sent by all agents at once, each waiting for its answers."""
    bodies, endpoints = _bodies(spans // size, size), list(islice(stand.endpoints, agents))
    requests = [
        [endpoint.request(body) for body in bodies[number::agents]] for number, endpoint in enumerate(endpoints)
    ]
    before, began = stand.count(), time.perf_counter()
    _post_all(stand.collector.url, requests)
    seconds = time.perf_counter() - began
    _check(stand, stand.count() - before, spans, bodies[-1], endpoints[(len(bodies) - 1) % agents].sender)
    return spans / seconds


def _post_all(url: str, requests: Sequence[Sequence[bytes]]) -> None:
    with ThreadPoolExecutor(len(requests)) as agents:
        for _ in agents.map(lambda mine: _post(url, mine), requests):
            pass


def _post(url: str, requests: Sequence[bytes]) -> None:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection, connection.makefile("rb") as answers:
        for request in requests:
            connection.sendall(request)
            status, headers = answers.readline(), {}
            while (line := answers.readline().lower()) != b"\r\n":
                name, _, value = line.partition(b":")
                headers[name] = value.strip()
            content = answers.read(int(headers[b"content-length"]))
            # An empty answer is full success; a partial one has a message.
            if b" 200 " not in status or content:
                raise AssertionError((status, content))


def _check(stand: Stand, found: int, sent: int, body: bytes, sender: Sender) -> None:
    """Raises: AssertionError: spans are missing, or the columns of one request's spans differ"""
    if found != sent:
        raise AssertionError(f"{sent} spans were answered with 200 and {found} stored")
    wanted = _rows(body, sender)
    columns = ", ".join(NewSpan._fields)
    with psycopg.connect(stand.store.dsn) as connection:
        stored_rows = connection.execute(
            f"SELECT {columns} FROM spans WHERE trace_id = %s ORDER BY span_id", (wanted[0].trace_id,)
        ).fetchall()
    expected = sorted((row._replace(attributes=json.loads(row.attributes)) for row in wanted), key=lambda r: r.span_id)
    if [tuple(row) for row in stored_rows] != [tuple(row) for row in expected]:
        raise AssertionError("spans are stored with other columns")


def _rows(body: bytes, sender: Sender) -> list[NewSpan]:
    return decode_traces(body, json=False, sender=sender, rewards_granted=True).spans


def _bodies(count: int, size: int) -> list[bytes]:
    """Export requests of so many spans as instrumentations of OpenTelemetry GenAI make them; every id is new."""
    rng = random.Random(count * size)
    request = _request(rng, size)
    bodies = []
    for _ in range(count):
        trace = random.SystemRandom().randbytes(16)
        for span in request.resource_spans[0].scope_spans[0].spans:
            span.trace_id, span.span_id = trace, rng.randbytes(8)
        bodies.append(request.SerializeToString())
    return bodies


def _request(rng: random.Random, size: int) -> ExportTraceServiceRequest:
    request = ExportTraceServiceRequest()
    resource = request.resource_spans.add()
    _attributes(resource.resource.attributes, {"service.name": "agent", "telemetry.sdk.language": "python"})
    scope = resource.scope_spans.add()
    scope.scope.name = "opentelemetry.instrumentation.openai_v2"
    for number in range(size):
        span = scope.spans.add()
        span.parent_span_id = rng.randbytes(8)
        span.start_time_unix_nano = time.time_ns() - 10**9 + number * 10**6
        span.end_time_unix_nano = span.start_time_unix_nano + 5 * 10**8
        name, attributes = (_chat if number % 2 else _tool)(rng)
        span.name = name
        _attributes(span.attributes, attributes)
    return request


def _chat(rng: random.Random) -> tuple[str, dict[str, Any]]:
    return "chat policy", {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "policy",
        "gen_ai.request.temperature": 1.0,
        "gen_ai.request.max_tokens": 512,
        "gen_ai.response.id": f"chatcmpl-c{rng.getrandbits(96):024x}",
        "gen_ai.response.model": "policy",
        "gen_ai.response.finish_reasons": ["tool_calls"],
        "gen_ai.usage.input_tokens": rng.randint(500, 8000),
        "gen_ai.usage.output_tokens": rng.randint(10, 500),
        "server.address": "127.0.0.1",
        "server.port": 8001,
    }


def _tool(rng: random.Random) -> tuple[str, dict[str, Any]]:
    flights = [{"flight": f"LH{rng.randint(100, 999)}", "price": rng.randint(50, 400), "seats": 3} for _ in range(4)]
    return "execute_tool search_flights", {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "search_flights",
        "gen_ai.tool.type": "function",
        "gen_ai.tool.call.id": f"call_c{rng.getrandbits(96):024x}_0",
        "gen_ai.tool.call.arguments": json.dumps({"origin": "BER", "destination": "LIS", "date": "2026-03-04"}),
        "gen_ai.tool.call.result": json.dumps(flights),
    }


def _attributes(target: Any, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        pair = target.add()
        pair.key = name
        match value:
            case str():
                pair.value.string_value = value
            case float():
                pair.value.double_value = value
            case int():
                pair.value.int_value = value
            case _:
                for item in value:
                    pair.value.array_value.values.add().string_value = item
