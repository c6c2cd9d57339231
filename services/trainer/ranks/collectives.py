"""Collectives of the processes of one trainer. Rank 0 leads: it sends each message to all other ranks, and does itself
what the message says.

Inside a message all ranks call the same collectives in the same order. A trainer of one process is rank 0 of 1: it has
no process group and sends nothing.
"""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from enum import Enum
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from leyden.libs.telemetry import logger

log = logger()
Item = TypeVar("Item")

WAIT_SECONDS = 5.0
"""Longest time between two messages: a follower that waits for one must not take rank 0 for dead."""
STOP_KEY = "stop"
PR_SET_PDEATHSIG = 1


class RankFailed(Exception):
    """Another process of this trainer could not do its part, and lives."""


class RankLost(RuntimeError):
    """Another process of this trainer died, or did not answer in time."""


class _Control(Enum):
    """Words between messages."""

    WAIT = "wait"
    LEAVE = "leave"


class Ranks:
    """This process's place among the trainer's processes, and what they say to each other.

    Args: rank, size: this process and the number of all; store: `torchrun`'s key-value store, None for one process;
        timeout_seconds: bound on one collective; background: the group of the threads that write checkpoints; copies:
        of the model, each divided among so many consecutive processes

    Every method raises RankLost if another process is gone or silent.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        store: Store | None = None,
        timeout_seconds: float = 600.0,
        background: dist.ProcessGroup | None = None,
        copies: int = 1,
    ) -> None:
        self.rank, self.size, self._store, self._timeout = rank, size, store, timeout_seconds
        self.background, self.copies = background, copies
        self._lock = threading.Lock()
        self._beat_seconds = min(WAIT_SECONDS, timeout_seconds / 4)

    @contextmanager
    def sending(self, message: object) -> Iterator[None]:
        """Rank 0 sends a message and does inside the block what it says."""
        with self._lock:
            if self.size > 1:
                with self.answering():
                    dist.broadcast_object_list([message], src=0)
            yield

    def wait(self, is_done: Callable[[float], bool]) -> None:
        """Waits until `is_done` returns True on every rank. All ranks call it.

        Args:   is_done: waits at most so many seconds, and returns whether there is nothing left to wait for
        Raises: RankFailed: it raised on another rank
        """
        waits = True
        while waits:
            with self.agreeing_on(RankFailed):
                waits = not is_done(self._beat_seconds)
            waits = self.any(waits)

    def receive(self) -> object:
        """Rank 0's next message; None once the trainer ends."""
        box: list[object] = [_Control.WAIT]
        while box[0] is _Control.WAIT:
            with self.answering():
                dist.broadcast_object_list(box, src=0)
        return None if box[0] is _Control.LEAVE else box[0]

    @contextmanager
    def beating(self, stop: Callable[[], object]) -> Iterator[None]:
        """Rank 0 shows that it lives between its messages, and ends the trainer after the block unless that raises.

        Args:   stop: called, from another thread, once another rank wants to stop or is lost
        Raises: RankLost: at the end of the block
        """
        if self.size == 1:
            yield
            return
        over, lost = threading.Event(), list[RankLost]()

        def beat() -> None:
            try:
                while not over.wait(self._beat_seconds):
                    with self.sending(_Control.WAIT):
                        pass
                    if self._stop_announced():
                        stop()
            except RankLost as error:
                lost.append(error)
                stop()

        # A daemon: a process that ends with an error does not wait for a collective.
        thread = threading.Thread(target=beat, name="beat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
        thread.join()
        if lost:
            raise lost[0]
        with self.sending(_Control.LEAVE):
            self.close()

    def close(self) -> None:
        """Ends the process group; every rank does so at the end."""
        dist.destroy_process_group()

    def announce_stop(self) -> None:
        """Makes known to all ranks that this one was asked to stop."""
        if self._store is not None:
            with self.answering():
                self._store.set(STOP_KEY, "1")

    def _stop_announced(self) -> bool:
        with self.answering():
            return self._store is not None and self._store.check([STOP_KEY])

    def leaving(self, asked: bool) -> bool:
        """Whether any rank was asked to stop. All ranks call it."""
        if asked:
            self.announce_stop()
        return self.any(asked or self._stop_announced())

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank. All ranks call it."""
        if self.size == 1:
            return flag
        flags = torch.tensor([int(flag)])
        with self.answering():
            dist.all_reduce(flags, dist.ReduceOp.MAX)
        return bool(flags.item())

    def gather(self, own: Item) -> list[Item]:
        """Returns the value of each rank, by rank. All ranks call it."""
        found = [own] * self.size
        if self.size > 1:
            with self.answering():
                dist.all_gather_object(found, own)
        return found

    def add(self, values: Tensor) -> Tensor:
        """Replaces the values by their sums over all ranks, and returns them. All ranks call it."""
        if self.size > 1:
            with self.answering():
                dist.all_reduce(values)
        return values

    @contextmanager
    def agreeing_on(self, kind: type[Exception]) -> Iterator[None]:
        """Raises on all ranks if the block raises on any: its own error, or another rank's. All ranks call it.

        Raises: RankFailed: another rank's error is of another kind
        """
        own: Exception | None = None
        try:
            yield
        except Exception as error:
            if isinstance(error, MemoryError | RuntimeError) and not isinstance(error, kind):
                # The others may be inside another collective, which ends once this process does.
                raise
            # Raised below, after the collective that every rank takes part in.
            own = error
        shared = own if own is None or isinstance(own, kind) else RankFailed(f"rank {self.rank}: {own!r}")
        errors = self.gather(shared)
        if found := own or next(filter(None, errors), None):
            raise found

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Raises RankLost in place of the error of a collective."""
        try:
            yield
        except RuntimeError as error:
            raise RankLost(
                f"rank {self.rank} of {self.size}: another process of this trainer ended, or did not answer within"
                f" {self._timeout:g} s (TRAINER_RANK_TIMEOUT_SECONDS): {error}"
            ) from error


ALONE = Ranks()
"""A trainer of one process."""


def join_ranks(size: int, *, on_cpu: bool, timeout_seconds: float, copies: int = 1) -> Ranks:
    """Meets the trainer's other processes, as `torchrun`'s variables name them. Args: copies: of the model

    Control messages travel by gloo, gradients by the device's own library.
    """
    if size == 1:
        return ALONE
    # torchrun's workers must not outlive it: the controller kills it with SIGKILL.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    timeout = timedelta(seconds=timeout_seconds)
    store, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
    device = None if on_cpu else torch.accelerator.current_accelerator()
    backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}" if device else "gloo"
    group = PrefixStore("group", store)
    dist.init_process_group(backend, store=group, rank=rank, world_size=size, timeout=timeout)
    log.info("joined the trainer's processes", rank=rank, ranks=size, backend=backend)
    background = dist.new_group(backend="gloo", timeout=timeout)
    return Ranks(rank, size, PrefixStore("leyden", store), timeout_seconds, background, copies)
