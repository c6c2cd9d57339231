"""Votes of judges, which a grader remembers by the thousand."""

from __future__ import annotations

import json
import pickle

from leyden.libs.grading.comparing import Comparison
from leyden.libs.grading.grade import MAX_SHOWN
from leyden.libs.grading.judging import Asked, ScoreQuestion
from tests.fakes.judge import Said, compared, ranked, scored


def answer(said: Said) -> bytes:
    return json.dumps({"choices": [{"message": {"content": said.content}}]}).encode()


def size(asked: Asked[object], said: Said) -> int:
    """The bytes of a vote with all that it refers to."""
    vote, _ = asked.read(answer(said))
    return len(pickle.dumps(vote))


def test_a_vote_on_long_outputs_holds_none_of_them() -> None:
    texts = tuple(str(number) * 20_000 for number in range(8))
    asked = Comparison("judge", "m", "Which is best?", texts).asked()
    said = ranked(dict.fromkeys(compared(asked.document), 0.5), "because " * 1000)
    assert size(asked, said) < MAX_SHOWN + 1000


def test_a_vote_holds_no_more_of_a_reason_than_a_row_shows() -> None:
    asked = ScoreQuestion("judge", "m", "Good?", 1.0, 5.0, "x" * 20_000).asked()
    assert size(asked, scored(5, "because " * 1000)) < MAX_SHOWN + 1000
