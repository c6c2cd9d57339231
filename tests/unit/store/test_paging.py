"""Cursors come back as they went, and only to their own list."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from leyden.libs.store.paging import BadCursor, decode_cursor, encode_cursor, page


def test_a_cursor_keeps_times_to_the_microsecond() -> None:
    moment = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
    assert decode_cursor(encode_cursor((moment, "id", 7)), datetime, str, int) == (moment, "id", 7)
    assert decode_cursor(None, int) is None


@pytest.mark.parametrize("cursor", ["", "x", "é", encode_cursor((1,)), encode_cursor(("a", "b")), encode_cursor(())])
def test_a_cursor_of_another_list_is_refused(cursor: str) -> None:
    with pytest.raises(BadCursor, match="first page"):
        decode_cursor(cursor, str)


def test_the_row_beyond_a_page_only_tells_that_there_is_more() -> None:
    full = page([1, 2, 3], 2, str, lambda row: (row,))
    assert (full.items, full.next_cursor) == (["1", "2"], encode_cursor((2,)))
    assert page([1, 2], 2, str, lambda row: (row,)).next_cursor is None
