"""OTLP bodies, whole and broken anywhere: read as they were meant, or refused as the sender's fault."""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from leyden.libs.service import Budget, Problem
from leyden.libs.service.body import read_body
from leyden.services.collector.conventions import Sender
from leyden.services.collector.decode import Rows, decode_logs, decode_traces
from leyden.services.collector.wire import MAX_RECORD_BYTES, MAX_RECORDS, BadBody, TooMany

SENDER = Sender("run-a", "run-a.0.0", 1)
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
SCALARS = st.one_of(
    TEXTS.map(lambda text: {"stringValue": text}),
    st.booleans().map(lambda value: {"boolValue": value}),
    st.integers(-(2**63), 2**63 - 1).map(lambda value: {"intValue": str(value)}),
    st.floats(allow_nan=False, allow_infinity=False).map(lambda value: {"doubleValue": value}),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: {"arrayValue": {"values": items}}),
        st.lists(st.tuples(TEXTS, inner), max_size=3).map(
            lambda pairs: {"kvlistValue": {"values": [{"key": key, "value": value} for key, value in pairs]}}
        ),
    ),
    max_leaves=8,
)
ATTRIBUTES = st.dictionaries(TEXTS, VALUES, max_size=4).map(
    lambda found: [{"key": key, "value": value} for key, value in found.items()]
)
SPANS = st.fixed_dictionaries(
    {
        "traceId": st.binary(min_size=16, max_size=16).map(bytes.hex),
        "spanId": st.binary(min_size=8, max_size=8).map(bytes.hex),
        "name": TEXTS,
        "startTimeUnixNano": st.integers(0, 2**63 - 1).map(str),
        "attributes": ATTRIBUTES,
        "events": st.lists(st.fixed_dictionaries({"name": TEXTS, "attributes": ATTRIBUTES}), max_size=2),
    }
)
REQUESTS = st.lists(SPANS, max_size=3).map(
    lambda spans: {"resourceSpans": [{"scopeSpans": [{"scope": {"name": "of the test"}, "spans": spans}]}]}
)


def protobuf(document: dict[str, Any]) -> bytes:
    """The same request as protobuf."""
    request = ExportTraceServiceRequest()
    for scope in document["resourceSpans"][0]["scopeSpans"]:
        made = request.resource_spans.add().scope_spans.add()
        made.scope.name = scope["scope"]["name"]
        for span in scope["spans"]:
            _fill(made.spans.add(), span)
    return request.SerializeToString()


def _fill(made: Any, span: dict[str, Any]) -> None:
    made.trace_id, made.span_id = bytes.fromhex(span["traceId"]), bytes.fromhex(span["spanId"])
    made.name, made.start_time_unix_nano = span["name"], int(span["startTimeUnixNano"])
    _attributes(made.attributes, span["attributes"])
    for event in span["events"]:
        added = made.events.add()
        added.name = event["name"]
        _attributes(added.attributes, event["attributes"])


def _attributes(made: Any, pairs: list[dict[str, Any]]) -> None:
    for pair in pairs:
        added = made.add()
        added.key = pair["key"]
        _value(added.value, pair["value"])


def _value(made: Any, value: dict[str, Any]) -> None:
    [(kind, content)] = value.items()
    if kind == "arrayValue":
        made.array_value.SetInParent()
        for item in content["values"]:
            _value(made.array_value.values.add(), item)
    elif kind == "kvlistValue":
        made.kvlist_value.SetInParent()
        _attributes(made.kvlist_value.values, content["values"])
    elif kind == "stringValue":
        made.string_value = content
    elif kind == "boolValue":
        made.bool_value = content
    elif kind == "intValue":
        made.int_value = int(content)
    else:
        made.double_value = content


def traces(body: bytes, *, as_json: bool = False) -> Rows:
    return decode_traces(body, json=as_json, sender=SENDER, rewards_granted=True)


@given(REQUESTS)
def test_json_and_protobuf_give_the_same_spans(document: dict[str, Any]) -> None:
    packed = protobuf(document)
    assert MessageToDict(ExportTraceServiceRequest.FromString(packed)) is not None
    assert traces(packed) == traces(json.dumps(document).encode(), as_json=True)


@given(REQUESTS, st.data())
def test_a_body_broken_anywhere_is_refused_or_read(document: dict[str, Any], data: st.DataObject) -> None:
    packed = bytearray(protobuf(document) or b"\x0a\x00")
    for _ in range(data.draw(st.integers(1, 4))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    for body in (bytes(packed), bytes(packed[: data.draw(st.integers(0, len(packed)))])):
        for decode in (traces, lambda body: decode_logs(body, json=False, sender=SENDER, rewards_granted=True)):
            try:
                assert isinstance(decode(body), Rows)
            except (BadBody, TooMany):
                continue


@given(st.binary(max_size=200))
def test_noise_is_refused_or_read(body: bytes) -> None:
    for as_json in (False, True):
        try:
            assert isinstance(traces(body, as_json=as_json), Rows)
        except BadBody:
            continue


ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


@given(REQUESTS, st.data())
def test_a_document_of_wrong_types_is_refused_or_read(document: dict[str, Any], data: st.DataObject) -> None:
    def spoilt(value: Any) -> Any:
        if data.draw(st.integers(0, 9)) == 0:
            return data.draw(ODD)
        if isinstance(value, dict):
            return {name: spoilt(inner) for name, inner in value.items()}
        return [spoilt(inner) for inner in value] if isinstance(value, list) else value

    with contextlib.suppress(BadBody):
        assert isinstance(traces(json.dumps(spoilt(document)).encode(), as_json=True), Rows)


@pytest.mark.parametrize("levels", [100, 900, 100_000])
def test_values_of_any_depth_are_cut_or_refused(levels: int) -> None:
    deep = '{"arrayValue": {"values": [' * levels + '{"intValue": 1}' + "]}}" * levels
    spelled = '{"stringValue": ' + "[" * levels + "]" * levels + "}"
    for value in (deep, spelled):
        span = f'{{"traceId": "{"a" * 32}", "spanId": "{"b" * 16}", "attributes": [{{"key": "k", "value": {value}}}]}}'
        body = f'{{"resourceSpans": [{{"scopeSpans": [{{"spans": [{span}]}}]}}]}}'.encode()
        with contextlib.suppress(BadBody):
            assert len(traces(body, as_json=True)) == 1


def _field(number: int, body: bytes) -> bytes:
    size, digits = len(body), bytearray()
    while size > 127:
        digits.append(size & 127 | 128)
        size >>= 7
    return bytes([number << 3 | 2]) + bytes([*digits, size]) + body


@pytest.mark.parametrize(
    "body",
    [
        b"\x0a\x00" * 2**20,
        _field(1, b"\x12\x00" * 2**20),
        _field(1, _field(2, b"\x12\x00" * 2**20)),
        b"\x10\x00" * 2**20,
    ],
    ids=["resources", "scopes", "spans", "unknown fields"],
)
def test_bodies_with_too_many_records_are_refused_before_parsing(body: bytes) -> None:
    with pytest.raises(TooMany, match=f"more than about {MAX_RECORDS} records: send smaller batches"):
        traces(body)


def test_a_span_that_is_too_large_is_dropped_and_the_others_stay() -> None:
    ids = _field(1, b"t" * 16) + _field(2, b"s" * 8)
    huge = _field(2, ids + b"\x4a\x00" * (MAX_RECORD_BYTES // 2))
    rows = traces(_field(1, _field(2, huge + _field(2, ids))))
    assert (len(rows.spans), rows.rejected) == (1, 1)
    assert f"at most {MAX_RECORD_BYTES} bytes" in rows.message


async def read(body: bytes, size: int) -> bytes:
    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), size):
            yield body[start : start + size]

    with Budget(10**6).share() as share:
        return await read_body(pieces(), "gzip", share, max_bytes=10_000, seconds=60)


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=3), st.integers(1, 50))
async def test_gzip_with_several_members_is_decoded_at_any_chunk_size(members: list[bytes], size: int) -> None:
    assert await read(b"".join(map(gzip.compress, members)), size) == b"".join(members)


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_gzip_broken_anywhere_is_refused(size: int) -> None:
    packed = gzip.compress(b"spans of an agent" * 5)
    broken = [packed[:end] for end in range(1, len(packed))]
    broken += [packed + b"x", packed + packed[:-1], packed[:-8] + b"\0" * 8, gzip.compress(b"") + b"\0"]
    for body in broken:
        with pytest.raises(Problem) as caught:
            await read(body, size)
        assert caught.value.status_code == 400
