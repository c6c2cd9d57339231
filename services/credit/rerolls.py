"""Monte-Carlo values of the states inside a rollout, and what its calls gained between them.

The value of the state before call n is the mean total return of the rollout's re-rolls from n: they repeat the calls
before it and sample the rest anew. The start's value is the mean of the other siblings, which are such samples; the
end's is the rollout's own return. All calls between two states with a value are one action: each has the difference of
the two as its advantage, as each token of a step has in VinePPO. Over the states the differences add up to the
rollout's return less the value of its start.

A state with fewer than half of its samples has no value, and its calls belong to the action before it. Without any
such state an advantage is that of `leave_one_out`.

Source: VinePPO, arXiv 2410.01679; differs in that its states are the calls of an agent, and that it takes no samples of
its own from the start.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from leyden.libs.contracts.call_counts import CallCounts
from leyden.libs.contracts.config import Baseline
from leyden.services.credit.records import Call

Floats = NDArray[np.float64]
Samples = Mapping[tuple[str | None, int | None], Sequence[float]]
"""Total returns of re-rolls by sibling and the call from which they were sampled."""


@dataclass(frozen=True, slots=True)
class Values:
    """The values along one rollout: `values` holds that of the start, of the states before `calls`, and of the end.

    `unmeasured`: chosen states that have no value.
    """

    calls: tuple[int, ...]
    values: tuple[float, ...]
    unmeasured: int = 0

    def around(self, places_C: Sequence[int], no_variance: float) -> tuple[Floats, Floats]:
        """Returns the values of the states before and after the action of each call, both [C].

        Args: places_C: the number of answered requests before each call; no_variance: two values that differ by no more
            than this share of the largest are equal
        """
        actions_C = [bisect_right(self.calls, place) for place in places_C]
        before_C = np.array([self.values[action] for action in actions_C], np.float64)
        after_C = np.array([self.values[action + 1] for action in actions_C], np.float64)
        scale = max(map(abs, self.values))
        is_equal_C = np.abs(after_C - before_C) <= no_variance * scale
        return before_C, np.where(is_equal_C, before_C, after_C)


def values_of(name: str, requests: int, totals: Mapping[str, float], samples: Samples, baseline: Baseline) -> Values:
    """The values along a sibling that had so many requests answered.

    Args: totals: the total return of each sibling, of which there are two or more
    """
    others = [total for other, total in totals.items() if other != name]
    chosen = baseline.rerolled_calls(requests)
    measured = [call for call in chosen if 2 * len(samples.get((name, call), ())) >= baseline.samples]
    inner = [float(np.mean(samples[name, call])) for call in measured]
    return Values(
        tuple(measured), (float(np.mean(others)), *inner, totals[name]), unmeasured=len(chosen) - len(measured)
    )


def with_states(counts: CallCounts | None, along: Sequence[Values]) -> CallCounts:
    """The counts with those of the states inside rollouts. Args: along: the values along each sibling"""
    unmeasured = sum(one.unmeasured for one in along)
    states = unmeasured + sum(len(one.calls) for one in along)
    return (counts or CallCounts()).model_copy(update={"states": states, "unmeasured": unmeasured})


def places_of(calls: Sequence[Call]) -> tuple[dict[str, int], int]:
    """Returns the number of answered requests before each call, by its id, and the number of all of them."""
    places: dict[str, int] = {}
    answered = 0
    for _, choices in groupby(sorted(calls, key=_by_request), key=_by_request):
        request = list(choices)
        places |= {call.id: answered for call in request}
        answered += any(call.completed for call in request)
    return places, answered


def _by_request(call: Call) -> tuple[int, str]:
    return call.sequence, call.request_id
