"""What a process holds once it has started: less, and nothing that the garbage collector has to look at."""

from __future__ import annotations

import ctypes
import gc

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def settle() -> None:
    """Ends a start: what there is by now is there to stay, and the garbage collector, which may have been off, skips
    it from here on."""
    gc.freeze()
    gc.enable()
    give_back()


def give_back() -> None:
    """Returns to the system what was freed: of a tokenizer's or a model's reading some tens of megabytes that glibc
    would keep. Elsewhere nothing happens."""
    if _trim is not None:
        _trim(0)
