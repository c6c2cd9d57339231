"""A tracker: it takes points, and tells which ones it has."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Protocol


class TrackerError(Exception):
    """The tracker cannot be written; the message names the remedy."""


@dataclass(frozen=True)
class Point:
    """One number of a run: step: of the optimiser, or the measured policy version; time: Unix seconds."""

    name: str
    step: int
    value: float
    time: float

    @property
    def key(self) -> tuple[str, int]:
        """A tracker has one point of each name and step."""
        return self.name, self.step


@dataclass(frozen=True)
class Subject:
    """The source of points: a run, or one of its further policies."""

    id: str
    """That of the run, or of the policy."""
    title: str


class Log(Protocol):
    """The points of one subject at a tracker."""

    @property
    def written(self) -> Set[tuple[str, int]]:
        """Keys of the points that are there, whoever wrote them."""

    def write(self, points: Sequence[Point]) -> None:
        """Adds points that are not there, in any order. A part of them may be there when the process dies."""

    def close(self, phase: str | None) -> None:
        """Args: phase: that of the run, if it has ended"""


class Tracker(Protocol):
    """A place for the points of many subjects."""

    def open(self, subject: Subject) -> Log:
        """Opens a subject's log, or makes it. Raises: TrackerError"""
