"""Statistics of short series that change slowly: pure functions of numbers, in standard errors of a normal variable."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

CERTAIN = 9.0
"""The answer where values move without any scatter: more standard errors mean the same."""
NEGLIGIBLE = 1e-9
"""Scatter below this share of the values is rounding."""


def trend(values: Sequence[float]) -> float:
    """The standard errors by which a series rises; negative where it falls.

    The larger of two tests, because nobody knows how steps depend on each other. (1) The slope of least squares, where
    neighbours' residuals that are alike make fewer independent values (Santer et al. 2000, "Statistical significance of
    trends and trend differences in layer-average atmospheric temperature time series", J. Geophys. Res. 105, equations
    3 to 6; the estimate of the autocorrelation without its bias, Kendall 1954, Biometrika 41). It finds trends in
    noise. (2) Student's test that the mean of the changes from step to step is not 0, which holds for a random walk.
    It finds smooth curves, whose residuals are alike.

    Args: values: by step, at least four

    >>> trend([0.0, 1.0, 2.0, 3.0]), trend([2.0, 2.0, 2.0, 2.0]), abs(trend([0.0, 1.0, 0.0, 1.0] * 6)) < 1
    (9.0, 0.0, True)
    """
    return max(_slope(values), _drift(values), key=abs)


def _slope(values: Sequence[float]) -> float:
    count = len(values)
    middle, mean = (count - 1) / 2, fmean(values)
    spread = count * (count * count - 1) / 12
    slope = sum((place - middle) * value for place, value in enumerate(values)) / spread
    residuals = [value - mean - slope * (place - middle) for place, value in enumerate(values)]
    squares = sum(residual * residual for residual in residuals)
    if squares <= count * _rounding(values) ** 2:
        return 0.0
    alike = sum(a * b for a, b in pairwise(residuals)) / squares
    alike = min(1.0, max(0.0, alike + (2 + 4 * alike) / count))
    freedom = count * (1 - alike) / (1 + alike) - 2
    return deviates(slope / math.sqrt(squares / freedom / spread), freedom) if freedom >= 1 else 0.0


def _drift(values: Sequence[float]) -> float:
    return mean_deviates([b - a for a, b in pairwise(values)], _rounding(values))


def _rounding(values: Sequence[float]) -> float:
    return NEGLIGIBLE * max(abs(value) for value in values)


def _scatter(values: Sequence[float]) -> float:
    """The standard deviation of a sample. Why: `statistics.stdev` computes in fractions and takes 30 times as long."""
    mean = fmean(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def mean_deviates(values: Sequence[float], rounding: float = 0.0) -> float:
    """The standard errors of the mean of independent values from 0.

    Args: values: at least two; rounding: a scatter that is none
    """
    mean, scatter = fmean(values), _scatter(values)
    if scatter <= rounding:
        return math.copysign(CERTAIN, mean) if abs(mean) > rounding else 0.0
    return deviates(mean / (scatter / math.sqrt(len(values))), len(values) - 1)


def jump(values: Sequence[float], errors: Sequence[float]) -> float:
    """The deviations of the last change of a series from those before it: Student's prediction of the next one.

    Args: values: by step, at least four; errors: the standard error of each value from its own rollouts, so that a
        series without any change so far is not certain to have none
    """
    *before, last = [b - a for a, b in pairwise(values)]
    count = len(before)
    sampled = math.hypot(errors[-1], errors[-2])
    scatter = max(_scatter(before) * math.sqrt(1 + 1 / count), sampled)
    if scatter <= _rounding(values):
        return 0.0
    return deviates((last - fmean(before)) / scatter, count - 1)


def deviates(student: float, freedom: float) -> float:
    """The normal deviate that is as rare as a value of Student's t.

    Source: D. L. Wallace 1959, "Bounds on normal approximations to Student's and the chi-square distributions", Ann.
    Math. Stat. 30; from two degrees of freedom on at most 5 % below the exact deviate, up to 3.7.

    >>> [round(deviates(student, freedom), 2) for student, freedom in ((4.303, 2), (2.262, 9), (3.0, 1e6))]
    [1.93, 1.96, 3.0]
    """
    scale = (8 * freedom + 1) / (8 * freedom + 3)
    return math.copysign(scale * math.sqrt(freedom * math.log1p(student * student / freedom)), student)
