"""Keyset pages: a cursor holds the list and the sort key of the last row, so pages stay right while rows arrive."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TypeVar

from leyden.libs.contracts.api.body import Page

Row = TypeVar("Row")
Item = TypeVar("Item")
Key = tuple[str | int, ...]


class BadCursor(ValueError):
    """The cursor is not of this list; begin again without one."""


def encode_cursor(name: str, key: Sequence[str | int | datetime]) -> str:
    """An opaque cursor of the list with this name; it holds times to the microsecond."""
    plain = [name, *(part.isoformat() if isinstance(part, datetime) else part for part in key)]
    return base64.urlsafe_b64encode(json.dumps(plain, separators=(",", ":")).encode()).decode().rstrip("=")


def decode_cursor(cursor: str | None, name: str, *kinds: type) -> tuple[str | int | datetime, ...] | None:
    """The sort key inside a cursor, checked against the list's name and the kinds that the list sorts by.

    Raises: BadCursor: not one of ours, or of another list
    """
    if cursor is None:
        return None
    try:
        parts = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
        if parts[:1] != [name]:
            raise ValueError("a cursor of another list")
        return tuple(_part(part, kind) for part, kind in zip(parts[1:], kinds, strict=True))
    except (ValueError, TypeError, KeyError, RecursionError):
        raise BadCursor("cursor does not belong to this list: leave it out to begin at the first page") from None


def as_float(part: object) -> float:
    """A number that a cursor holds as a text, the infinities included.

    Raises: BadCursor
    """
    try:
        return float(str(part))
    except ValueError:
        raise BadCursor("cursor does not belong to this list: leave it out to begin at the first page") from None


def _part(part: object, kind: type) -> str | int | datetime:
    if kind is datetime and isinstance(part, str):
        return datetime.fromisoformat(part)
    if type(part) is kind and isinstance(part, str | int):
        # Raises for half of a surrogate pair, which Postgres cannot store.
        str(part).encode()
        return part
    raise TypeError(f"{part!r} is not a {kind.__name__}")


def page(
    name: str,
    rows: Sequence[Row],
    limit: int,
    item: Callable[[Row], Item],
    key: Callable[[Row], Sequence[str | int | datetime]],
) -> Page[Item]:
    """A page of the list with this name out of `limit + 1` rows: the extra row shows that there is another page."""
    shown = rows[:limit]
    more = len(rows) > limit
    return Page(items=[item(row) for row in shown], next_cursor=encode_cursor(name, key(shown[-1])) if more else None)
