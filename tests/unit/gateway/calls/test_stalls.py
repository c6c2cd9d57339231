"""A time without tokens in the middle of an answer is a wait when it is much longer than usual."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from leyden.services.gateway.calls.context import TOKEN_SECONDS, Stalls
from leyden.services.gateway.engine.pace import REMEMBERED_ANSWERS, Pace

USUAL = 0.02


def stalls_of(events: Sequence[tuple[float, int]], piece: int = 1, usual: float = USUAL) -> Stalls:
    """events: when each one came, with how many tokens; -1 says that the engine was lost."""
    stalls = Stalls()
    stalls.begin(usual, piece)
    for at, count in events:
        if count < 0:
            stalls.lose()
        else:
            stalls.arrived(at, count)
    return stalls


@pytest.mark.parametrize(
    ("events", "piece", "until", "seconds"),
    [
        # No token yet: the wait for the first one is none of these.
        ([], 1, 9.0, 0.0),
        ([(5.0, 0)], 1, 9.0, 0.0),
        ([(0.0, 1), (0.02, 1), (0.9, 1)], 1, 1.5, 0.0),
        # The engine stops after the first token, and the client leaves.
        ([(1.0, 1)], 1, 4.0, 2.98),
        # A whole answer comes in pieces, and nobody knows how much of the next one the engine had.
        ([(1.0, 1)], 1024, 4.0, 0.0),
        # It had none: the answer to the abort says so.
        ([(1.0, 1), (9.0, 0)], 1024, 4.0, 3.0),
        # It had all that it could have, or it stood still for most of the time.
        ([(1.0, 1), (9.0, 400)], 1024, 4.0, 0.0),
        ([(1.0, 1), (9.0, 100)], 1024, 9.0, 6.0),
        ([(1.0, 1), (9.0, 100)], 1024, 4.0, 3.0),
        # The engine was paused while the weights changed, and went on.
        ([(1.0, 1), (1.02, 1), (6.0, 1), (6.02, 1)], 1, 6.02, 4.96),
        # It was lost: all time until the next token, and until now without one.
        ([(1.0, 1), (0, -1), (1.5, 1), (1.52, 1)], 1, 1.52, 0.5),
        ([(1.0, 1), (0, -1)], 1024, 1.6, 0.6),
        # This answer is much slower than others, all of it.
        ([(2.0 * number, 1) for number in range(9)], 1, 16.0, 1.98 + 1.98),
    ],
)
def test_a_gap_that_is_much_longer_than_usual_is_a_stall(
    events: Sequence[tuple[float, int]], piece: int, until: float, seconds: float
) -> None:
    assert stalls_of(events, piece).seconds(until) == pytest.approx(seconds)


def test_an_engines_pace_is_that_of_most_of_its_answers() -> None:
    pace = Pace()
    assert pace.usual == TOKEN_SECONDS
    pace.learn(stalls_of([(0.0, 1)]))
    assert pace.usual == TOKEN_SECONDS
    for _ in range(3):
        pace.learn(stalls_of([(0.0, 1), (1.0, 50), (9.0, 50), (10.0, 50)]))
    assert pace.usual == pytest.approx(0.02)
    for _ in range(REMEMBERED_ANSWERS):
        pace.learn(stalls_of([(0.0, 1), (5.0, 50)]))
    assert pace.usual == pytest.approx(0.1)
