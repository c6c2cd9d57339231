"""W&B's files of offline runs: a run of W&B for each run, with the run's id, which `wandb sync` uploads.

Reads: the files of the processes before, which are records with a length and a checksum, in blocks. Writes: through the
library, whose own process appends each row to a file; a killed writer leaves whole rows and perhaps a torn one at the
file's end. The next writer begins another file of the same run with what is missing, and `wandb sync` uploads the files
of a run one after the other.

W&B's own step must grow, and an evaluation of an older version comes late: the step is a column of each row, and the
axis of every curve.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import struct
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import wandb
from wandb.proto.wandb_internal_pb2 import Record

from leyden.libs.trackers.destination import Point, Subject, TrackerError

STEP = "step"
HEADER = b":W&B\xe1\xbe\x00"
BLOCK = 32_768
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4
FAILED = frozenset({"failed", "cancelled"})
FLUSH_SECONDS = 120.0


class WandB:
    """One project. The files lie in the folder `wandb` below WANDB_DIR, or below the present one."""

    def __init__(self, project: str) -> None:
        if not re.fullmatch(r"[\w.-]{1,128}", project, re.ASCII):
            raise TrackerError(
                f"W&B takes no project {project!r}: name one of letters, digits and _-. with --to wandb:PROJECT"
            )
        self._project = project
        self._folder = Path(os.environ.get("WANDB_DIR", ".")).absolute()

    def open(self, subject: Subject) -> WandBLog:
        """The run of W&B with the subject's id; it is there from the first point on."""
        return WandBLog(self._project, subject, self._folder)


class WandBLog:
    """One run of W&B, locked while it is open."""

    def __init__(self, project: str, subject: Subject, folder: Path) -> None:
        self._project, self._subject, self._folder = project, subject, folder
        (folder / "wandb").mkdir(parents=True, exist_ok=True)
        self._lock = (folder / "wandb" / f".leyden.{subject.id}.lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise TrackerError(f"another process writes {subject.id} into {folder}: end it, or set WANDB_DIR") from None
        self._run: Any = None
        self._await_end_of_writers()
        self.written = {key for path in self._files() for row in rows(path) for key in _keys(row)}

    def _await_end_of_writers(self) -> None:
        """Waits for W&B's own process, which writes on for a moment where ours was killed. Raises: TrackerError"""
        deadline = time.monotonic() + FLUSH_SECONDS
        while any(_is_written(path) for path in self._files()):
            if time.monotonic() > deadline:
                self._lock.close()
                raise TrackerError(f"another process writes {self._subject.id}: end it, or set WANDB_DIR")
            time.sleep(0.05)

    def _files(self) -> list[Path]:
        return sorted((self._folder / "wandb").glob(f"*run-*-{self._subject.id}/run-{self._subject.id}.wandb"))

    def write(self, points: Sequence[Point]) -> None:
        """One row for each step. Returns when they are in the file."""
        by_step: dict[int, list[Point]] = defaultdict(list)
        for point in points:
            by_step[point.step].append(point)
        run = self._open_run()
        for step, together in sorted(by_step.items()):
            moment = max(point.time for point in together)
            run.log({STEP: step, "_timestamp": moment} | {point.name: point.value for point in together})
        self._await({point.key for point in points})
        self.written |= {point.key for point in points}

    def _open_run(self) -> Any:
        if self._run is None:
            # Nothing of this process belongs to the run: neither its output, its machine nor its code.
            settings = wandb.Settings(
                silent=True, console="off", disable_git=True, disable_code=True, x_disable_stats=True,
                x_disable_meta=True, x_disable_machine_info=True, x_save_requirements=False,
                x_transaction_log_flush_interval=0.1,
            )  # fmt: skip
            self._run = wandb.init(
                id=self._subject.id, name=self._subject.title, project=self._project, dir=self._folder,
                mode="offline", reinit="create_new", settings=settings,
            )  # fmt: skip
            self._run.define_metric("*", step_metric=STEP)
        return self._run

    def _await(self, wanted: set[tuple[str, int]]) -> None:
        """Waits for W&B's process, which writes behind. Raises: TrackerError"""
        deadline, path = time.monotonic() + FLUSH_SECONDS, Path(self._run.dir).parent / f"run-{self._subject.id}.wandb"
        while wanted - {key for row in rows(path) for key in _keys(row)}:
            if time.monotonic() > deadline:
                raise TrackerError(f"W&B wrote nothing into {path} for {FLUSH_SECONDS:.0f} s: is its disk full?")
            time.sleep(0.05)

    def close(self, phase: str | None) -> None:
        """Tells W&B that its part of the run has ended, and how."""
        if self._run is not None:
            self._run.finish(exit_code=int(phase in FAILED))
        self._lock.close()


def _is_written(path: Path) -> bool:
    """Whether a process has the file open to write; False where the system cannot tell (Linux can, for local files)."""
    if not hasattr(fcntl, "F_SETLEASE"):
        return False
    with path.open("rb") as file:
        try:
            # A lease to read is granted where nobody has the file open to write; it ends as the file is closed.
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        except OSError as error:
            return error.errno == errno.EAGAIN
    return False


def _keys(row: dict[str, Any]) -> Iterator[tuple[str, int]]:
    if STEP in row:
        yield from ((name, int(row[STEP])) for name in row if name != STEP and not name.startswith("_"))


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file of W&B, up to a torn one."""
    for content in records(path.read_bytes() if path.exists() else b""):
        record = Record.FromString(content)
        if record.HasField("history"):
            items = record.history.item
            yield {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


def records(content: bytes) -> Iterator[bytes]:
    """The records of LevelDB's log format: pieces of checksum, length and kind, of which none crosses a block's end."""
    place, parts = len(HEADER), b""
    while content.startswith(HEADER[:6]) and place + 7 <= len(content):
        if BLOCK - place % BLOCK < 7:
            place += BLOCK - place % BLOCK
            continue
        check, length, kind = struct.unpack_from("<IHB", content, place)
        piece = content[place + 7 : place + 7 + length]
        if len(piece) < length or crc32(bytes([kind]) + piece) != check:
            return
        parts = piece if kind in (WHOLE, FIRST) else parts + piece
        if kind in (WHOLE, LAST):
            yield parts
        place += 7 + length
