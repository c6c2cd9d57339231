"""Freed memory goes back to the system."""

from __future__ import annotations

import sys

import psutil
import pytest

from leyden.libs.service.memory import return_freed_memory

PIECE_BYTES, PIECES = 50_000, 4_000


@pytest.mark.skipif(sys.platform != "linux", reason="other C libraries return it themselves, or never")
def test_freed_memory_below_a_piece_in_use_is_returned() -> None:
    process = psutil.Process()
    pieces = [bytes(PIECE_BYTES) for _ in range(PIECES)]
    # Memory above this one could not shrink the heap.
    last = bytes(PIECE_BYTES)
    del pieces
    kept = process.memory_info().rss
    return_freed_memory()
    assert len(last) == PIECE_BYTES
    assert kept - process.memory_info().rss > PIECE_BYTES * PIECES / 2
