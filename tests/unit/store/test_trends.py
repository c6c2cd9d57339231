"""Trends and jumps of short series: how often noise raises an alarm, and how small a trend is found."""

from __future__ import annotations

import doctest
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import pytest

from leyden.libs.contracts.alarms import ALARM_RULES
from leyden.libs.contracts.config.reward import Component
from leyden.libs.store.alarms import trends
from leyden.libs.store.alarms.hacking import TREND_STEPS, StepMeans, judge_components, judge_held_out, judge_jumps
from leyden.libs.store.alarms.trends import jump, trend

RUNS, STEPS = 60, 200
PART = Component.model_validate({"name": "part", "weight": 0.5, "grader": {"type": "length", "at_most": 9}})


def moving(memory: float, random_: random.Random) -> Iterator[float]:
    """Noise whose memory is 0, a random walk whose memory is 1."""
    value = 0.0
    while True:
        value = memory * value + random_.gauss(0, 1)
        yield value


def test_the_examples_hold() -> None:
    assert doctest.testmod(trends).failed == 0


def alarmed(memory: float, judge: Callable[[Sequence[StepMeans]], Iterator[object]]) -> int:
    """Of 60 runs of 200 steps, in which component and reward move independently and nothing is learned, those that
    raise an alarm in any step."""
    draws, found = random.Random(11), 0
    for _ in range(RUNS):
        parts, rewards = (list(islice(moving(memory, draws), STEPS)) for _ in range(2))
        pairs = enumerate(zip(parts, rewards, strict=True), 1)
        steps = [StepMeans(number, reward, components={"part": (part, 0.0)}) for number, (part, reward) in pairs]
        # Every fourth step is enough: these share 36 of 40 steps with the next.
        found += any(list(judge(steps[max(0, end - TREND_STEPS) : end])) for end in range(12, STEPS + 1, 4))
    return found


@pytest.mark.parametrize(("memory", "most"), [(0.0, 0), (0.7, 1), (0.9, 2), (1.0, 7)])
def test_noise_raises_no_alarm_and_a_random_walk_seldom(memory: float, most: int) -> None:
    """A walk is no noise: the component did rise and the reward did fall, if by chance. About 5 % of runs do."""
    assert alarmed(memory, lambda steps: judge_components(steps, [PART])) <= most


@pytest.mark.parametrize("memory", [0.0, 1.0])
def test_a_jump_is_seldom_noise(memory: float) -> None:
    assert alarmed(memory, lambda steps: judge_jumps(steps, [PART])) <= 2


def test_a_trend_of_three_deviations_within_the_window_is_found_in_noise() -> None:
    draws, found = random.Random(5), 0
    for _ in range(200):
        steps = [
            StepMeans(n, -3 * n / 40 + draws.gauss(0, 1), components={"part": (3 * n / 40 + draws.gauss(0, 1), 0.0)})
            for n in range(1, 41)
        ]
        found += bool(list(judge_components(steps, [PART])))
    assert found >= 180


@pytest.mark.parametrize(
    ("values", "rises"),
    [
        ([place * place for place in range(12)], True),
        ([1 / (1 + 2.718 ** ((20 - place) / 5)) for place in range(40)], True),
        ([0.0] * 12, False),
        ([0.1] * 11 + [0.9], False),
        ([0.0] * 6 + [1.0] * 6, False),
        ([0.1 + 0.2, 0.3] * 10, False),
    ],
)
def test_smooth_curves_rise_and_one_step_is_no_trend(values: list[float], rises: bool) -> None:
    limit = ALARM_RULES["component_rises_alone"].limit
    assert (trend(values) >= limit, trend([-value for value in values]) <= -limit) == (rises, rises)


def test_the_first_successes_are_no_jump_but_many_at_once_are() -> None:
    """32 rollouts a step, of which none had earned anything: their own standard error is the measure."""

    def jumped(successes: int) -> float:
        share = successes / 32
        return jump([0.0] * 21 + [share], [0.0] * 21 + [(share * (1 - share) / 31) ** 0.5])

    assert [jumped(count) >= ALARM_RULES["component_jump"].limit for count in (1, 4, 8, 20)] == [False] * 3 + [True]
    assert jump([0.5] * 22, [0.0] * 22) == 0


def test_held_out_noise_beside_a_rising_reward_raises_no_alarm() -> None:
    """40 tasks of which each has its own chance of success, which no version changes; training rises all the time."""
    draws, found, runs = random.Random(3), 0, 300
    for _ in range(runs):
        chances = [draws.random() for _ in range(40)]
        means = {10 * n: {task: float(draws.random() < one) for task, one in enumerate(chances)} for n in range(5)}
        found += any(
            list(judge_held_out(rising(version), {one: means[one] for one in means if one <= version}))
            for version in (20, 30, 40)
        )
    assert found <= 4


def rising(steps: int) -> list[StepMeans]:
    return [StepMeans(number, number / 100 + (number % 3) / 100) for number in range(1, steps + 1)]


def test_held_out_rewards_that_fall_raise_an_alarm_by_the_tasks_that_all_versions_have() -> None:
    means = {n: {task: 0.9 - n / 100 - (task % 4) * n / 200 for task in range(12)} for n in (10, 20, 30)}
    [found] = judge_held_out(rising(30), means)
    assert found.reason.startswith(
        "the reward on 12 held-out tasks falls from 0.725 (version 10) to 0.375 (version 30)"
    )
    del means[20][0], means[30][1]
    [found] = judge_held_out(rising(30), means)
    assert found.evidence["tasks"] == 10
    short, flat = {10: means[10], 20: means[20]}, [StepMeans(n, 0.5) for n in range(1, 31)]
    few = {one: {task: means[one][task] for task in range(2, 9)} for one in means}
    cases = [(rising(30), short), (rising(30), few), (flat, means), (rising(21), means), ([], means)]
    assert [list(judge_held_out(steps, given)) for steps, given in cases] == [[]] * 5
