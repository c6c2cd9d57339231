"""Learns how fast an engine samples, so that its stalls can be told from a slow answer."""

from __future__ import annotations

from collections import deque
from statistics import median

from leyden.services.gateway.calls.context import TOKEN_SECONDS, Stalls

REMEMBERED_ANSWERS = 31


class Pace:
    """Seconds that an engine usually takes for a token: the median of its last answers."""

    def __init__(self) -> None:
        self._answers: deque[float] = deque(maxlen=REMEMBERED_ANSWERS)

    @property
    def usual(self) -> float:
        """Seconds a token."""
        return median(self._answers) if self._answers else TOKEN_SECONDS

    def learn(self, stalls: Stalls) -> None:
        """Adds an answer, or a part of one, that this engine alone sampled."""
        if stalls.paces:
            self._answers.append(median(stalls.paces))
