"""The runs that have each pool's engines, the due evaluation, and the phase of every run. Pure functions of teams.

One team of a pool at a time has its engines, or as many as share them. The others wait in `pending` (or stay `paused`)
with the reason; a paused run keeps the engines until its live attempts have ended.

A team has an engine of each policy's pool or waits, and reserves none meanwhile: a pool would stay idle.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from leyden.libs.contracts.states import RUN_TRANSITIONS, RunIntent, RunPhase
from leyden.libs.store.engines import Assignment
from leyden.libs.store.runs.facts import EvaluationFacts, RunFacts
from leyden.libs.store.runs.phases import Phase

AT_WORK = frozenset({RunPhase.RUNNING, RunPhase.EVALUATING})


@dataclass(frozen=True)
class Team:
    """A run with its own model, and its further policies: one place in the line, one phase, the same groups."""

    lead: RunFacts
    others: tuple[RunFacts, ...] = ()

    @property
    def stop_reason(self) -> str | None:
        """Why training ends early; None where the last step was made after all, as the decision came."""
        return None if self.lead.has_all_steps else self.lead.stop_reason

    @property
    def runs(self) -> tuple[RunFacts, ...]:
        """All of its policies, the run's own model first."""
        return self.lead, *self.others

    def has_made_steps(self, run: RunFacts) -> bool:
        """Whether a run's own trainer has no step to make; without steps it has to record version 0."""
        return run.has_all_steps or (run.latest_version is not None and self.stop_reason is not None)

    @property
    def trained(self) -> bool:
        """Whether every step of each policy is done, or training stops early."""
        return all(map(self.has_made_steps, self.runs))

    def can_serve(self, version: int) -> bool:
        """Whether the run's own model has a version, and each further policy has come as far, or makes no later one."""
        return version in self.lead.servable_versions and all(
            self.has_made_steps(one) or (one.latest_version is not None and one.latest_version >= version)
            for one in self.others
        )


def teams_of(runs: Sequence[RunFacts]) -> list[Team]:
    """Returns the teams of the runs, in their order."""
    others = defaultdict[str | None, list[RunFacts]](list)
    for run in runs:
        others[run.of_run].append(run)
    return [Team(lead, tuple(others[lead.id])) for lead in others[None]]


def due_evaluation(team: Team) -> tuple[EvaluationFacts, int] | None:
    """Returns the first unfinished evaluation whose version all policies have made, and that version.

    Version null means the last one once training has ended.
    """
    for evaluation in sorted(team.lead.evaluations, key=lambda evaluation: evaluation.number):
        version = _version_of(team, evaluation)
        if not evaluation.finished and version is not None and team.can_serve(version):
            return evaluation, version
    return None


def assign(teams: Sequence[Team], pools: Mapping[str, int]) -> dict[str, Assignment]:
    """Returns for each pool the runs that have its engines: those at work or finishing their open groups, then the
    oldest in line that get engines of all their pools. Whoever lacks one reserves none of the others.

    Args: pools: how many runs a pool takes at a time
    """
    assigned, waiting = ({pool: list[str]() for pool in pools} for _ in range(2))
    in_line = [team for team in teams if _has_engines(team.lead) or _waits(team)]
    for team in sorted(in_line, key=lambda one: (not _has_engines(one.lead), one.lead.created_at, one.lead.id)):
        is_free = full_pool(team, {pool: len(assigned[pool]) for pool in pools}, pools) is None
        for run in team.runs:
            (assigned if is_free else waiting).get(run.config.pool, []).append(run.id)
    return {pool: Assignment(tuple(assigned[pool]), tuple(waiting[pool])) for pool in pools}


def has_engines(team: Team, assignments: Mapping[str, Assignment]) -> bool:
    """Whether a team has engines of all its pools; it has none otherwise."""
    pool = team.lead.config.pool
    return pool in assignments and team.lead.id in assignments[pool].run_ids


def full_pool(team: Team, used: Mapping[str, int], pools: Mapping[str, int]) -> str | None:
    """Returns the first pool that does not take the team; None where it fits.

    Args: used: how many runs have engines of each pool; pools: how many it takes at a time
    """
    needed = Counter(run.config.pool for run in team.runs)
    return next((one for one, count in needed.items() if used.get(one, 0) + count > pools.get(one, 0)), None)


def waiting_reason(
    team: Team,
    assignments: Mapping[str, Assignment],
    pools: Mapping[str, int],
    run_of: Mapping[str, str] = MappingProxyType({}),
) -> str | None:
    """Says, for users, why a team has no engines; None when it has them.

    Args: pools: how many runs a pool takes at a time; run_of: the runs of further policies, by their ids
    """
    if has_engines(team, assignments):
        return None
    if (pool := full_pool(team, {}, pools)) is not None:
        if pool not in pools:
            return f"there is no pool {pool!r}: add it to CONTROLLER_POOLS, or cancel the run"
        return (
            f"waiting for engines of pool {pool}, which takes too few runs at a time for the run's policies"
            f" ({pools[pool]}): raise its `adapters` in CONTROLLER_POOLS, or cancel the run"
        )
    pool = full_pool(team, {name: len(one.run_ids) for name, one in assignments.items()}, pools)
    pool = pool or team.lead.config.pool
    active = tuple(dict.fromkeys(run_of.get(one, one) for one in assignments[pool].run_ids))
    reason = f"waiting for an engine of pool {pool}: {', '.join(active)} {'has' if len(active) == 1 else 'have'} them"
    if not team.others:
        return reason
    return f"{reason}; its {len(team.runs)} policies begin at the same time, so that later runs may begin before"


def _has_engines(run: RunFacts) -> bool:
    return run.phase in AT_WORK or (run.phase is RunPhase.PAUSED and run.live_attempts > 0)


def changed_phases(
    runs: Sequence[RunFacts],
    teams: Sequence[Team],
    waiting: Callable[[Team], str | None],
    trouble: Callable[[RunFacts], str | None],
) -> list[Phase]:
    """Returns the phases and reasons that differ from those on record.

    Args: runs: those of the teams, and policies of runs that are over; waiting: why a team has no engines; trouble: why
        a policy that has them does not sample, or waits for feedback
    """
    found: dict[str | None, tuple[RunPhase, str | None]] = {}
    for team in teams:
        waits = waiting(team)
        phase, reason = next_phase(team, waits)
        if waits is None and reason is None and phase in AT_WORK:
            reason = next(filter(None, map(trouble, team.runs)), None)
        found[team.lead.id] = phase, reason
    for run in runs:
        if run.of_run is not None:
            found[run.id] = _phase_with(run, *found.get(run.of_run, (run.run_phase or run.phase, None)))
    return [Phase(run.id, *found[run.id]) for run in runs if found[run.id] != (run.phase, run.reason)]


def next_phase(team: Team, waiting: str | None) -> tuple[RunPhase, str | None]:
    """Derives the run's phase from intent and progress, with the reason where it waits.

    Args: waiting: why the team has no engines; None where it has them
    """
    return _allowed(team.lead, *_phase(team, waiting))


def _phase_with(run: RunFacts, phase: RunPhase, reason: str | None) -> tuple[RunPhase, str | None]:
    """The phase of a further policy: its run's."""
    return _allowed(run, phase, f"run {run.of_run} failed" if phase is RunPhase.FAILED else reason)


def _allowed(run: RunFacts, phase: RunPhase, reason: str | None) -> tuple[RunPhase, str | None]:
    is_allowed = phase is run.phase or phase in RUN_TRANSITIONS[run.phase]
    return (phase, reason) if is_allowed else (run.phase, run.reason)


def target_version(team: Team, run: RunFacts) -> int | None:
    """Returns the version of a run that engines should serve: the due evaluation's, else the newest. None before 0.

    Before the first group of an evaluation, open training groups end on the newest version. During one of version v, a
    further policy has its own version v, if its files are there.
    """
    due = due_evaluation(team)
    if due is None:
        return run.latest_version
    evaluation, version = due
    waits = team.lead.open_training_groups and not evaluation.groups and version != team.lead.latest_version
    return run.latest_version if waits or version not in run.servable_versions else version


def _phase(team: Team, waiting: str | None) -> tuple[RunPhase, str | None]:
    run, is_due = team.lead, due_evaluation(team) is not None
    if run.intent is RunIntent.CANCELLED:
        return RunPhase.CANCELLED, None
    if run.phase is RunPhase.FAILED or run.intent is RunIntent.DELETED:
        return run.phase, run.reason
    if run.phase is RunPhase.COMPLETED and not is_due:
        return RunPhase.COMPLETED, run.reason
    if run.intent is RunIntent.PAUSED:
        return RunPhase.PAUSED, None
    if team.trained and not is_due and run.phase in AT_WORK:
        return RunPhase.COMPLETED, team.stop_reason
    if waiting is not None:
        return run.phase, waiting
    return (RunPhase.EVALUATING if is_due else RunPhase.RUNNING), None


def _waits(team: Team) -> bool:
    if team.lead.intent is not RunIntent.RUNNING:
        return False
    if team.lead.phase is RunPhase.COMPLETED:
        return due_evaluation(team) is not None
    return team.lead.phase in {RunPhase.PENDING, RunPhase.PAUSED}


def _version_of(team: Team, evaluation: EvaluationFacts) -> int | None:
    if evaluation.policy_version is not None:
        return evaluation.policy_version
    # A trainer that is asked to stop early may still commit its step.
    if evaluation.started_version in team.lead.servable_versions:
        return evaluation.started_version
    return team.lead.latest_version if team.trained else None
