"""The groups that may be sampled now: how many, and of which tasks. Pure functions of teams.

Counting keeps the bound on policy lag. Step n // groups_per_step + 1 consumes the n-th group that counts, so while
engines serve version v only the groups of steps up to v + max_policy_lag + 1 may be admitted. A token sampled now is
then trained at most `max_policy_lag` versions late.
"""

from __future__ import annotations

import random
from array import array
from bisect import bisect
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from types import MappingProxyType
from typing import TypedDict

from leyden.libs.contracts.config import Curriculum, GroupAgent, Sampling, Sft
from leyden.libs.contracts.ids import group_id
from leyden.libs.contracts.states import RunPhase
from leyden.libs.store.runs.admission import NewGroup, Replacements
from leyden.libs.store.runs.facts import EvaluationFacts, RunFacts
from leyden.services.controller.runs.phases import Team, due_evaluation, target_version

MAX_DRAWS = 100
"""Draws for a task that the batch does not have yet."""
MAX_EVALUATION_GROUPS = 1000
"""Groups of an evaluation admitted in one tick."""
NO_REPLACEMENTS = Replacements()


class _Played(TypedDict):
    agent: str | None
    runner_type: str


def groups_to_admit(
    team: Team,
    served: Mapping[str, int],
    solve_rates: Mapping[int, float] = MappingProxyType({}),
    replacements: Replacements = NO_REPLACEMENTS,
) -> list[NewGroup]:
    """Returns the groups to admit: those of the due evaluation, else those of training.

    Several policies learn from the same groups: the one that is furthest behind bounds them, and the one that refused
    most of them as stale gets others.

    Args: served: by run of the team the oldest version that an engine serves; solve_rates: of tasks with complete
        groups, for a curriculum; replacements: see `training_groups`
    """
    run, due = team.lead, due_evaluation(team)
    if run.phase is RunPhase.EVALUATING and due is not None:
        evaluation, version = due
        are_served = served[run.id] == version and all(
            served[one.id] == target_version(team, one) for one in team.others
        )
        return evaluation_groups(run.id, evaluation, version, run.config.group_agents) if are_served else []
    if run.phase is not RunPhase.RUNNING or due is not None or team.stop_reason is not None:
        return []
    if isinstance(run.config.algorithm, Sft):
        # It trains stored rollouts.
        return []
    training = [run, *(one for one in team.others if one.config.training.steps > 0)]
    count = training_groups_wanted(
        run.config.sampling,
        steps=run.config.training.steps,
        served_version=min(served[one.id] for one in training),
        counting=min(one.counting_groups for one in training),
    )
    return training_groups(run, count, served[run.id], solve_rates, replacements)


def training_groups_wanted(sampling: Sampling, *, steps: int, served_version: int, counting: int) -> int:
    """Returns how many training groups to admit now.

    Args: served_version: see `groups_to_admit`; counting: groups admitted so far that count or still may: all except
        cancelled ones, those that credit excluded, those that the trainer refused as stale, and those without variance
        that `refill_zero_variance` replaces. The count replaces those, so the trainer never starves.

    With 8 groups a step and a lag of 1: 16 while version 0 is served, 8 more with every version, none beyond the last
    step's:

    >>> sampling = Sampling(groups_per_step=8, max_policy_lag=1)
    >>> [training_groups_wanted(sampling, steps=3, served_version=v, counting=c) for v, c in ((0, 0), (1, 16), (2, 24))]
    [16, 8, 0]
    """
    reachable_steps = min(steps, served_version + sampling.max_policy_lag + 1)
    return max(0, reachable_steps * sampling.groups_per_step - counting)


def training_groups(
    run: RunFacts,
    count: int,
    served_version: int,
    solve_rates: Mapping[int, float] = MappingProxyType({}),
    replacements: Replacements = NO_REPLACEMENTS,
) -> list[NewGroup]:
    """Returns the run's next groups: every epoch is a new seeded shuffle of all tasks, or a curriculum draws them.

    Args: replacements: the tasks of lost groups come first, since the groups that are lost are not a fair draw: those
        of long rollouts go stale. A curriculum draws such tasks again by itself.
    """
    sampling, numbers = run.config.sampling, range(run.next_group, run.next_group + count)
    skipped = sampling.skip_groups
    lost = replacements.waiting[:count] if sampling.curriculum is None else ()
    if sampling.curriculum is None:
        turn = skipped + run.next_group - replacements.made
        turns = range(turn, turn + count - len(lost))
        tasks = [*(one.task_number for one in lost), *(task_of(sampling.seed, one, run.task_count) for one in turns)]
    else:
        draws = range(skipped + numbers.start, skipped + numbers.stop)
        tasks = drawn_tasks(sampling.curriculum, sampling.seed, draws, run.task_count, solve_rates)
    has_greedy = run.config.credit.baseline.type == "remax"
    agents = run.config.group_agents
    return [
        NewGroup(
            id=group_id(run.id, number),
            run_id=run.id,
            evaluation_id=None,
            number=number,
            dataset_id=run.dataset_id,
            task_number=task,
            size=sampling.group_size + has_greedy,
            admitted_version=served_version,
            **_played_by(agents, number),
            has_greedy=has_greedy,
            replaces=lost[place].id if place < len(lost) else None,
        )
        for place, (number, task) in enumerate(zip(numbers, tasks, strict=True))
    ]


def evaluation_groups(
    run_id: str, evaluation: EvaluationFacts, version: int, agents: Sequence[GroupAgent]
) -> list[NewGroup]:
    """Returns the evaluation's next groups: each task in the order of the dataset, with each agent in its order."""
    return [
        NewGroup(
            id=group_id(evaluation.id, number),
            run_id=run_id,
            evaluation_id=evaluation.id,
            number=number,
            dataset_id=evaluation.dataset_id,
            task_number=number // len(agents),
            size=evaluation.rollouts_per_task,
            admitted_version=version,
            **_played_by(agents, number),
        )
        for number in range(evaluation.groups, min(evaluation.expected, evaluation.groups + MAX_EVALUATION_GROUPS))
    ]


def _played_by(agents: Sequence[GroupAgent], number: int) -> _Played:
    """The agent of a group: they take turns, so that each plays as many groups of a run, whatever their tasks."""
    one = agents[number % len(agents)]
    return {"agent": one.name, "runner_type": one.runner.type}


def task_of(seed: int, turn: int, task_count: int) -> int:
    """Returns the task whose turn it is: position `turn mod task_count` in the shuffle of its epoch."""
    epoch, position = divmod(turn, task_count)
    return _shuffled(seed, epoch, task_count)[position]


def drawn_tasks(
    curriculum: Curriculum, seed: int, numbers: Sequence[int], task_count: int, solve_rates: Mapping[int, float]
) -> list[int]:
    """Draws a task for each number by weight, none twice while a draw finds others; the same for the same arguments.

    >>> rates = {0: 0.0, 1: 0.5, 2: 1.0}
    >>> tasks = [drawn_tasks(Curriculum(), 0, [number], 3, rates)[0] for number in range(1200)]
    >>> [round(tasks.count(task) / 100) for task in (0, 1, 2)]
    [1, 10, 1]
    """
    cumulative = list(accumulate(task_weight(curriculum, solve_rates.get(task)) for task in range(task_count)))
    tasks: list[int] = []
    for number in numbers:
        drawn = random.Random(f"{seed}:{number}")  # noqa: S311  # an order of tasks, no secret
        used = set(tasks[len(tasks) - len(tasks) % task_count :])
        for _ in range(MAX_DRAWS):
            task = min(bisect(cumulative, drawn.random() * cumulative[-1]), task_count - 1)
            if task not in used:
                break
        tasks.append(task)
    return tasks


def task_weight(curriculum: Curriculum, solve_rate: float | None) -> float:
    """Returns the weight of a task by its solve rate; None before its first group."""
    if solve_rate is None:
        return 1.0
    distance = abs(solve_rate - curriculum.target) / max(curriculum.target, 1.0 - curriculum.target)
    return max(curriculum.floor, 1.0 - distance)


@lru_cache(maxsize=8)
def _shuffled(seed: int, epoch: int, task_count: int) -> array[int]:
    order = array("l", range(task_count))
    # A text seed is hashed with SHA-512: the same order on every machine.
    random.Random(f"{seed}:{epoch}").shuffle(order)  # noqa: S311  # an order of tasks, no secret
    return order
