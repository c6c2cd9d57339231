"""The tests of `make test-long`: they take minutes, most of them a training through kills until a policy has learned.

`make test` keeps a training that learns, kills of the services by themselves, and all that is known within seconds.
"""

from __future__ import annotations

import os

import pytest

LONG = "TEST_LONG" in os.environ
"""Whether this is `make test-long`."""

long_only = pytest.mark.skipif(not LONG, reason="make test-long runs it: it takes minutes")
