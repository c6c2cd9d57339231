"""Keyset pages: a cursor holds the sort key of the last row seen, so that pages stay right while rows arrive."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TypeVar

from leyden.libs.contracts.api import Page

Row = TypeVar("Row")
Item = TypeVar("Item")
Key = tuple[str | int, ...]


class BadCursor(ValueError):
    """The cursor was not made by this list; the remedy is to begin again without one."""


def encode_cursor(key: Sequence[str | int | datetime]) -> str:
    """An opaque cursor; times are kept to the microsecond."""
    plain = [part.isoformat() if isinstance(part, datetime) else part for part in key]
    return base64.urlsafe_b64encode(json.dumps(plain, separators=(",", ":")).encode()).decode().rstrip("=")


def decode_cursor(cursor: str | None, *kinds: type) -> tuple[str | int | datetime, ...] | None:
    """The sort key inside a cursor, checked against the kinds that the list sorts by.

    Raises: BadCursor: not one of ours, or of another list
    """
    if cursor is None:
        return None
    try:
        parts = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
        return tuple(_part(part, kind) for part, kind in zip(parts, kinds, strict=True))
    except (ValueError, TypeError, RecursionError):
        raise BadCursor("cursor does not belong to this list: leave it out to begin at the first page") from None


def _part(part: object, kind: type) -> str | int | datetime:
    if kind is datetime and isinstance(part, str):
        return datetime.fromisoformat(part)
    if type(part) is kind and isinstance(part, str | int):
        # No cursor of ours holds half of a surrogate pair, which cannot be sent to Postgres.
        str(part).encode()
        return part
    raise TypeError(f"{part!r} is not a {kind.__name__}")


def page(
    rows: Sequence[Row],
    limit: int,
    item: Callable[[Row], Item],
    key: Callable[[Row], Sequence[str | int | datetime]],
) -> Page[Item]:
    """A page out of `limit + 1` rows: the extra one only tells that there is more."""
    shown = rows[:limit]
    more = len(rows) > limit
    return Page(items=[item(row) for row in shown], next_cursor=encode_cursor(key(shown[-1])) if more else None)
