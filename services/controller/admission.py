"""How many groups may be sampled now, and of which tasks. Pure functions; `worker` gives the numbers.

The bound on policy lag is kept here, by counting: a group admitted as the n-th that will count is consumed by step
n // groups_per_step + 1, so while engines serve version v only the groups of steps up to v + max_policy_lag + 1 may be
admitted, and a token sampled now is trained at most `max_policy_lag` versions late.
"""

from __future__ import annotations

import random
from array import array
from functools import lru_cache

from leyden.libs.contracts.config import Sampling
from leyden.libs.contracts.ids import group_id
from leyden.libs.store.groups import NewGroup


def training_groups_wanted(sampling: Sampling, *, steps: int, served_version: int, counting: int) -> int:
    """How many training groups to admit now.

    Args: served_version: the oldest version that an engine of the run serves; counting: groups admitted so far that
        count or still may: all except cancelled ones, those that credit excluded and those that the trainer refused as
        stale. What does not count is thereby replaced, and the trainer never starves.

    With 8 groups a step and a lag of 1: 16 while version 0 is served, 8 more with every version, none beyond the last
    step's:

    >>> sampling = Sampling(groups_per_step=8, max_policy_lag=1)
    >>> [training_groups_wanted(sampling, steps=3, served_version=v, counting=c) for v, c in ((0, 0), (1, 16), (2, 24))]
    [16, 8, 0]
    """
    reachable_steps = min(steps, served_version + sampling.max_policy_lag + 1)
    return max(0, reachable_steps * sampling.groups_per_step - counting)


def training_groups(
    run_id: str,
    dataset_id: str,
    sampling: Sampling,
    *,
    task_count: int,
    first_number: int,
    count: int,
    served_version: int,
) -> list[NewGroup]:
    """The next groups of a run: every epoch is a new seeded shuffle of all tasks."""
    return [
        NewGroup(
            id=group_id(run_id, number),
            run_id=run_id,
            evaluation_id=None,
            number=number,
            dataset_id=dataset_id,
            task_number=task_of(sampling.seed, number, task_count),
            size=sampling.group_size,
            admitted_version=served_version,
        )
        for number in range(first_number, first_number + count)
    ]


def evaluation_groups(
    run_id: str,
    evaluation_id: str,
    dataset_id: str,
    *,
    first_number: int,
    count: int,
    rollouts_per_task: int,
    version: int,
) -> list[NewGroup]:
    """The next groups of an evaluation: task n is group n, in the order of the dataset."""
    return [
        NewGroup(
            id=group_id(evaluation_id, number),
            run_id=run_id,
            evaluation_id=evaluation_id,
            number=number,
            dataset_id=dataset_id,
            task_number=number,
            size=rollouts_per_task,
            admitted_version=version,
        )
        for number in range(first_number, first_number + count)
    ]


def task_of(seed: int, number: int, task_count: int) -> int:
    """The task of the run's group `number`: position `number mod task_count` in the shuffle of its epoch."""
    epoch, position = divmod(number, task_count)
    return _shuffled(seed, epoch, task_count)[position]


@lru_cache(maxsize=8)
def _shuffled(seed: int, epoch: int, task_count: int) -> array[int]:
    order = array("l", range(task_count))
    # A text seed is hashed with SHA-512: the same order on every machine.
    random.Random(f"{seed}:{epoch}").shuffle(order)  # noqa: S311  # an order of tasks, no secret
    return order
