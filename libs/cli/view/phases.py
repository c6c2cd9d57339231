"""The phases of a run's time, from its steps, attempts and calls in the store.

The phases add up to the run's duration. A moment belongs to the trainer while it makes a step. Otherwise the running
attempts share it: if twenty start and ten wait for the engine, two thirds of the moment count as starting. A moment
without a running attempt counts as the beginning until the first attempt, as the hand-over between a step and the next
attempt, and else as waiting.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from leyden.libs.client import Client
from leyden.libs.contracts.api.rollouts import Attempt, Call
from leyden.libs.contracts.api.runs import Run, Step

Interval = tuple[str, float, float]
"""Phase, start, end."""

BEGINNING, TRAINER, STARTING, ENGINE, HANDOVER, AGENTS, WAITING = (
    "beginning",
    "trainer",
    "agents starting",
    "engine",
    "hand-over",
    "agents at work",
    "waiting",
)
MEANINGS = {
    BEGINNING: "a trainer starts, engines load the base model",
    TRAINER: "a step is computed and written",
    STARTING: "attempts before their first call",
    ENGINE: "engines answer calls",
    HANDOVER: "from a step to the next attempt, and calls that wait meanwhile",
    AGENTS: "attempts between and after their calls",
    WAITING: "no attempt runs: attempts are queued, credit is computed",
}
_OF_ATTEMPTS = (STARTING, ENGINE, HANDOVER, AGENTS)
_GAP = "between a step and the next attempt"


@dataclass(frozen=True)
class Phase:
    """A share of a run's time."""

    name: str
    seconds: float
    share: float


def phases(run: Run, steps: Sequence[Step], attempts: Sequence[tuple[Attempt, Sequence[Call]]]) -> list[Phase]:
    """The phases of a run that has ended.

    Args: attempts: each with its calls, oldest first
    """
    assert run.finished_at is not None
    start, end = run.created_at.timestamp(), run.finished_at.timestamp()
    made = [(step.started_at.timestamp(), step.created_at.timestamp()) for step in steps]
    starts = sorted(attempt.started_at.timestamp() for attempt, _ in attempts if attempt.started_at is not None)
    intervals = [(TRAINER, *one) for one in made]
    intervals.append((BEGINNING, start, starts[0] if starts else end))
    intervals += [(_GAP, done, next((moment for moment in starts if moment >= done), done)) for _, done in made]
    for attempt, calls in attempts:
        intervals += _of_attempt(attempt, calls, end)
    seconds = dict.fromkeys(MEANINGS, 0.0)
    for name, spent in _shared(intervals, start, end):
        seconds[name] += spent
    return [Phase(name, spent, spent / max(end - start, 1e-9)) for name, spent in seconds.items()]


def _of_attempt(attempt: Attempt, calls: Sequence[Call], end: float) -> Iterator[Interval]:
    if attempt.started_at is None:
        return
    since, phase = attempt.started_at.timestamp(), STARTING
    for call in calls:
        # A call's row is created at its end.
        done = call.created_at.timestamp()
        arrived = done - call.total_seconds
        yield phase, since, arrived
        yield HANDOVER, arrived, arrived + call.queued_seconds
        yield ENGINE, arrived + call.queued_seconds, done
        since, phase = max(since, done), AGENTS
    yield phase, since, end if attempt.finished_at is None else attempt.finished_at.timestamp()


def _shared(intervals: Sequence[Interval], start: float, end: float) -> Iterator[tuple[str, float]]:
    """The seconds of each moment by phase."""
    changes = [(start, "", 0), (end, "", 0)]
    for name, first, last in intervals:
        if last > first:
            changes += [(min(max(first, start), end), name, 1), (min(max(last, start), end), name, -1)]
    open_now = dict.fromkeys((*MEANINGS, _GAP, ""), 0)
    for (moment, name, change), (following, _, _) in pairwise(sorted(changes)):
        open_now[name] += change
        of_attempts = sum(open_now[name] for name in _OF_ATTEMPTS)
        if open_now[TRAINER]:
            yield TRAINER, following - moment
        elif of_attempts:
            for name in _OF_ATTEMPTS:
                yield name, (following - moment) * open_now[name] / of_attempts
        else:
            idle = BEGINNING if open_now[BEGINNING] else HANDOVER if open_now[_GAP] else WAITING
            yield idle, following - moment


def phases_of(leyden: Client, run: Run) -> list[Phase]:
    """The phases of a run that has ended, from the API; takes some milliseconds for each rollout."""
    attempts: list[tuple[Attempt, Sequence[Call]]] = []
    for rollout in leyden.rollouts(run=run.id):
        for attempt in leyden.rollout(rollout.id).attempts:
            attempts.append((attempt, list(leyden.calls(rollout.id, attempt=attempt.number, whole=False))))
    return phases(run, list(leyden.steps(run.id)), attempts)


def in_words(found: Sequence[Phase]) -> str:
    """A line for each phase, and one for the longest."""
    width = max(len(phase.name) for phase in found)
    longest = max(found, key=lambda phase: phase.seconds)
    return "\n".join(
        [
            f"phases of {sum(phase.seconds for phase in found):.0f} s:",
            *(f"  {p.name:<{width}} {p.seconds:6.1f} s {p.share:4.0%}  {MEANINGS[p.name]}" for p in found),
            f"the longest: {longest.name}, {longest.share:.0%} of the time ({MEANINGS[longest.name]})",
        ]
    )
