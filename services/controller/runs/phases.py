"""The runs that have each pool's engines, the due evaluation, and the phase of every run. Pure functions of `RunFacts`.

One run of a pool at a time has its engines, or as many as share them. The others wait in `pending` (or stay `paused`)
with the reason; a paused run keeps the engines until its live attempts have ended.

A run with several policies has an engine of each policy's pool or waits, and reserves none meanwhile: a pool would stay
idle. The runs that carry its further policies share its place in the line and its phase.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from leyden.libs.contracts.states import RUN_TRANSITIONS, RunIntent, RunPhase
from leyden.libs.store.engines import Assignment
from leyden.libs.store.runs.facts import EvaluationFacts, RunFacts

AT_WORK = frozenset({RunPhase.RUNNING, RunPhase.EVALUATING})


def due_evaluation(run: RunFacts) -> tuple[EvaluationFacts, int] | None:
    """Returns the first unfinished evaluation whose version exists, and that version.

    Version null means the last one once training has ended.
    """
    for evaluation in sorted(run.evaluations, key=lambda evaluation: evaluation.number):
        version = _version_of(run, evaluation)
        if not evaluation.finished and version is not None and version in run.servable_versions:
            return evaluation, version
    return None


def assign(runs: Sequence[RunFacts], pools: Mapping[str, int]) -> dict[str, Assignment]:
    """Returns for each pool the runs that have its engines: those at work or finishing their open groups, then the
    oldest in line that get engines of all their pools. Whoever lacks one reserves none of the others.

    Args: pools: how many runs a pool takes at a time
    """
    by_id, teams = {run.id: run for run in runs}, defaultdict[str, list[RunFacts]](list)
    for run in sorted(runs, key=lambda one: one.id):
        teams[run.lead_run_id or run.id].append(run)
    # A run whose lead is over needs no engines.
    leads = [by_id[one] for one in teams if one in by_id and (_has_engines(by_id[one]) or _waits(by_id[one]))]
    assigned, waiting = ({pool: list[str]() for pool in pools} for _ in range(2))
    for lead in sorted(leads, key=lambda one: (not _has_engines(one), one.created_at, one.id)):
        team = teams[lead.id]
        is_free = full_pool(team, {pool: len(assigned[pool]) for pool in pools}, pools) is None
        for run in team:
            (assigned if is_free else waiting).get(run.config.pool, []).append(run.id)
    return {pool: Assignment(tuple(assigned[pool]), tuple(waiting[pool])) for pool in pools}


def full_pool(team: Sequence[RunFacts], used: Mapping[str, int], pools: Mapping[str, int]) -> str | None:
    """Returns the first pool that does not take a run with its further policies; None where they fit.

    Args: team: the run and those that carry its further policies; used: how many runs have engines of each pool;
        pools: how many it takes at a time
    """
    needed = Counter(run.config.pool for run in team)
    return next((one for one, count in needed.items() if used.get(one, 0) + count > pools.get(one, 0)), None)


def waiting_reason(
    team: Sequence[RunFacts], assignments: Mapping[str, Assignment], pools: Mapping[str, int]
) -> str | None:
    """Says, for users, why a run has no engines; None when it has them.

    Args: team: the run and those that carry its further policies; pools: how many runs a pool takes at a time
    """
    holders = {pool: one.run_ids for pool, one in assignments.items()}
    if all(run.id in holders.get(run.config.pool, ()) for run in team):
        return None
    if (pool := full_pool(team, {}, pools)) is not None:
        if pool not in pools:
            return f"there is no pool {pool!r}: add it to CONTROLLER_POOLS, or cancel the run"
        return (
            f"waiting for engines of pool {pool}, which takes too few runs at a time for the run's policies"
            f" ({pools[pool]}): raise its `adapters` in CONTROLLER_POOLS, or cancel the run"
        )
    pool = full_pool(team, {name: len(ids) for name, ids in holders.items()}, pools) or team[0].config.pool
    active = holders[pool]
    reason = f"waiting for an engine of pool {pool}: {', '.join(active)} {'has' if len(active) == 1 else 'have'} them"
    if len(team) == 1:
        return reason
    return f"{reason}; its {len(team)} policies begin at the same time, so that later runs may begin before"


def _has_engines(run: RunFacts) -> bool:
    return run.phase in AT_WORK or (run.phase is RunPhase.PAUSED and run.live_attempts > 0)


def next_phase(run: RunFacts, waiting: str | None) -> tuple[RunPhase, str | None]:
    """Derives the phase from intent and progress, with the reason where the run waits.

    Args: waiting: why the run has no engines; None where it has them
    """
    phase, reason = _phase(run, waiting)
    if phase is run.phase or phase in RUN_TRANSITIONS[run.phase]:
        return phase, reason
    return run.phase, run.reason


def policy_phase(run: RunFacts, lead: tuple[RunPhase, str | None]) -> tuple[RunPhase, str | None]:
    """Returns the phase of a run that carries a policy of another one: that one's.

    Args: lead: the phase of the other run, with its reason
    """
    phase, reason = lead
    if phase is run.phase or phase in RUN_TRANSITIONS[run.phase]:
        return phase, f"run {run.lead_run_id} failed" if phase is RunPhase.FAILED else reason
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


def policy_target(run: RunFacts, lead: RunFacts) -> int | None:
    """Returns the version that engines should serve of a run that carries a policy of `lead`.

    During an evaluation of version v it is version v of that policy, too, if there is one.
    """
    due = due_evaluation(lead)
    if due is not None and target_version(lead) == due[1] and due[1] in run.servable_versions:
        return due[1]
    return run.latest_version


def trained(run: RunFacts) -> bool:
    """Whether every step of the run and of its further policies is done, or it stops early."""
    return has_made_steps(run) and not run.has_unfinished_policies


def has_made_steps(run: RunFacts) -> bool:
    """Whether the run's own trainer has no step to make; without steps it has to record version 0."""
    if run.latest_version is None:
        return False
    return run.steps_done >= run.config.training.steps or run.stop_reason is not None


def _phase(run: RunFacts, waiting: str | None) -> tuple[RunPhase, str | None]:
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
    if waiting is not None:
        return run.phase, waiting
    return (RunPhase.RUNNING if due_evaluation(run) is None else RunPhase.EVALUATING), None


def _waits(run: RunFacts) -> bool:
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
