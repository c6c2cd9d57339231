"""What a process holds once it has started: less, and nothing that the garbage collector has to look at."""

from __future__ import annotations

import ctypes
import gc

COLLECT_AFTER_OBJECTS = 20_000
"""More objects than a request makes and drops: Python's 700 are passed several times by every long answer, and every
hundredth time all that lives is looked at, for milliseconds in which nobody is served."""

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def freeze_heap() -> None:
    """Ends a start: what there is by now is there to stay, and the garbage collector, which may have been off, skips
    it from here on, and looks seldom: nearly all that a request leaves behind has no cycles and is gone at once."""
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER_OBJECTS, 10, 10)
    gc.enable()
    trim_malloc()


def trim_malloc() -> None:
    """Returns to the system what was freed: of a tokenizer's or a model's reading some tens of megabytes that glibc
    would keep. Elsewhere nothing happens."""
    if _trim is not None:
        _trim(0)
