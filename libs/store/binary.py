"""Values as Postgres takes them without reading text, and rows of them for COPY, as its manual describes the format.

psycopg finds out anew for every statement how each value is sent, which takes as long as all else together; a long row
it writes into one buffer, and cuts into copies that it waits for one by one. Here types are known beforehand, and long
values go to libpq from where they are.
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
    "json": lambda text: text,
    "jsonb": lambda text: text,
    "bool": struct.Struct(">?").pack,
    "int4": struct.Struct(">i").pack,
    "int8": struct.Struct(">q").pack,
    "float8": struct.Struct(">d").pack,
}
# The version of the format in which a JSON text follows.
_BEFORE = {"jsonb": b"\x01"}


def formats(types: Sequence[str]) -> list[int]:
    """How `encoded` gives values of these types, in libpq's numbers: JSON as text, which is the shorter way for it."""
    return [int(kind not in _BEFORE) for kind in types]


def encoded(value: object, kind: str) -> Piece | None:
    """A value of a type in Postgres' words; None is NULL, JSON is given as its text in UTF-8.

    Raises: ValueError: it is out of the type's range, or holds half of a surrogate pair
    """
    if value is None:
        return None
    try:
        return _DATA[kind](value)
    except struct.error as error:
        raise ValueError(f"{value!r} is no {kind}") from error


def row_pieces(values: Sequence[object], types: Sequence[str]) -> Iterator[Piece]:
    """A row for COPY that follows others or the header.

    Args: values, types: as for `encoded`
    Raises: ValueError: as `encoded`
    """
    short: list[Piece] = [_columns(len(values))]
    for value, kind in zip(values, types, strict=True):
        data = encoded(value, kind)
        if data is None:
            short.append(_NULL)
            continue
        before = _BEFORE.get(kind, b"")
        short += [_length(len(before) + len(data)), before]
        if len(data) < LONG_BYTES:
            short.append(data)
            continue
        yield b"".join(short)
        yield data
        short = []
    yield b"".join(short)
