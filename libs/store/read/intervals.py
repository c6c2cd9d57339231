"""Means of numbers over rollouts, with 95 % intervals that count tasks.

Rollouts of one task are alike: eight of them say less than eight tasks do. The interval takes tasks as the sample
(Miller, "Adding Error Bars to Evals", arXiv 2411.00640, section 2.2: standard errors clustered by question).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from leyden.libs.contracts.api.runs import PassAt, Statistic

Z95 = 1.959963984540054
_STUDENT_95 = {1: 12.706205, 2: 4.302653, 3: 3.182446, 4: 2.776445}
"""Student's t at 97.5 %, by degrees of freedom, where the expansion of `student_95` is too coarse."""


@dataclass(frozen=True)
class TaskSums:
    """A number over the rollouts of several tasks. With n rollouts of a task that have it, and s the sum of theirs:

    count: Σ n; total: Σ s; squares: Σ s²; products: Σ n · s; counts: Σ n²; tasks: their number; is_binary: whether
    every number is 0 or 1.
    """

    tasks: int
    count: int
    total: float
    squares: float
    products: float
    counts: float
    is_binary: bool

    @property
    def mean(self) -> float:
        """The mean over rollouts."""
        return self.total / self.count

    @property
    def spread(self) -> float:
        """Σ over tasks of (s - n · mean)² / count²: the variance of the mean, but for T / (T - 1)."""
        of_tasks = self.squares - 2 * self.mean * self.products + self.mean * self.mean * self.counts
        return max(0.0, of_tasks) / (self.count * self.count)


def statistic(sums: TaskSums) -> Statistic:
    """Mean and 95 % interval: Wilson's for a share, else Student's; one task has no interval but that of a share.

    Example: two tasks of two rollouts each, all right and all wrong, give the interval of 1 in 2, not that of 2 in 4.
    """
    mean, found = sums.mean, {"count": sums.count, "tasks": sums.tasks}
    if sums.is_binary:
        low, high = wilson(mean, _effective_count(sums))
        return Statistic(mean=mean, low=low, high=high, **found)
    if sums.tasks < 2:
        return Statistic(mean=mean, low=None, high=None, **found)
    half = student_95(sums.tasks - 1) * math.sqrt(sums.spread * sums.tasks / (sums.tasks - 1))
    return Statistic(mean=mean, low=mean - half, high=mean + half, **found)


@dataclass(frozen=True)
class SolvedGroups:
    """So many groups of which `known` rollouts have a reward, and `solved` of these have 1."""

    known: int
    solved: int
    groups: int


def pass_at(found: Iterable[SolvedGroups], size: int) -> list[PassAt]:
    """pass@k for k of 1, 2, 4, … and `size`; groups of fewer known rollouts are left out, and a k without any group.

    Args: size: rollouts of a group
    Source: Chen et al., "Evaluating Large Language Models Trained on Code" (arXiv 2107.03374), equation 1: the mean of
    1 - C(n - c, k) / C(n, k), of n rollouts c of which are right.
    Example: 1 of 4 right and 4 of 4 give pass@2 (1 - 3/6 + 1) / 2 = 0.75.
    """
    groups, measured = list(found), []
    for k in [*(1 << power for power in range((size - 1).bit_length())), size]:
        enough = [one for one in groups if one.known >= k]
        if count := sum(one.groups for one in enough):
            missed = sum(one.groups * math.comb(one.known - one.solved, k) / math.comb(one.known, k) for one in enough)
            measured.append(PassAt(k=k, mean=1 - missed / count, tasks=count))
    return measured


def wilson(share: float, count: float) -> tuple[float, float]:
    """The 95 % interval of a share (E. B. Wilson, 1927); within [0, 1] at every count.

    Example: 0.8 of 10 gives (0.4902, 0.9433).
    """
    z2 = Z95 * Z95
    centre = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = Z95 / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count * count))
    return max(0.0, centre - half), min(1.0, centre + half)


def student_95(freedom: int) -> float:
    """Student's t at 97.5 %: Fisher's expansion around the normal distribution, within 0.004.

    >>> [round(student_95(freedom), 2) for freedom in (1, 2, 3, 9, 1000)]
    [12.71, 4.3, 3.18, 2.26, 1.96]
    """
    z, v = Z95, float(freedom)
    expanded = (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    )
    return _STUDENT_95.get(freedom, expanded)


def _effective_count(sums: TaskSums) -> float:
    """The number of independent rollouts that say as much: at most all, and the tasks where all say the same.

    Few tasks tell little of how tasks differ, be they alike by chance. So it is smaller by (z / t)², with Student's t
    over tasks (Korn and Graubard, Survey Methodology 24, 1998), but not below the tasks themselves.
    """
    variance = sums.mean * (1 - sums.mean)
    if variance <= 0 or sums.tasks < 2:
        return sums.tasks
    found = sums.count if sums.spread <= 0 else min(float(sums.count), variance / sums.spread)
    return max(min(found, sums.tasks), found * (Z95 / student_95(sums.tasks - 1)) ** 2)
