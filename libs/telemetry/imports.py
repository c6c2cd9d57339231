"""Keeps the process from loading what it never uses."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

_PACKAGES = ("rich", "pygments")


@contextmanager
def without_rich() -> Iterator[None]:
    """Imports of rich and pygments fail inside the block, unless the process has loaded them before.

    structlog and httpx load them for people at a terminal, and do without them where the import fails.
    """
    # Why: with both a service takes 4 MB more, and 0.1 s of CPU time more to start.
    hidden = [name for name in _PACKAGES if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # Python refuses to import it
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
