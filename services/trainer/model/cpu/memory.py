"""glibc's malloc retains freed memory between steps."""

from __future__ import annotations

import ctypes

# <malloc.h>
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8


def retain_freed_memory() -> None:
    """Makes malloc hand freed blocks out again instead of returning them to the kernel. Call before threads start.

    Why: the kernel hands large blocks out page by page, zeroed, which took up to a third of a step's CPU time on
    SmolLM2-135M (9.2 s a step; this takes 6.6). A step asks for the same sizes again and again, so its peak hardly
    changes. Another C library than glibc is left alone.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "gnu_get_libc_version"):
        for option, value in ((_ARENA_MAX, 1), (_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1)):
            library.mallopt(option, value)
