"""OTLP bodies, protobuf and JSON, into plain spans and log records; nothing here knows what an attribute means.

JSON is read as the OTLP specification has it (ids in hex, 64-bit integers as texts or numbers, unknown fields ignored),
which `google.protobuf.json_format` does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

from google.protobuf.message import DecodeError
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from leyden.services.collector.wire import MAX_RECORDS, BadBody, TooMany, loads, scoped_records

MAX_DEPTH = 8
"""Nesting kept of lists and maps inside an attribute."""
MAX_ITEMS = 1000
"""Attributes or events looked at of one span, and items of one list: what is said beyond is not kept anyway."""
STATUS_ERROR = 2
STATUS_OK = 1

Attributes = dict[str, Any]
_T = TypeVar("_T")


@dataclass(slots=True)
class WireEvent:
    """A span event, or a log record seen as one. `time_ns`: nanoseconds since the epoch; 0 where it has none."""

    name: str
    attributes: Attributes
    time_ns: int = 0


@dataclass(slots=True)
class WireSpan:
    """A span as sent: ids in lower-case hex of whatever length, times in nanoseconds since the epoch."""

    trace_id: str
    span_id: str
    parent_span_id: str
    name: str
    start_ns: int
    end_ns: int
    status_code: int
    scope: str
    attributes: Attributes
    events: list[WireEvent] = field(default_factory=list)


@dataclass(slots=True)
class WireLog:
    """A log record as sent."""

    trace_id: str
    span_id: str
    event: WireEvent


def spans_from_protobuf(body: bytes) -> Iterator[WireSpan]:
    """The spans of an ExportTraceServiceRequest, in order; one at a time is held in memory.

    Raises: BadBody: not such a message; TooMany: more than `MAX_RECORDS`
    """
    for scope, data in scoped_records(body):
        span = _parse(Span, data)
        yield WireSpan(
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent_span_id=span.parent_span_id.hex(),
            name=span.name,
            start_ns=span.start_time_unix_nano,
            end_ns=span.end_time_unix_nano,
            status_code=span.status.code,
            scope=scope,
            attributes=_protobuf_attributes(span.attributes),
            events=[
                WireEvent(event.name, _protobuf_attributes(event.attributes), event.time_unix_nano)
                for event in islice(span.events, MAX_ITEMS)
            ],
        )


def logs_from_protobuf(body: bytes) -> Iterator[WireLog]:
    """The records of an ExportLogsServiceRequest, in order; one at a time is held in memory.

    Raises: BadBody: not such a message; TooMany: more than `MAX_RECORDS`
    """
    for _, data in scoped_records(body):
        record = _parse(LogRecord, data)
        yield WireLog(
            trace_id=record.trace_id.hex(),
            span_id=record.span_id.hex(),
            event=WireEvent(
                record.event_name,
                _protobuf_attributes(record.attributes),
                record.time_unix_nano or record.observed_time_unix_nano,
            ),
        )


def spans_from_json(body: bytes) -> list[WireSpan]:
    """The spans of an ExportTraceServiceRequest in OTLP's JSON, in order.

    Raises: BadBody: not such a document; TooMany: more than `MAX_RECORDS`
    """
    return _walk(lambda: [_json_span(span, scope) for scope, span in _json_items(loads(body), "Spans", "spans")])


def logs_from_json(body: bytes) -> list[WireLog]:
    """The records of an ExportLogsServiceRequest in OTLP's JSON, in order.

    Raises: BadBody: not such a document; TooMany: more than `MAX_RECORDS`
    """
    return _walk(lambda: [_json_log(record) for _, record in _json_items(loads(body), "Logs", "logRecords")])


def _parse(kind: Any, body: bytes) -> Any:
    try:
        return kind.FromString(body)
    except DecodeError as error:
        raise BadBody(f"not an {kind.DESCRIPTOR.name}: {error}") from error


def _protobuf_attributes(pairs: Iterable[Any]) -> Attributes:
    return _nested(pairs, 0)


def _protobuf_value(value: Any, depth: int) -> Any:
    kind = value.WhichOneof("value")
    if kind == "string_value":
        return value.string_value
    if kind is None or depth >= MAX_DEPTH:
        return None
    if kind == "array_value":
        return [_protobuf_value(item, depth + 1) for item in islice(value.array_value.values, MAX_ITEMS)]
    if kind == "kvlist_value":
        return _nested(value.kvlist_value.values, depth + 1)
    if kind == "bytes_value":
        return value.bytes_value.hex()
    return getattr(value, kind)


def _nested(pairs: Iterable[Any], depth: int) -> Attributes:
    return {pair.key: _protobuf_value(pair.value, depth) for pair in islice(pairs, MAX_ITEMS)}


def _walk(read: Callable[[], _T]) -> _T:
    try:
        return read()
    except (AttributeError, TypeError, ValueError, KeyError, RecursionError) as error:
        raise BadBody(f"not an OTLP document: {type(error).__name__}: {error}") from error


def _json_items(document: Mapping[str, Any], noun: str, items: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    seen = 0
    for resource in document.get(f"resource{noun}") or ():
        for scoped in resource.get(f"scope{noun}") or ():
            scope = (scoped.get("scope") or {}).get("name") or ""
            for item in scoped.get(items) or ():
                seen += 1
                if seen > MAX_RECORDS:
                    raise TooMany
                yield str(scope), item


def _json_span(span: Mapping[str, Any], scope: str) -> WireSpan:
    return WireSpan(
        trace_id=_hex(span, "traceId"),
        span_id=_hex(span, "spanId"),
        parent_span_id=_hex(span, "parentSpanId"),
        name=str(span.get("name") or ""),
        start_ns=int(span.get("startTimeUnixNano") or 0),
        end_ns=int(span.get("endTimeUnixNano") or 0),
        status_code=int((span.get("status") or {}).get("code") or 0),
        scope=scope,
        attributes=_json_attributes(span.get("attributes")),
        events=[_json_event(event, "name", "timeUnixNano") for event in islice(span.get("events") or (), MAX_ITEMS)],
    )


def _json_log(record: Mapping[str, Any]) -> WireLog:
    return WireLog(
        trace_id=_hex(record, "traceId"),
        span_id=_hex(record, "spanId"),
        event=_json_event(record, "eventName", "timeUnixNano", "observedTimeUnixNano"),
    )


def _json_event(event: Mapping[str, Any], name: str, *times: str) -> WireEvent:
    time_ns = next((int(event[one]) for one in times if int(event.get(one) or 0)), 0)
    return WireEvent(str(event.get(name) or ""), _json_attributes(event.get("attributes")), time_ns)


def _int64(content: object) -> int:
    number = int(str(content))
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"intValue {str(content)[:30]} exceeds 64 bits")
    return number


def _hex(item: Mapping[str, Any], name: str) -> str:
    text = str(item.get(name) or "").lower()
    try:
        # It passes over spaces.
        is_hex = bytes.fromhex(text).hex() == text
    except ValueError:
        is_hex = False
    # An id that is no hex is the sender's, span by span: an empty one is refused with its span alone.
    return text if is_hex else ""


def _json_attributes(pairs: Iterable[Mapping[str, Any]] | None) -> Attributes:
    return {str(pair["key"]): _json_value(pair.get("value"), 0) for pair in islice(pairs or (), MAX_ITEMS)}


def _json_value(value: Mapping[str, Any] | None, depth: int) -> Any:
    if not value or depth >= MAX_DEPTH:
        return None
    kind, content = next(iter(value.items()))
    if kind == "intValue":
        return _int64(content)
    if kind == "boolValue":
        return content is True
    if kind == "doubleValue":
        return float(content)
    if kind == "arrayValue":
        return [_json_value(item, depth + 1) for item in islice(content.get("values") or (), MAX_ITEMS)]
    if kind == "kvlistValue":
        pairs = islice(content.get("values") or (), MAX_ITEMS)
        return {str(pair["key"]): _json_value(pair.get("value"), depth + 1) for pair in pairs}
    # Texts and base64; what a future kind may hold is kept as its spelling.
    return content if isinstance(content, str) else str(content)
