"""Weights that come: read while others serve, and what is in flight computed by them, until an update takes them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from leyden.services.engine.ahead import Ahead
from leyden.services.engine.model import Model
from leyden.services.engine.scheduler import Scheduler
from leyden.services.engine.weights import FileMarks, file_marks

AHEAD_SECONDS = 60.0
"""How long new weights wait at most for what is in flight to be computed by them; then the change itself holds it."""


@dataclass(frozen=True)
class Prepared:
    """A model whose weights were read ahead of the update to them.

    Args: files: the folder's weight files as they were before they were read
    """

    folder: Path
    files: FileMarks
    model: Model

    def are(self, folder: Path) -> bool:
        """Whether they are those in this folder: the files are the same, or the folder was pruned.

        A version that is made again has its folder replaced.
        """
        return self.folder == folder and (not folder.exists() or self.files == file_marks(folder))


@dataclass(frozen=True)
class Preparation:
    """The work for weights that come, under way or done; whoever asks for the same ones waits for the same work."""

    folder: Path
    files: FileMarks
    work: asyncio.Task[None]

    def is_under_way(self, folder: Path, files: FileMarks) -> bool:
        """Whether it is for the weights in this folder as they are now."""
        return (self.folder, self.files) == (folder, files) and not self.work.done()


class Coming:
    """The weights prepared last, and the work for those asked for last.

    Args: load: reads a folder's weights; compute: runs a slice between two steps, on the engine's thread
    """

    def __init__(
        self,
        scheduler: Scheduler,
        load: Callable[[Path], Model],
        compute: Callable[[Callable[[], bool]], Awaitable[bool]],
    ) -> None:
        self._scheduler, self._load, self._compute = scheduler, load, compute
        self._prepared: Prepared | None = None
        self._preparation: Preparation | None = None

    def stop(self) -> None:
        """Gives up what is under way."""
        if self._preparation is not None:
            self._preparation.work.cancel()

    async def prepare(self, folder: Path, *, compute_ahead: bool) -> None:
        """Reads weights beside serving, so that an update is one exchange. The last ones prepared are kept.

        A repeat waits for the work under way; other weights are read once it has ended.

        Args:    compute_ahead: compute by them what is in flight, too

        Raises:  WeightsRefused: nothing was changed
        """
        files = await asyncio.to_thread(file_marks, folder)
        if self._preparation is None or not self._preparation.is_under_way(folder, files):
            work = asyncio.create_task(
                self._prepare(folder, files, compute_ahead, self._preparation), name="preparation"
            )
            self._preparation = Preparation(folder, files, work)
        # Shielded: who asked first may have gone.
        await asyncio.shield(self._preparation.work)

    async def _prepare(self, folder: Path, files: FileMarks, compute_ahead: bool, replaced: Preparation | None) -> None:
        prepared = self._prepared
        if prepared is None or (prepared.folder, prepared.files) != (folder, files):
            # Of weights that are prepared, one set at a time is in memory: what was asked for before ends first.
            prepared = self._prepared = None
        if replaced is not None:
            await asyncio.wait({replaced.work})
        # What failed in it would hold its weights.
        del replaced
        if self._is_replaced():
            return
        if prepared is None:
            model = await asyncio.to_thread(self._load, folder)
            if self._is_replaced():
                return
            prepared = self._prepared = Prepared(folder, files, model)
        if compute_ahead:
            await self._compute_ahead(prepared)

    def _is_replaced(self) -> bool:
        """Whether other weights were asked for since this preparation began."""
        return self._preparation is None or self._preparation.work is not asyncio.current_task()

    async def _compute_ahead(self, prepared: Prepared) -> None:
        ahead = Ahead(self._scheduler, prepared.model)
        # Until the update, or other weights that are prepared.
        until = time.monotonic() + AHEAD_SECONDS
        try:
            is_worth_more = True
            while is_worth_more and self._prepared is prepared and time.monotonic() < until:
                is_worth_more = await self._compute(ahead.advance)
        except Exception:
            # What it left in the cache may be half written: no other model finds it there.
            self._prepared = None if self._prepared is prepared else self._prepared
            raise

    def take(self, folder: Path) -> Model:
        """The weights in a folder, to be served from now on: those prepared, where they are the folder's, or read now.

        Raises:  WeightsRefused: they cannot be read
        """
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared.are(folder):
            return prepared.model
        # Its memory goes before others take theirs.
        del prepared
        return self._load(folder)
