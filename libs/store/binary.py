"""Rows as `COPY … (FORMAT BINARY)` takes them; the format is described with COPY in Postgres' manual.

psycopg would write a row into one buffer, and cut what is long into copies that it waits for one by one. Here long
values go to libpq from where they are, which is a quarter of what a row of half a megabyte costs.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

HEADER = b"PGCOPY\n\xff\r\n\0" + bytes(8)
"""Before the first row."""
TRAILER = b"\xff\xff"
"""After the last row."""
LONG_BYTES = 8192
"""A value from this length on is a piece of its own."""

Piece = bytes | memoryview

_length = struct.Struct(">i").pack
_columns = struct.Struct(">h").pack
_NULL = _length(-1)
_DATA: dict[str, Callable[[Any], Piece]] = {
    "text": lambda text: text.encode(),
    "bytea": lambda data: data,
    "jsonb": lambda text: text,
    "bool": struct.Struct(">?").pack,
    "int4": struct.Struct(">i").pack,
    "int8": struct.Struct(">q").pack,
    "float8": struct.Struct(">d").pack,
}
# The version of the format in which a JSON text follows.
_BEFORE = {"jsonb": b"\x01"}


def row_pieces(values: Sequence[object], types: Sequence[str]) -> Iterator[Piece]:
    """A row that follows others or the header.

    Args: types: of the columns, in Postgres' words; values: None for NULL, JSON as its text in UTF-8
    Raises: ValueError: a value is out of its type's range, or a text holds half of a surrogate pair
    """
    short: list[Piece] = [_columns(len(values))]
    for value, kind in zip(values, types, strict=True):
        if value is None:
            short.append(_NULL)
            continue
        try:
            data, before = _DATA[kind](value), _BEFORE.get(kind, b"")
        except struct.error as error:
            raise ValueError(f"{value!r} is no {kind}") from error
        short += [_length(len(before) + len(data)), before]
        if len(data) < LONG_BYTES:
            short.append(data)
            continue
        yield b"".join(short)
        yield data
        short = []
    yield b"".join(short)
