"""Decides whether a run ends before its last step: by its rewards, since nothing trains, or because it failed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from typing import NamedTuple

from prometheus_client import Counter

from leyden.libs.contracts.call_counts import why_nothing_trains
from leyden.libs.contracts.config import EarlyStopping
from leyden.libs.contracts.rewards import gain, reaches
from leyden.libs.contracts.states import RunPhase
from leyden.libs.faults import fault_point
from leyden.libs.store.database import ReadSession, Session
from leyden.libs.store.demonstrations import runs_without_demonstrations
from leyden.libs.store.read.best import Measurement, measured_tasks, own_evaluations
from leyden.libs.store.read.call_counts import absent_roles, runs_that_train_nothing
from leyden.libs.store.runs.facts import BrokenRun, RunFacts
from leyden.libs.store.runs.phases import (
    Phase,
    cancel_open_work,
    cancel_training,
    causes_of_runs,
    runs_excluded_by_credit,
    step_rewards,
    store_stop_reason,
    write_phases,
)
from leyden.libs.telemetry import logger
from leyden.services.controller.runs.phases import Team

log = logger()

RUNS_FAILED = Counter("controller_runs_failed_total", "Runs that the controller ended as failed.")
WORDS = {"evaluation_reward": ("evaluation reward", "version"), "train_reward": ("train reward", "step")}


def stop_reason(stopping: EarlyStopping, values: Sequence[tuple[int, float]]) -> str | None:
    """Returns why training ends, in words for users; None while it goes on.

    The first value that meets a condition decides, so later values never change the answer.

    Args: values: versions or steps with the metric's value, in order

    >>> stop_reason(EarlyStopping(patience=2), [(0, 0.1), (10, 0.5), (20, 0.5), (30, 0.4)])
    'stopped early at version 30: the evaluation reward was not better than 0.5 (version 10) for 2 values in a row'
    """
    return next(filter(None, (_reason(stopping, one) for one in _progress(stopping, values))), None)


def stop_reason_of_evaluations(stopping: EarlyStopping, measured: Iterable[Measurement]) -> str | None:
    """Returns why training ends by its evaluations, in words for users; None while it goes on.

    Each evaluation is judged with those before it alone, on the tasks that all of them counted, so later ones never
    change the answer. One that lost most of its tasks is left out; a target is reached by all tasks alone.

    Args: measured: ended evaluations, in the order of versions
    """
    compared = [one for one in measured if one.is_compared]
    counted: list[frozenset[int]] = [frozenset(one.means) for one in compared]
    shared = accumulate(counted, lambda before, one: before & one)
    begin, window = 0, stopping.average_over
    for tasks, equal in groupby(shared):
        end = begin + len(list(equal))
        if not tasks:
            return None
        values = [(one.version, one.mean(tasks)) for one in compared[:end]]
        for index, now in enumerate(_progress(stopping, values), window - 1):
            is_full = all(one.is_full for one in compared[index + 1 - window : index + 1])
            if index >= begin and (reason := _reason(stopping, now, may_reach_target=is_full)) is not None:
                return reason
        begin = end
    return None


class _Moment(NamedTuple):
    """A value with the best one before it, and how many in a row were not better than that, this one included."""

    at: int
    value: float
    best: tuple[int, float] | None
    worse: int


def _progress(stopping: EarlyStopping, values: Sequence[tuple[int, float]]) -> Iterator[_Moment]:
    best: tuple[int, float] | None = None
    worse = 0
    for index in range(stopping.average_over - 1, len(values)):
        window = [value for _, value in values[index + 1 - stopping.average_over : index + 1]]
        at, value = values[index][0], sum(window) / len(window)
        worse = 0 if best is None or gain(best[1], value) > 0 else worse + 1
        yield _Moment(at, value, best, worse)
        if worse == 0:
            best = (at, value)


def _reason(stopping: EarlyStopping, now: _Moment, *, may_reach_target: bool = True) -> str | None:
    metric, noun = WORDS[stopping.metric]
    if stopping.target is not None and may_reach_target and reaches(now.value, stopping.target):
        return (
            f"stopped early at {noun} {now.at}: the {metric} {now.value:.4g} reached the target {stopping.target:.4g}"
        )
    if stopping.patience is not None and now.best is not None and now.worse >= stopping.patience:
        return (
            f"stopped early at {noun} {now.at}: the {metric} was not better than {now.best[1]:.4g}"
            f" ({noun} {now.best[0]}) for {now.worse} values in a row"
        )
    return None


class EarlyStops:
    """The decisions to stop early. Rewards are read only after a step or an evaluation ended.

    A decision is final, and stored: a later leader would read rewards that have changed.
    """

    def __init__(self) -> None:
        self._judged: dict[str, tuple[int, int]] = {}
        """By run the numbers of steps and ended evaluations that did not stop it."""

    async def apply(self, session: Session, team: Team, finished_evaluations: Collection[str]) -> Team:
        """Returns the team with the decision, which ends its open training groups."""
        run = team.lead
        if run.stop_reason is None:
            run = replace(run, stop_reason=await self._decide(session, run, finished_evaluations))
            team = replace(team, lead=run)
        if team.stop_reason is not None and run.open_training_groups:
            await cancel_training(session, run.id)
            fault_point("controller.training_stopped")
            team = replace(team, lead=replace(run, open_training_groups=0))
        return team

    async def _decide(self, session: Session, run: RunFacts, finished: Collection[str]) -> str | None:
        stopping = run.config.training.early_stopping
        if stopping is None or run.has_all_steps:
            return None
        ended = {one.id for one in run.evaluations if one.finished}
        ended |= {one for one in finished if one.startswith(f"{run.id}.")}
        progress = run.steps_done, len(ended)
        if self._judged.get(run.id) == progress:
            return None
        if stopping.metric == "evaluation_reward":
            measured = own_evaluations(await measured_tasks(session, run.id), run.config)
            reason = stop_reason_of_evaluations(stopping, measured)
        else:
            reason = stop_reason(stopping, await step_rewards(session, run.id))
        if reason is None:
            self._judged[run.id] = progress
        else:
            await store_stop_reason(session, run.id, reason)
        return reason


async def idle_runs(session: ReadSession, groups: int) -> dict[str, str]:
    """Returns the runs in which nothing trains, with the reason and the remedy: their newest steps had no token to
    train, their first two had no call of any role that is to train, or credit excluded their newest groups; and runs of
    fine-tuning that have lost their demonstrations before credit selected them.

    Args: groups: a run fails after so many excluded groups in a row
    """
    excluded = {
        run_id: f"credit excluded {_excluded(count)}, so that nothing trains: {cause}"
        for run_id, (count, cause) in (await runs_excluded_by_credit(session, groups)).items()
    }
    absent = {
        run_id: str(found)
        for run_id, found in (await absent_roles(session)).items()
        if found.are_all and len(found.steps) > 1
    }
    silent = {
        run_id: f"no token of {'steps' if len(steps) > 1 else 'step'} {' and '.join(map(str, steps))} can be trained:"
        f" {why_nothing_trains(counts)}"
        for run_id, (steps, counts) in (await runs_that_train_nothing(session)).items()
    }
    lacking = {
        run_id: f"none of the rollouts of {', '.join(runs)} is a demonstration any more, or their calls are pruned:"
        " create the run anew with other algorithm.runs, or a lower min_reward"
        for run_id, runs in (await runs_without_demonstrations(session)).items()
    }
    return excluded | absent | silent | lacking


def _excluded(groups: int | None) -> str:
    if groups is None:
        return "every group"
    return f"the last {groups} groups" if groups > 1 else "the last group"


async def fail_runs(session: Session, causes: dict[str, str]) -> None:
    """Fails runs, or policies with their runs, and cancels their work."""
    if causes:
        causes = {**await causes_of_runs(session, causes), **causes}
        await write_phases(session, [Phase(run, RunPhase.FAILED, cause) for run, cause in causes.items()])
        await cancel_open_work(session, list(causes), "the run failed")
        RUNS_FAILED.inc(len(causes))
        log.error("runs failed", causes=causes)


async def fail_broken(session: Session, broken: Sequence[BrokenRun]) -> bool:
    """Fails the runs whose documents do not parse. A completed one keeps its phase: its evaluations fail, and the run
    tells the reason.

    Returns: whether any of it is new
    """
    failing = {one.id: one.cause for one in broken if one.phase is not RunPhase.COMPLETED}
    await fail_runs(session, failing)
    completed = [one for one in broken if one.phase is RunPhase.COMPLETED and one.reason != one.cause]
    if completed:
        await write_phases(session, [Phase(one.id, RunPhase.COMPLETED, one.cause) for one in completed])
        await cancel_open_work(session, [one.of_run for one in completed], "the evaluation failed")
        log.error("evaluations failed", causes={one.id: one.cause for one in completed})
    return bool(failing or completed)
