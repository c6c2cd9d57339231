from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.libs.contracts.config import Baseline, Credit, Curriculum, RunConfig, Sampling
from leyden.libs.store.runs.admission import LostGroup, NewGroup, Replacements
from leyden.libs.store.training import ReadyGroup
from leyden.services.controller.runs.admission import (
    drawn_tasks,
    evaluation_groups,
    task_of,
    training_groups,
    training_groups_wanted,
)
from leyden.services.trainer.rows.selection import select_groups
from tests.support import builders
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
    tries=st.integers(0, 2),
    steps=st.integers(1, 8),
    choices=st.lists(st.integers(0, 3), max_size=200),
    flat=st.lists(st.booleans(), max_size=200),
)
def test_no_schedule_admits_a_token_that_could_be_stale_or_starves_the_trainer(
    lag: int, per_step: int, tries: int, steps: int, choices: list[int], flat: list[bool]
) -> None:
    """Plays admission against a trainer that takes finished groups in order, while any group may be excluded or have no
    variance."""
    sampling = Sampling(groups_per_step=per_step, max_policy_lag=lag, refill_zero_variance=tries)
    version, waiting, lacks_variance = 0, list[tuple[int, bool]](), iter(flat)

    def counting() -> int:
        without_variance = sum(flat for _, flat in waiting)
        return version * per_step + len(waiting) - min(without_variance, sampling.refills)

    def play(exclude: bool) -> None:
        nonlocal version, waiting
        # A group that finishes without variance makes room for another one.
        while count := training_groups_wanted(sampling, steps=steps, served_version=version, counting=counting()):
            waiting += [(version, next(lacks_variance, False)) for _ in range(count)]
        if exclude and waiting:
            waiting.pop()
            return
        if version < steps:
            ready = [ReadyGroup(str(number), admitted, not flat) for number, (admitted, flat) in enumerate(waiting)]
            found = select_groups(
                ready, step=version + 1, groups_per_step=per_step, max_lag=lag, refills=sampling.refills
            )
            assert found.complete, "the trainer starves"
            assert not found.stale
            used = {*found.trained, *found.zero_variance, *found.replaced}
            waiting = [one for number, one in enumerate(waiting) if str(number) not in used]
            version += 1

    for choice in choices:
        play(exclude=choice == 0)
    while version < steps:
        play(exclude=False)
    # Groups without variance that replaced nothing may stay.
    assert all(flat for _, flat in waiting)
    assert len(waiting) <= sampling.refills


def test_a_curriculum_draws_tasks_near_the_target_and_repeats_no_draw() -> None:
    curriculum, rates = Curriculum(floor=0.1), {0: 0.0, 1: 0.5, 2: 1.0, 3: 0.25}
    tasks = [drawn_tasks(curriculum, 0, [number], 5, rates)[0] for number in range(2700)]
    shares = [tasks.count(task) / 1000 for task in range(5)]
    # Task 4 is new.
    assert shares == pytest.approx([0.1, 1.0, 0.1, 0.5, 1.0], abs=0.1)
    assert drawn_tasks(curriculum, 0, range(5, 10), 5, rates) == drawn_tasks(curriculum, 0, range(5, 10), 5, rates)
    # A batch has every task once before any comes again.
    batch = drawn_tasks(curriculum, 0, range(10), 5, rates)
    assert sorted(batch[:5]) == sorted(batch[5:]) == list(range(5))
    assert batch != drawn_tasks(curriculum, 1, range(10), 5, rates)


@given(seed=st.integers(), tasks=st.integers(1, 50), epoch=st.integers(0, 3))
def test_every_epoch_has_every_task_once(seed: int, tasks: int, epoch: int) -> None:
    numbers = range(epoch * tasks, (epoch + 1) * tasks)
    assert sorted(task_of(seed, number, tasks) for number in numbers) == list(range(tasks))


def test_the_order_of_tasks_is_seeded_and_changes_with_the_epoch() -> None:
    order = [task_of(7, number, 100) for number in range(100)]
    assert order == [task_of(7, number, 100) for number in range(100)]
    assert order != [task_of(8, number, 100) for number in range(100)]
    assert order != [task_of(7, number, 100) for number in range(100, 200)]


@given(seed=st.integers(0, 3), tasks=st.integers(1, 9), losses=st.lists(st.sets(st.integers(0, 9)), max_size=12))
def test_lost_tasks_come_again_and_cost_no_other_its_turn(seed: int, tasks: int, losses: list[set[int]]) -> None:
    """Plays admissions of which some groups are lost; each task but those lost twice counts once an epoch."""
    config = CONFIG.model_copy(update={"sampling": Sampling(group_size=2, seed=seed)})
    admitted, lost = list[NewGroup](), set[str]()
    for places in losses:
        replaced = {group.replaces for group in admitted}
        waiting = [group for group in admitted if group.id in lost - replaced and group.replaces is None]
        past = Replacements(
            sum(group.replaces is not None for group in admitted),
            tuple(LostGroup(group.id, group.task_number) for group in waiting),
        )
        made = training_groups(run(config=config, task_count=tasks, next_group=len(admitted)), 10, 0, replacements=past)
        assert [group.replaces for group in made[: len(waiting)]] == [group.id for group in waiting][:10]
        admitted += made
        lost |= {made[place].id for place in places}
    by_id = {group.id: group for group in admitted}
    assert all(by_id[one.replaces].task_number == one.task_number for one in admitted if one.replaces is not None)
    turns = [group.task_number for group in admitted if group.replaces is None]
    assert turns == [task_of(seed, turn, tasks) for turn in range(len(turns))]


@pytest.mark.parametrize("curriculum", [None, Curriculum()])
def test_a_run_that_skips_groups_goes_on_with_the_tasks_of_one_that_does_not(curriculum: Curriculum | None) -> None:
    def task(skipped: int, number: int) -> int:
        sampling = Sampling(seed=7, skip_groups=skipped, curriculum=curriculum)
        config = CONFIG.model_copy(update={"sampling": sampling})
        [made] = training_groups(run(config=config, task_count=10, next_group=number), 1, served_version=0)
        return made.task_number

    assert [task(12, number) for number in range(20)] == [task(0, number) for number in range(12, 32)]


def test_ids_of_groups_are_deterministic() -> None:
    config = CONFIG.model_copy(update={"sampling": Sampling(group_size=2)})
    made = training_groups(run(config=config, task_count=3, next_group=4), 2, served_version=1)
    assert [(group.id, group.number, group.admitted_version, group.rollout_ids) for group in made] == [
        ("run-a.4", 4, 1, ["run-a.4.0", "run-a.4.1"]),
        ("run-a.5", 5, 1, ["run-a.5.0", "run-a.5.1"]),
    ]
    config = config.model_copy(update={"credit": Credit(baseline=Baseline(type="remax"))})
    [more] = training_groups(run(config=config), 1, served_version=1)
    assert (more.size, more.has_greedy) == (3, True)
    [one] = evaluation_groups("run-a", evaluation(groups=2, expected=3), 9, CONFIG.group_agents)
    assert (one.id, one.evaluation_id, one.task_number, one.rollout_ids, one.admitted_version) == (
        *("e1.2", "e1", 2),
        *(["e1.2.0"], 9),
    )
    assert not one.has_greedy


def test_agents_play_groups_in_turn_and_each_task_of_an_evaluation() -> None:
    agents = [{"name": "plain", "command": ["a"]}, {"name": "served", "runner": {"type": "external"}}]
    config = RunConfig.model_validate(builders.run_document(agent=None, agents=agents))
    made = training_groups(run(config=config, next_group=3), 3, served_version=1)
    assert [(one.number, one.agent, one.runner_type) for one in made] == [
        (3, "served", "external"),
        (4, "plain", "process"),
        (5, "served", "external"),
    ]
    measured = evaluation_groups("run-a", evaluation(groups=1, expected=4), 9, config.group_agents)
    assert [(one.number, one.task_number, one.agent) for one in measured] == [
        (1, 0, "served"),
        (2, 1, "plain"),
        (3, 1, "served"),
    ]
