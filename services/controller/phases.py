"""The run that has each pool's engines, the due evaluation, and the phase of every run. Pure functions of `RunFacts`.

One run of a pool at a time has its engines. The others wait in `pending` (or stay `paused`) with the reason; a paused
run keeps the engines until its live attempts have ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from leyden.libs.contracts.states import RUN_TRANSITIONS, RunIntent, RunPhase
from leyden.libs.store.engines import Assignment
from leyden.libs.store.groups import EvaluationFacts, RunFacts

AT_WORK = frozenset({RunPhase.RUNNING, RunPhase.EVALUATING})
ENGINES_WANTED = AT_WORK | {RunPhase.PENDING}


def due_evaluation(run: RunFacts) -> tuple[EvaluationFacts, int] | None:
    """Returns the first unfinished evaluation whose version exists, and that version.

    Version null means the last one once training has ended.
    """
    for evaluation in sorted(run.evaluations, key=lambda evaluation: evaluation.number):
        version = _version_of(run, evaluation)
        if not evaluation.finished and version is not None and version in run.servable_versions:
            return evaluation, version
    return None


def assign(runs: Sequence[RunFacts], pools: Iterable[str]) -> dict[str, Assignment]:
    """Returns for each pool the run that has its engines: the one at work or finishing its open groups, else the oldest
    in line."""
    by_age = sorted(runs, key=lambda run: (run.created_at, run.id))
    return {pool: _assignment([run for run in by_age if run.config.pool == pool]) for pool in pools}


def _assignment(by_age: Sequence[RunFacts]) -> Assignment:
    owning = [run for run in by_age if run.phase in AT_WORK or (run.phase is RunPhase.PAUSED and run.live_attempts)]
    waiting = [run for run in by_age if _waits_for_engines(run)]
    line = [run.id for run in (*owning, *waiting)]
    return Assignment(line[0], tuple(line[1:])) if line else Assignment(None)


def next_phase(run: RunFacts, active: str | None) -> tuple[RunPhase, str | None]:
    """Derives the phase from intent and progress, with the reason where the run waits."""
    phase, reason = _phase(run, active)
    if phase is run.phase or phase in RUN_TRANSITIONS[run.phase]:
        return phase, reason
    return run.phase, run.reason


def target_version(run: RunFacts) -> int | None:
    """Returns the version that engines should serve: the due evaluation's, else the newest. None before version 0.

    Before the first group of an evaluation, open training groups end on the newest version.
    """
    due = due_evaluation(run)
    if due is None:
        return run.latest_version
    evaluation, version = due
    waits = run.open_training_groups and not evaluation.groups
    return run.latest_version if waits else version


def trained(run: RunFacts) -> bool:
    """Whether every step of the run is done, or it stops early; a run without steps needs its trainer to record
    version 0."""
    if run.latest_version is None:
        return False
    return run.steps_done >= run.config.training.steps or run.stop_reason is not None


def _phase(run: RunFacts, active: str | None) -> tuple[RunPhase, str | None]:
    if run.intent is RunIntent.CANCELLED:
        return RunPhase.CANCELLED, None
    if run.phase is RunPhase.FAILED or run.intent is RunIntent.DELETED:
        return run.phase, run.reason
    if run.phase is RunPhase.COMPLETED and due_evaluation(run) is None:
        return RunPhase.COMPLETED, run.reason
    if run.intent is RunIntent.PAUSED:
        return RunPhase.PAUSED, None
    if trained(run) and due_evaluation(run) is None and run.phase in AT_WORK:
        return RunPhase.COMPLETED, run.stop_reason
    if run.id != active:
        return (
            run.phase,
            f"waiting for an engine of pool {run.config.pool}: {active} has them" if active else run.reason,
        )
    return (RunPhase.RUNNING if due_evaluation(run) is None else RunPhase.EVALUATING), None


def _waits_for_engines(run: RunFacts) -> bool:
    if run.intent is not RunIntent.RUNNING:
        return False
    if run.phase is RunPhase.COMPLETED:
        return due_evaluation(run) is not None
    return run.phase in {RunPhase.PENDING, RunPhase.PAUSED}


def _version_of(run: RunFacts, evaluation: EvaluationFacts) -> int | None:
    if evaluation.policy_version is not None:
        return evaluation.policy_version
    # A trainer that is asked to stop early may still commit its step.
    if evaluation.started_version in run.servable_versions:
        return evaluation.started_version
    return run.latest_version if trained(run) else None
