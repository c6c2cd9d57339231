"""Follows runs, and writes each point that the tracker lacks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from leyden.libs.client import Client, NotFound
from leyden.libs.contracts.api.comparison import whole_evaluations
from leyden.libs.contracts.api.runs import Run
from leyden.libs.contracts.states import ENDED, RunPhase
from leyden.libs.trackers.destination import Log, Point, Subject, Tracker
from leyden.libs.trackers.points import LATE, evaluation_points, step_points

OWN = None
"""The policy that is the run's own model."""
LATE_SECONDS = 30.0
"""How long engines may take to load the last version after their run has ended."""


def follow(
    leyden: Client,
    run_ids: Sequence[str],
    tracker: Tracker,
    tell: Callable[[str], None],
    *,
    once: bool = False,
    poll_seconds: float = 2.0,
) -> None:
    """Writes until the runs have ended and their evaluations are complete; ratings from outside are not waited for.

    Args: tell: takes a line on what was written; once: writes what there is now, and returns

    Raises: TrackerError: the tracker cannot be written
    """
    following = [_Following(leyden, run_id, tracker, tell) for run_id in dict.fromkeys(run_ids)]
    try:
        while following:
            following = [one for one in following if not _ended(one, tell)]
            if once:
                return
            if following:
                time.sleep(poll_seconds)
    finally:
        for one in following:
            one.close(None)


def _ended(one: _Following, tell: Callable[[str], None]) -> bool:
    try:
        return one.catch_up()
    except NotFound as error:
        tell(f"run {one.run_id} is followed no longer: {error}")
        one.close(None)
        return True


class _Following:
    """One run: `run_id`."""

    def __init__(self, leyden: Client, run_id: str, tracker: Tracker, tell: Callable[[str], None]) -> None:
        self._leyden, self.run_id, self._tracker, self._tell = leyden, run_id, tracker, tell
        self._logs: dict[str | None, Log] = {}
        self._read: dict[str | None, tuple[int, bool]] = {}
        self._datasets: dict[str, str] = {}
        self._alive_at: float | None = None
        """The last time at which the run had not ended; None where it never was so."""

    def catch_up(self) -> bool:
        """Writes the missing points; returns whether no more will come."""
        # The run before its steps: an ended one has no step that is not read here.
        run = self._leyden.run(self.run_id)
        is_settled = self._is_settled(run)
        for policy, subject, step in _subjects(run):
            log = self._logs.get(policy) or self._logs.setdefault(policy, self._tracker.open(subject))
            if self._read.get(policy) != (step, is_settled):
                of_steps = self._of_steps(policy)
                # A tracker changes no point that it has: numbers that may grow wait until the step after the next one.
                grown = (one for one in of_steps if is_settled or one.name not in LATE or one.step < step - 1)
                self._write(log, subject, grown)
                self._read[policy] = step, is_settled
        evaluations = list(self._leyden.evaluations(self.run_id))
        whole = whole_evaluations(evaluations)
        points = [point for one in whole for point in evaluation_points(one, self._dataset(one.dataset_id))]
        self._write(self._logs[OWN], Subject(run.id, run.name), points)
        if not is_settled:
            return False
        done = all(one.results.complete or one.results.pending for one in evaluations)
        if done or run.phase != RunPhase.COMPLETED:
            self.close(run.phase)
            return True
        return False

    def _is_settled(self, run: Run) -> bool:
        """Whether the numbers of the run's last steps grow no more: it ended before, or engines had the time to load
        its last version since."""
        if run.phase not in ENDED:
            self._alive_at = time.monotonic()
        return run.phase in ENDED and (self._alive_at is None or time.monotonic() >= self._alive_at + LATE_SECONDS)

    def _of_steps(self, policy: str | None) -> Iterator[Point]:
        first = next(self._leyden.steps(self.run_id, policy=policy), None)
        if first is not None:
            yield from step_points(self._leyden.metrics(self.run_id, policy=policy), first.started_at)

    def _dataset(self, dataset_id: str) -> str:
        if dataset_id not in self._datasets:
            self._datasets[dataset_id] = self._leyden.dataset(dataset_id).name
        return self._datasets[dataset_id]

    def _write(self, log: Log, subject: Subject, points: Iterable[Point]) -> None:
        # The first of two points with one key: two evaluations may measure one version.
        missing = {point.key: point for point in reversed(list(points)) if point.key not in log.written}
        if missing:
            log.write(list(missing.values()))
            last = max(point.step for point in missing.values())
            self._tell(f"{subject.title} ({subject.id}): {len(missing)} points, up to step {last}")

    def close(self, phase: str | None) -> None:
        """Closes its logs. Args: phase: that of the run, if it has ended"""
        for log in self._logs.values():
            log.close(phase)
        self._logs.clear()


def _subjects(run: Run) -> Iterator[tuple[str | None, Subject, int]]:
    """The run and its policies that train, each with the number of its last step."""
    yield OWN, Subject(run.id, run.name), run.progress.step
    for name, policy in run.policies.items():
        if policy.trains:
            yield name, Subject(policy.id, f"{run.name}.{name}"), policy.step
