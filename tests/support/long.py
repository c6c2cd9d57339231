"""Two lengths of a test: `make test-long` trains until a policy has learned, `make test` until every hand-off was made.

That a policy learns is proven in `make test`, too, by the tests that use nothing of this module.
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
