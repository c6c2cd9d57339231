"""Two lengths of the tests: `make test` makes every hand-off, `make test-long` trains until a policy has learned.

Tests that take minutes, and prove what a test of `make test` proves in another way, run in `make test-long` alone.
That a policy learns, and that kills lose nothing, is proven in both.
"""

from __future__ import annotations

import os

import pytest

LONG = "TEST_LONG" in os.environ
"""Whether this is `make test-long`."""

long_only = pytest.mark.skipif(not LONG, reason="make test-long runs it: it takes minutes")


def steps(long: int, short: int = 3) -> int:
    """The steps of a training: `long` lets a policy learn, `short` makes each of its hand-offs several times."""
    return long if LONG else short
