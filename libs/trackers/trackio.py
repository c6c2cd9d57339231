"""Trackio's local database: a run of Trackio for each run, with the run's id, in a project that `trackio show` opens.

A row is one point. Its id is made of the run, the step and the name, and Trackio ignores a second row with the same id:
a killed writer, or two writers who found different points missing, double nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime

from trackio.sqlite_storage import SQLiteStorage

from leyden.libs.trackers.destination import Point, Subject, TrackerError

NO_SERIES = frozenset({"step", "timestamp"})


class Trackio:
    """One project of the folder `TRACKIO_DIR`."""

    def __init__(self, project: str) -> None:
        try:
            SQLiteStorage.validate_project_name(project)
        except ValueError as error:
            raise TrackerError(f"{error}; name another one with --to trackio:PROJECT") from None
        self._project = project

    def open(self, subject: Subject) -> TrackioLog:
        """The run of Trackio with the subject's id; it is there from the first point on."""
        return TrackioLog(self._project, subject)


class TrackioLog:
    """One run of Trackio."""

    def __init__(self, project: str, subject: Subject) -> None:
        self._project, self._subject = project, subject
        rows = SQLiteStorage.get_logs(project, run_id=subject.id)
        self.written = {(name, int(row["step"])) for row in rows for name in row.keys() - NO_SERIES}

    def write(self, points: Sequence[Point]) -> None:
        """All points in one transaction."""
        rows = sorted(points, key=lambda point: (point.step, point.name))
        SQLiteStorage.bulk_log(
            self._project,
            self._subject.title,
            [{point.name: point.value} for point in rows],
            steps=[point.step for point in rows],
            timestamps=[datetime.fromtimestamp(point.time, UTC).isoformat() for point in rows],
            log_ids=[self._row_id(point) for point in rows],
            run_id=self._subject.id,
        )
        self.written |= {point.key for point in points}

    def _row_id(self, point: Point) -> str:
        return hashlib.sha256(f"{self._subject.id}\n{point.step}\n{point.name}".encode()).hexdigest()[:32]

    def close(self, phase: str | None) -> None:
        """Trackio's rows have no end."""
