"""An OTLP request taken apart into its spans or log records before any of it is parsed.

Parsed whole, 4 MiB of empty spans take 850 MiB of memory; one record at a time costs no more than the largest one.
Spans and logs share their outer shape: the request holds resources (field 1), a resource holds scopes (field 2), and a
scope its own name (field 1) and the records (field 2).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import orjson
from google.protobuf.message import DecodeError
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope

MAX_RECORDS = 20_000
"""About as many records are taken of one request; exporters send 512."""
MAX_RECORD_BYTES = 8 * 2**20
"""A parsed record takes up to thirty times its size; a larger one is left out, and the others stay."""

# Whole pairs and doubled backslashes first, so that what is left of surrogates are halves.
_ESCAPE = re.compile(rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[^u])")
_HALF = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class BadBody(Exception):
    """The body is not what its content type says; the message tells where."""


class TooMany(Exception):
    """The body holds more records than one request may bring."""

    def __init__(self) -> None:
        super().__init__(f"the request holds more than about {MAX_RECORDS} records: send smaller batches")


def scoped_records(body: bytes) -> Iterator[tuple[str, bytes]]:
    """The name of its scope and the bytes of each record, in order; no bytes for a record that is too large.

    Raises: BadBody: no protobuf; TooMany
    """
    # A scope is walked twice, for its name and for its records, and every message may hold fields of other kinds.
    steps = iter(range(4 * MAX_RECORDS))
    for resource in _fields(memoryview(body), 1, steps):
        for scope in _fields(resource, 2, steps):
            name = ""
            for described in _fields(scope, 1, steps):
                name = _scope_name(described)
            for record in _fields(scope, 2, steps):
                yield name, _bounded(record)


def _bounded(record: memoryview) -> bytes:
    return b"" if len(record) > MAX_RECORD_BYTES else bytes(record)


def _scope_name(described: memoryview) -> str:
    try:
        return str(InstrumentationScope.FromString(_bounded(described)).name)
    except DecodeError as error:
        raise BadBody(f"not an InstrumentationScope: {error}") from error


def _fields(message: memoryview, number: int, steps: Iterator[int]) -> Iterator[memoryview]:
    """The values of a message's field that holds messages; other fields are passed over, a step each."""
    at = 0
    while at < len(message):
        if next(steps, None) is None:
            raise TooMany
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == _BYTES:
            size, at = _varint(message, at)
            if tag >> 3 == number and at + size <= len(message):
                yield message[at : at + size]
            at += size
        elif kind == _VARINT:
            _, at = _varint(message, at)
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        else:
            raise BadBody(f"not protobuf: wire type {kind} at byte {at}")
        if at > len(message) or tag >> 3 == 0:
            raise BadBody("not protobuf: a field ends behind its message")


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            raise BadBody("not protobuf: the message ends in the middle of a number")
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise BadBody("not protobuf: a number of more than ten bytes")


def loads(body: bytes) -> Any:
    """Parses a client's JSON; half of a surrogate pair, where JavaScript has cut a text, is U+FFFD. Raises: BadBody"""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        repaired = _ESCAPE.sub(_without_half, body)
        if repaired == body:
            raise BadBody(f"not JSON: {error}") from error
    try:
        return orjson.loads(repaired)
    except orjson.JSONDecodeError as error:
        raise BadBody(f"not JSON: {error}") from error


def _without_half(escape: re.Match[bytes]) -> bytes:
    return b"\\ufffd" if _HALF.fullmatch(escape[0]) else escape[0]
