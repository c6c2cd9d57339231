"""A cursor is decoded unchanged, and only for its own list."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from leyden.libs.store.read.paging import BadCursor, decode_cursor, encode_cursor, page


def test_a_cursor_preserves_microseconds() -> None:
    moment = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
    assert decode_cursor(encode_cursor("runs", (moment, "id", 7)), "runs", datetime, str, int) == (moment, "id", 7)
    assert decode_cursor(None, "runs", int) is None


@pytest.mark.parametrize(
    "cursor",
    [
        "",
        "x",
        "é",
        "e30",  # {}
        encode_cursor("tasks", ("a",)),
        encode_cursor("runs", (1,)),
        encode_cursor("runs", ("a", "b")),
        encode_cursor("runs", ()),
    ],
)
def test_a_cursor_of_another_list_is_refused(cursor: str) -> None:
    with pytest.raises(BadCursor, match="first page"):
        decode_cursor(cursor, "runs", str)


def test_the_row_beyond_a_page_only_signals_a_next_page() -> None:
    full = page("runs", [1, 2, 3], 2, str, lambda row: (row,))
    assert (full.items, full.next_cursor) == (["1", "2"], encode_cursor("runs", (2,)))
    assert page("runs", [1, 2], 2, str, lambda row: (row,)).next_cursor is None
