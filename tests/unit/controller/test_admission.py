from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.libs.contracts.config import Sampling
from leyden.services.controller.admission import evaluation_groups, task_of, training_groups, training_groups_wanted
from tests.unit.controller.test_phases import CONFIG, evaluation, run


@pytest.mark.parametrize(
    ("lag", "served", "counting", "wanted"),
    [
        # Lag 0 alternates: the groups of one step, then none until its version is served.
        (0, 0, 0, 4),
        (0, 0, 4, 0),
        (0, 1, 4, 4),
        # Lag 1 samples one step ahead.
        (1, 0, 0, 8),
        (1, 0, 5, 3),
        (1, 1, 8, 4),
        # An excluded or stale group no longer counts and is replaced.
        (1, 1, 11, 1),
        # Nothing is sampled that no step would train.
        (1, 9, 40, 0),
        (5, 8, 36, 4),
    ],
)
def test_groups_wanted(lag: int, served: int, counting: int, wanted: int) -> None:
    sampling = Sampling(groups_per_step=4, max_policy_lag=lag)
    assert training_groups_wanted(sampling, steps=10, served_version=served, counting=counting) == wanted


@given(
    lag=st.integers(0, 4),
    per_step=st.integers(1, 5),
    steps=st.integers(1, 8),
    choices=st.lists(st.integers(0, 3), max_size=200),
)
def test_no_schedule_admits_a_token_that_could_be_stale_or_starves_the_trainer(
    lag: int, per_step: int, steps: int, choices: list[int]
) -> None:
    """Plays admission against a trainer that takes finished groups in order, while any group may be excluded."""
    sampling = Sampling(groups_per_step=per_step, max_policy_lag=lag)
    version, waiting, trained = 0, [], 0

    def play(exclude: bool) -> None:
        nonlocal version, waiting, trained
        count = training_groups_wanted(sampling, steps=steps, served_version=version, counting=trained + len(waiting))
        waiting += [version] * count
        if exclude and waiting:
            waiting.pop()
            return
        if version < steps:
            assert len(waiting) >= per_step, "the trainer starves"
            batch, waiting = waiting[:per_step], waiting[per_step:]
            assert all(version - admitted <= lag for admitted in batch), "stale"
            trained += per_step
            version += 1

    for choice in choices:
        play(exclude=choice == 0)
    while version < steps:
        play(exclude=False)
    assert (trained, waiting) == (steps * per_step, [])


@given(seed=st.integers(), tasks=st.integers(1, 50), epoch=st.integers(0, 3))
def test_every_epoch_has_every_task_once(seed: int, tasks: int, epoch: int) -> None:
    numbers = range(epoch * tasks, (epoch + 1) * tasks)
    assert sorted(task_of(seed, number, tasks) for number in numbers) == list(range(tasks))


def test_the_order_of_tasks_is_seeded_and_changes_with_the_epoch() -> None:
    order = [task_of(7, number, 100) for number in range(100)]
    assert order == [task_of(7, number, 100) for number in range(100)]
    assert order != [task_of(8, number, 100) for number in range(100)]
    assert order != [task_of(7, number, 100) for number in range(100, 200)]


def test_ids_of_groups_are_deterministic() -> None:
    config = CONFIG.model_copy(update={"sampling": Sampling(group_size=2)})
    made = training_groups(run(config=config, task_count=3, next_group=4), 2, served_version=1)
    assert [(group.id, group.number, group.admitted_version, group.rollout_ids) for group in made] == [
        ("run-a.4", 4, 1, ["run-a.4.0", "run-a.4.1"]),
        ("run-a.5", 5, 1, ["run-a.5.0", "run-a.5.1"]),
    ]
    [one] = evaluation_groups("run-a", evaluation(groups=2, expected=3), 9)
    assert (one.id, one.evaluation_id, one.task_number, one.rollout_ids, one.admitted_version) == (
        *("e1.2", "e1", 2),
        *(["e1.2.0"], 9),
    )
