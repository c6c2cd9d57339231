"""Means and intervals by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from leyden.libs.store.read.intervals import SolvedGroups, TaskSums, pass_at, statistic, student_95, wilson


def sums(tasks: Sequence[Sequence[float]]) -> TaskSums:
    """The sums over the numbers that the rollouts of each task have."""
    n, s = [len(task) for task in tasks], [sum(task) for task in tasks]
    return TaskSums(
        tasks=len(tasks),
        count=sum(n),
        total=sum(s),
        squares=sum(one * one for one in s),
        products=sum(a * b for a, b in zip(n, s, strict=True)),
        counts=sum(one * one for one in n),
        is_binary={number for task in tasks for number in task} <= {0, 1},
    )


@pytest.mark.parametrize(
    ("share", "count", "low", "high"),
    [(0.8, 10, 0.4902, 0.9433), (0.0, 10, 0.0, 0.2775), (1.0, 10, 0.7225, 1.0), (1.0, 1, 0.2065, 1.0)],
)
def test_wilson_intervals_are_within_zero_and_one(share: float, count: int, low: float, high: float) -> None:
    assert wilson(share, count) == pytest.approx((low, high), abs=5e-5)


def test_student_s_quantiles_are_those_of_the_tables() -> None:
    found = [student_95(freedom) for freedom in (1, 2, 3, 4, 9, 30)]
    assert found == pytest.approx([12.7062, 4.3027, 3.1824, 2.7764, 2.2622, 2.0423], abs=4e-3)


def test_numbers_get_student_s_interval_of_the_unbiased_variance() -> None:
    # 1, 2, 3: mean 2, variance 1, half width 4.3027 / sqrt(3).
    found = statistic(sums([[1], [2], [3]]))
    assert (found.mean, found.high, found.tasks) == (2.0, pytest.approx(2 + 2.4841, abs=1e-4), 3)


def test_one_task_tells_nothing_about_others() -> None:
    alone = statistic(sums([[5.0, 6.0]]))
    assert (alone.mean, alone.low, alone.high) == (5.5, None, None)
    share = statistic(sums([[1] * 8]))
    assert (share.low, share.high) == pytest.approx(wilson(1.0, 1))


@pytest.mark.parametrize(
    ("tasks", "as_many"),
    [
        # Every task once: nothing changes.
        ([[1], [0], [1], [1]], 4),
        # Repeats that say what the first said: as many as tasks.
        ([[1] * 8, [0] * 8, [1] * 8, [1] * 8], 4),
        ([[1] * 8] * 4, 4),
        # One task, and few that are alike by chance, are no sample of tasks: as many as tasks.
        ([[1, 0] * 16], 1),
        ([[1, 0] * 16] * 2, 2),
        ([[1, 0, 0, 0] * 8, [1, 1, 1, 0] * 8], 2),
        # Ten tasks that are alike: of their 20 rollouts (1.95996 / 2.26216)².
        ([[1, 0]] * 10, 20 * 0.750664),
        # In between: Σ (s - n / 2)² is 20, of 80 independent ones also 20; 80 times (1.95996 / 2.09302)².
        ([[1, 1, 1, 0], [1, 0, 0, 0]] * 10, 80 * 0.876886),
    ],
)
def test_repeats_of_a_task_narrow_the_interval_of_a_share_only_as_far_as_they_differ(
    tasks: list[list[float]], as_many: float
) -> None:
    found = statistic(sums(tasks))
    assert (found.low, found.high) == pytest.approx(wilson(found.mean, as_many), abs=5e-4)


def test_repeats_of_a_task_do_not_narrow_the_interval_of_a_number() -> None:
    once, often = statistic(sums([[1], [2], [4]])), statistic(sums([[1] * 9, [2] * 9, [4] * 9]))
    assert (often.count, often.low, often.high) == (27, pytest.approx(once.low), pytest.approx(once.high))


def test_pass_at_k_is_the_chance_that_one_of_k_rollouts_solves_a_task() -> None:
    # Two groups of 1 in 4, one of 4 in 4, and one of which a single rollout has a reward, 0.
    found = pass_at([SolvedGroups(4, 1, 2), SolvedGroups(4, 4, 1), SolvedGroups(1, 0, 1)], 6)
    assert [(one.k, one.mean, one.tasks) for one in found] == [
        # (1/4 + 1/4 + 1 + 0) / 4
        (1, pytest.approx(0.375), 4),
        # Without C(3, 2) / C(4, 2) = 1/2 for each of the two.
        (2, pytest.approx(2 / 3), 3),
        (4, 1.0, 3),
    ]
    assert [one.k for one in pass_at([SolvedGroups(6, 1, 1)], 6)] == [1, 2, 4, 6]
    assert [one.k for one in pass_at([SolvedGroups(8, 1, 1)], 8)] == [1, 2, 4, 8]
