"""How fast this machine is right now: the CPU time of a piece of work that is always the same.

A core of a shared host may run at half its speed for seconds, when somebody else's thread shares it; CPU time then
grows as wall time does, though nothing of ours changed.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

INTERVAL_SECONDS = 0.5


def work_seconds(numbers: int = 2**20) -> float:
    """CPU seconds of this thread for adding up so many numbers."""
    began = time.thread_time()
    sum(range(numbers))
    return time.thread_time() - began


@contextmanager
def watched() -> Iterator[list[float]]:
    """CPU milliseconds of adding up a million numbers, on every core in turn while the block lasts: the list grows.

    It takes each core less than a thousandth of its time.
    """
    found: list[float] = []
    ended = threading.Event()

    def watch() -> None:
        while True:
            for core in cores:
                os.sched_setaffinity(0, {core})
                # The first brings the core's caches back; it is over before another thread's turn.
                work_seconds(2**10)
                found.append(work_seconds(2**13) * 2**7 * 1000)
            if ended.wait(INTERVAL_SECONDS):
                return

    cores = sorted(os.sched_getaffinity(0))
    watcher = threading.Thread(target=watch, name="machine-speed")
    watcher.start()
    try:
        yield found
    finally:
        ended.set()
        watcher.join()
