"""Fresh workspaces for the programs of a place: made in a thread, with a copied folder, and removed at the end."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from leyden.libs.sandbox.place import Place
from leyden.libs.sandbox.program import Program
from leyden.libs.sandbox.supervisors import ProgramError
from leyden.libs.sandbox.workspace import AgentFolder, MoreFiles, Workspace, Workspaces, remove_tree


class FreshWorkspaces:
    """Makes the workspaces of one process.

    Args: hidden: real paths of the platform's folders, of which nothing is copied
    """

    def __init__(self, place: Place, workspaces: Workspaces, hidden: Sequence[str]) -> None:
        self._place = place
        self._workspaces = workspaces
        self._hidden = hidden

    @asynccontextmanager
    async def of(self, program: Program, uid: int | None) -> AsyncIterator[Workspace]:
        """A workspace for as long as the program needs it. Cancelling ends a copy early and leaves nothing.

        Args: uid: the user and group of its owner; None for this process's user
        Raises: ProgramError: it could not be made
        """
        stop = threading.Event()
        making = asyncio.ensure_future(asyncio.to_thread(self._make, program, uid, stop))
        try:
            workspace = await asyncio.shield(making)
        except asyncio.CancelledError:
            stop.set()
            await asyncio.wait([making])
            if making.exception() is None:
                await asyncio.shield(asyncio.to_thread(remove_tree, making.result().root))
            raise
        except OSError as error:
            raise ProgramError(f"the working folder could not be made: {error}") from error
        try:
            yield workspace
        finally:
            await asyncio.shield(asyncio.to_thread(remove_tree, workspace.root))

    def _make(self, program: Program, uid: int | None, stop: threading.Event) -> Workspace:
        make = self._workspaces.make
        files = MoreFiles(program.document_name, program.result, program.files)
        if program.directory is None:
            return make(program.name, program.document, None, uid, files)
        field = self._place.names.directory
        # Opened before the check of its path, so that nobody can exchange it in between.
        try:
            descriptor = os.open(program.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK)
        except OSError as error:
            message = f"{field} {program.directory} cannot be opened ({error.strerror}): correct its path"
            raise OSError(message) from error
        try:
            self._check_directory(Path(f"/proc/self/fd/{descriptor}").readlink())
            folder = AgentFolder(descriptor, self._place.max_directory_bytes, stop, self._place.names)
            return make(program.name, program.document, folder, uid, files)
        finally:
            os.close(descriptor)

    def _check_directory(self, folder: Path) -> None:
        """Raises: PermissionError: the service, perhaps root, may not copy this folder for a program"""
        names = self._place.names
        if any(folder.is_relative_to(path) or Path(path).is_relative_to(folder) for path in self._hidden):
            raise PermissionError(
                f"{folder} belongs to the platform: keep the {names.program}'s files in another folder"
            )
        if not any(folder.is_relative_to(os.path.realpath(root)) for root in self._place.roots):
            roots = ", ".join(map(str, self._place.roots)) or "none"
            raise PermissionError(
                f"{names.directory} {folder} lies in no folder of {names.setting('ROOTS')} ({roots}): move it there, or"
                f" name the folder of your {names.program}s to the platform ({names.remedy})"
            )
