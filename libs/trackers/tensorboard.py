"""TensorBoard's event files: a folder for each run, below one that `tensorboard --logdir` shows.

A file is a sequence of records: length, checksum, event, checksum. The points of one step are one event, so a killed
writer leaves whole events and perhaps a torn one at the file's end. Readers stop there, TensorBoard's and this one; the
next writer begins a new file with what is missing.
"""

from __future__ import annotations

import fcntl
import itertools
import re
import struct
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import RecordWriter, masked_crc32c

from leyden.libs.trackers.destination import Point, Subject, TrackerError

VERSION = "brain.Event:2"
"""With it TensorBoard takes an older step for what it is, and not for a restart that voids all later ones."""
TITLE_LETTERS = 40


class TensorBoard:
    """All subjects below one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.expanduser().absolute()

    def open(self, subject: Subject) -> TensorBoardLog:
        """Its folder begins with its title, for people; the id makes it its own."""
        title = re.sub(r"[^\w-]+", "_", subject.title)[:TITLE_LETTERS]
        return TensorBoardLog(self._folder / f"{title}.{subject.id}")


class TensorBoardLog:
    """One subject's folder, locked while it is open."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = (folder / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise TrackerError(f"another process writes into {folder}: end it, or name another folder") from None
        self._folder = folder
        late = (folder / f"late-{number}" for number in itertools.count(1))
        self._lanes = [_Lane(folder), *map(_Lane, itertools.takewhile(Path.is_dir, late))]
        self.written = {key for lane in self._lanes for key in lane.keys}

    def write(self, points: Sequence[Point]) -> None:
        """One event for each step."""
        by_step: dict[tuple[int, int], list[Point]] = defaultdict(list)
        for point in sorted(points, key=lambda point: point.step):
            by_step[self._place(point), point.step].append(point)
        for (number, _), together in by_step.items():
            self._lanes[number].add(together)
        for lane in self._lanes:
            lane.flush()
        self.written |= {point.key for point in points}

    def _place(self, point: Point) -> int:
        """The first lane in which the point's name has no later step."""
        for number in itertools.count():
            if number == len(self._lanes):
                self._lanes.append(_Lane(self._folder / f"late-{number}"))
            lane = self._lanes[number]
            if lane.last.get(point.name, -1) < point.step:
                lane.last[point.name] = point.step
                return number
        raise AssertionError("the count has no end")

    def close(self, phase: str | None) -> None:
        """TensorBoard knows no end of a run."""
        for lane in self._lanes:
            lane.close()
        self._lock.close()


class _Lane:
    """Event files in which the steps of each name only grow.

    TensorBoard's data server forgets the later points of a name when an earlier step follows. Such a point, as of an
    evaluation of an older version, goes into a folder of its own, which TensorBoard shows as a run of its own.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = sorted(folder.glob("*tfevents*"))
        self._writer: Any = None
        self.keys: set[tuple[str, int]] = set()
        self.last: dict[str, int] = {}
        for record in (record for path in self._files for record in whole_records(path)):
            event = Event.FromString(record)
            for value in event.summary.value:
                self.keys.add((value.tag, event.step))
                self.last[value.tag] = max(event.step, self.last.get(value.tag, -1))

    def add(self, points: Sequence[Point]) -> None:
        """Args: points: of one step"""
        values = [Summary.Value(tag=point.name, simple_value=point.value) for point in points]
        event = Event(wall_time=max(p.time for p in points), step=points[0].step, summary=Summary(value=values))
        self._open_writer().write(event.SerializeToString())

    def _open_writer(self) -> Any:
        if self._writer is None:
            self._folder.mkdir(exist_ok=True)
            # TensorBoard reads files in the order of their names, and an older one no more. A clock may go back.
            path = self._folder / f"events.out.tfevents.{len(self._files) + 1:010d}.leyden"
            self._writer = RecordWriter(str(path))
            self._writer.write(Event(file_version=VERSION).SerializeToString())
        return self._writer

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def whole_records(path: Path) -> Iterator[bytes]:
    """The records of an event file, up to a torn one."""
    content, begin = path.read_bytes(), 0
    while begin + 12 <= len(content):
        length, check = struct.unpack_from("<QI", content, begin)
        end = begin + 12 + length
        if check != masked_crc32c(content[begin : begin + 8]) or end + 4 > len(content):
            return
        record = content[begin + 12 : end]
        if struct.unpack_from("<I", content, end)[0] != masked_crc32c(record):
            return
        yield record
        begin = end + 4
