"""Compares an engine's log-probabilities of a canary with the trainer's. Pure functions of numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean

from leyden.libs.contracts.canary import Canary

FLOAT32_SHARE = 0.1
"""The limit in float32 as a share of `max_gap`, 0.01 nats by default. Implementations in bfloat16 differ by some 0.04
nats on average, for which `max_gap` leaves room; those in float32 differ by less than 0.001."""
LEAST_MOVED = 0.5
"""An engine that made less of an update serves the version before."""
DEVIATIONS = 6.0
"""Standard errors by which the share of an update must lie below the whole before it counts."""


@dataclass(frozen=True)
class Comparison:
    """An engine's answer beside the trainer's.

    gap, largest: mean and largest difference, nats, None where the engine names something else than numbers; limit: of
    the mean, nats; moved: the share of the update since the version before that the engine made, None where nothing
    shows it; problem: why the engine serves something else, for people, None where it does not.
    """

    tokens: int
    gap: float | None
    largest: float | None
    limit: float
    moved: float | None = None
    problem: str | None = None


def compare(
    canary: Canary, answers: Sequence[Sequence[float]], *, in_float32: bool = False, before: Canary | None = None
) -> Comparison:
    """Judges an engine's answer.

    Args:   answers: the engine's log-probabilities, NaN for null, in the shape of `canary.logprobs`; in_float32:
            whether the engine computes in float32; before: the canary of the version before; None where it is unknown,
            or the version may lack the update
    """
    own, found = list(chain.from_iterable(canary.logprobs)), list(chain.from_iterable(answers))
    gaps = [abs(a - b) for a, b in zip(found, own, strict=True)]
    exact = in_float32 and canary.dtype == "float32"
    limit = canary.max_gap * (FLOAT32_SHARE if exact else 1)
    if broken := sum(not math.isfinite(one) for one in found):
        words = (
            f"{broken} of its log-probabilities of {len(found)} fixed tokens are null or no finite numbers: it computes"
            " with broken weights"
        )
        return Comparison(len(gaps), None, None, limit, problem=words)
    gap, largest = fmean(gaps), max(gaps)
    moved, is_old = _moved(canary, found, before)
    problem = None
    if gap > limit:
        problem = (
            f"its log-probabilities of {len(gaps)} fixed tokens differ from the trainer's by {gap:.2g} nats on average,"
            f" {largest:.2g} at most (limit of the mean: {limit:.2g}): it computes with other weights or precision"
        )
    elif is_old:
        problem = (
            f"its log-probabilities of {len(gaps)} fixed tokens made {moved:.0%} of the change from the version before:"
            " it computes with older weights"
        )
    return Comparison(len(gaps), gap, largest, limit, moved, problem)


def _moved(canary: Canary, found: Sequence[float], before: Canary | None) -> tuple[float | None, bool]:
    """The share of the trainer's change since `before` that the engine made, and whether it shows older weights.

    The share is the slope of a regression through the origin: 1 with the new weights and 0 with those before. Its
    residuals are the difference of two implementations, which gives the standard error. In bfloat16 an update that
    moves log-probabilities by less than that noise shows nothing.
    """
    if before is None or before.token_ids != canary.token_ids:
        return None, False
    new, old = (list(chain.from_iterable(one.logprobs)) for one in (canary, before))
    changes = [b - a for a, b in zip(old, new, strict=True)]
    squares = sum(change * change for change in changes)
    if squares == 0 or len(changes) < 2:
        return None, False
    own = [a - b for a, b in zip(found, old, strict=True)]
    share = sum(a * b for a, b in zip(own, changes, strict=True)) / squares
    residuals = sum((a - share * b) ** 2 for a, b in zip(own, changes, strict=True))
    error = math.sqrt(residuals / (len(changes) - 1) / squares)
    return share, share < LEAST_MOVED and 1 - share > DEVIATIONS * error
