"""Where the time of a run went, from what the store knows of its steps, attempts and calls.

The seconds add up to the run's own. A moment belongs to the trainer while it makes a step; else it is shared by the
attempts at work, each by what it does: where twenty start and ten wait for the engine, two thirds of the moment go to
starting. With no attempt at work it belongs to the beginning until the first one starts, to the hand-over after a step
until the next one starts, else to waiting.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from leyden.libs.client import Client
from leyden.libs.contracts.api import Attempt, Call, Run, Step

Interval = tuple[str, float, float]
"""What was done, from when to when."""

BEGINNING, TRAINER, STARTING, ENGINE, HELD, AGENTS, WAITING = (
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
    ENGINE: "calls that are answered",
    HELD: "from a step to the next attempt, and calls that are held meanwhile",
    AGENTS: "attempts between and after their calls",
    WAITING: "nothing is at work: attempts are queued, credit is computed",
}
_OF_ATTEMPTS = (STARTING, ENGINE, HELD, AGENTS)
_GAP = "between a step and the next attempt"


@dataclass(frozen=True)
class Phase:
    """A share of a run's time."""

    name: str
    seconds: float
    share: float


def phases(run: Run, steps: Sequence[Step], attempts: Sequence[tuple[Attempt, Sequence[Call]]]) -> list[Phase]:
    """The phases of a run that has ended; together as long as it.

    Args: attempts: each with its calls, oldest first
    """
    assert run.finished_at is not None
    begun, ended = run.created_at.timestamp(), run.finished_at.timestamp()
    made = [(step.started_at.timestamp(), step.created_at.timestamp()) for step in steps]
    starts = sorted(attempt.started_at.timestamp() for attempt, _ in attempts if attempt.started_at is not None)
    found = [(TRAINER, *one) for one in made]
    found.append((BEGINNING, begun, starts[0] if starts else ended))
    found += [(_GAP, over, next((start for start in starts if start >= over), over)) for _, over in made]
    for attempt, calls in attempts:
        found += _of_attempt(attempt, calls, ended)
    seconds = dict.fromkeys(MEANINGS, 0.0)
    for name, spent in _shared(found, begun, ended):
        seconds[name] += spent
    return [Phase(name, spent, spent / max(ended - begun, 1e-9)) for name, spent in seconds.items()]


def _of_attempt(attempt: Attempt, calls: Sequence[Call], ended: float) -> Iterator[Interval]:
    if attempt.started_at is None:
        return
    done, doing = attempt.started_at.timestamp(), STARTING
    for call in calls:
        # A call is recorded as it ends.
        over = call.created_at.timestamp()
        arrived = over - call.total_seconds
        yield doing, done, arrived
        yield HELD, arrived, arrived + call.queued_seconds
        yield ENGINE, arrived + call.queued_seconds, over
        done, doing = max(done, over), AGENTS
    yield doing, done, ended if attempt.finished_at is None else attempt.finished_at.timestamp()


def _shared(found: Sequence[Interval], begun: float, ended: float) -> Iterator[tuple[str, float]]:
    """Each moment's seconds by phase."""
    changes = [(begun, "", 0), (ended, "", 0)]
    for name, start, end in found:
        if end > start:
            changes += [(min(max(start, begun), ended), name, 1), (min(max(end, begun), ended), name, -1)]
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
            yield BEGINNING if open_now[BEGINNING] else HELD if open_now[_GAP] else WAITING, following - moment


def phases_of(leyden: Client, run: Run) -> list[Phase]:
    """The phases of a run that has ended, as the API tells them; some milliseconds for each of its rollouts."""
    attempts: list[tuple[Attempt, Sequence[Call]]] = []
    for rollout in leyden.rollouts(run=run.id):
        for attempt in leyden.rollout(rollout.id).attempts:
            attempts.append((attempt, list(leyden.calls(rollout.id, attempt=attempt.number))))
    return phases(run, list(leyden.steps(run.id)), attempts)


def in_words(found: Sequence[Phase]) -> str:
    """A line for each phase, and which of them limits the run."""
    width = max(len(phase.name) for phase in found)
    most = max(found, key=lambda phase: phase.seconds)
    return "\n".join(
        [
            f"where {sum(phase.seconds for phase in found):.0f} s went:",
            *(f"  {p.name:<{width}} {p.seconds:6.1f} s {p.share:4.0%}  {MEANINGS[p.name]}" for p in found),
            f"what limits it: {most.name}, {most.share:.0%} of the time ({MEANINGS[most.name]})",
        ]
    )
