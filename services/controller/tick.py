"""A tick of the controller: all that it does once.

- Every part may run twice, or in two processes at once, without a second row.
- Whatever one transaction decides is counted, logged and announced after its commit.
- Engines and trainers follow the phases of runs; nothing is admitted for a run without engines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import Counter

from leyden.libs.contracts.states import RunPhase
from leyden.libs.faults import fault_point
from leyden.libs.queue.leases import expire_overdue
from leyden.libs.queue.notifications import Notifications, Topic
from leyden.libs.queue.stream import RolloutQueue
from leyden.libs.store.attempts import AttemptKey
from leyden.libs.store.database import Database, Session
from leyden.libs.store.engines import write_assignments
from leyden.libs.store.runs.admission import Replacements, admit_groups, find_replacements, solve_rates
from leyden.libs.store.runs.facts import RunFacts, finishing_runs, load_runs
from leyden.libs.store.runs.feedback import waiting_reasons
from leyden.libs.store.runs.phases import Phase, cancel_open_work, write_phases
from leyden.libs.store.runs.rollouts import QueuedRollout, Resolution, queued_rollouts
from leyden.libs.store.training import read_version
from leyden.libs.telemetry import inject, logger, span
from leyden.services.controller.engines.fleet import Fleet
from leyden.services.controller.engines.targets import TargetVersion
from leyden.services.controller.runs import phases, settling
from leyden.services.controller.runs.admission import groups_to_admit
from leyden.services.controller.runs.enqueueing import WaitingLine
from leyden.services.controller.runs.phases import Team
from leyden.services.controller.runs.stopping import EarlyStops, fail_broken, fail_runs, idle_runs
from leyden.services.controller.settings import Settings
from leyden.services.controller.trainers.models import models_of
from leyden.services.controller.trainers.supervisor import FINISH_SECONDS, TrainerSupervisor

log = logger()

GROUPS_ADMITTED = Counter("controller_groups_admitted_total", "Groups admitted.", ["kind"])
ROLLOUTS_ENDED = Counter("controller_rollouts_ended_total", "Rollouts that ended.", ["state", "reason"])
LEASES_EXPIRED = Counter("controller_leases_expired_total", "Leases whose runner stopped renewing them.")


@dataclass
class Controller:
    """Decides for the platform: `tick` does everything once."""

    settings: Settings
    database: Database
    queue: RolloutQueue
    notifications: Notifications
    fleets: Mapping[str, Fleet]
    """The engines of each pool."""
    trainers: TrainerSupervisor

    def __post_init__(self) -> None:
        self._finished_evaluations: set[str] = set()
        self._stops = EarlyStops()
        self._line = WaitingLine(self.settings, self.queue)

    async def tick(self) -> None:
        """Settles ended attempts, moves runs on, admits groups, and enqueues rollouts.

        One transaction does all the reading, so an idle tick costs a few milliseconds.
        """
        async with self.database.session() as session:
            resolutions, ungraded, complete = await settling.settle(
                session, self.settings.groups_without_success, self.settings.retry_seconds
            )
            if complete:
                fault_point("controller.groups_completed")
            expired = await _expire_leases(session)
            active, moved = await self._move_runs(session)
            queued = await queued_rollouts(session)
            finishing = await finishing_runs(session, FINISH_SECONDS, self.trainers.supervised)
        if complete:
            fault_point("controller.committed")
        await self._report(resolutions, ungraded, complete, moved)
        is_cancelled = any(one.phase is RunPhase.CANCELLED for one in moved)
        await self.notifications.publish_ended(None if is_cancelled else expired)
        # A team has a trainer for each policy while it has steps to do, or its last version to export again.
        trained = [run for team in active for run in team.runs if self._needs_trainer(team, run)]
        of_pools = {name: pool.model_path for name, pool in self.settings.engine_pools().items()}
        models = {run.id: models_of(run.config, of_pools.get(run.config.pool)) for run in trained}
        self.trainers.reconcile({run.id: run.steps_done for run in trained}, models, finishing)
        await self._set_targets(active)
        admitted = [rollout for team in active for rollout in await self._admit(team)]
        await self._line.enqueue(queued, admitted)

    async def notified(self) -> None:
        """Returns when something happened that the next tick may act on, or after the longest pause."""
        topics = (Topic.OUTCOMES, Topic.SAMPLES, Topic.VERSIONS, Topic.RUNS, Topic.ENGINES)
        await self.notifications.wait(*topics, timeout_seconds=self.settings.tick_seconds)

    async def _move_runs(self, session: Session) -> tuple[list[Team], list[Phase]]:
        """Writes changed phases and cancels the work of runs that ended early; returns the teams that have engines."""
        await fail_runs(session, self.trainers.pop_failures())
        await fail_runs(session, await idle_runs(session, self.settings.groups_without_success))
        pools = {name: fleet.adapters or 1 for name, fleet in self.fleets.items()}
        runs, teams = await self._load(session)
        assignments = phases.assign(teams, pools)
        feedback = await waiting_reasons(session)
        run_of = {one.id: one.of_run for one in runs if one.of_run is not None}
        moved = phases.changed_phases(
            runs,
            teams,
            lambda team: phases.waiting_reason(team, assignments, pools, run_of),
            lambda run: self._trouble(run) or feedback.get(run.id),
        )
        if moved:
            await write_phases(session, moved)
            cancelled = [one.run_id for one in moved if one.phase is RunPhase.CANCELLED]
            await cancel_open_work(session, cancelled, "the run was cancelled")
            runs, teams = await self._load(session)
            assignments = phases.assign(teams, pools)
        await write_assignments(session, assignments)
        self._finished_evaluations |= {one.id for run in runs for one in run.evaluations if one.finished}
        return [team for team in teams if phases.has_engines(team, assignments)], moved

    async def _load(self, session: Session) -> tuple[list[RunFacts], list[Team]]:
        runs, broken = await load_runs(session, self._finished_evaluations)
        if await fail_broken(session, broken):
            runs, broken = await load_runs(session, self._finished_evaluations)
        # A policy goes with its run.
        without = {one.of_run for one in broken}
        runs = [one for one in runs if (one.of_run or one.id) not in without]
        teams = [await self._stops.apply(session, one, self._finished_evaluations) for one in phases.teams_of(runs)]
        return runs, teams

    def _trouble(self, run: RunFacts) -> str | None:
        """Says, for users, why a run with engines does not sample."""
        if waiting := self.trainers.waiting_reason(run.id):
            return f"the trainer waits: {waiting}"
        if run.latest_version is None:
            return "the trainer is preparing policy version 0"
        trouble = self.fleets[run.config.pool].trouble(run.id)
        return None if trouble is None else f"no engine serves: {trouble}"

    async def _report(
        self,
        resolutions: Sequence[Resolution],
        ungraded: Sequence[str],
        complete: Sequence[str],
        moved: Sequence[Phase],
    ) -> None:
        """Counts, logs and notifies, after the commit."""
        for resolution in resolutions:
            ROLLOUTS_ENDED.labels(resolution.state, resolution.reason).inc()
        for one in moved:
            log.info("run moved", run_id=one.run_id, phase=one.phase, reason=one.reason)
        changes = ((Topic.GRADINGS, ungraded), (Topic.GROUPS, complete), (Topic.RUNS, moved))
        if topics := [topic for topic, changed in changes if changed]:
            await self.notifications.notify(*topics)

    def _needs_trainer(self, team: Team, run: RunFacts) -> bool:
        if run.phase not in phases.AT_WORK:
            return False
        lost = self.fleets[run.config.pool].lost_version(run.id)
        return not team.has_made_steps(run) or (run.steps_done > 0 and lost == run.steps_done)

    async def _set_targets(self, teams: Sequence[Team]) -> None:
        """Points the engines of each pool at the versions of its active runs that they should serve."""
        runs = [(team, run) for team in teams for run in team.runs]
        for team, run in runs:
            version, fleet = phases.target_version(team, run), self.fleets[run.config.pool]
            if version is not None and not fleet.has_target(run.id, version):
                async with self.database.read() as session:
                    found = await read_version(session, run.id, version)
                # The version comes from the run's rows, which never go.
                assert found is not None
                fleet.set_target(TargetVersion(run.id, version, found.path, found.content_sha256))
        for pool, fleet in self.fleets.items():
            fleet.retain_targets({run.id for _, run in runs if run.config.pool == pool})

    async def _admit(self, team: Team) -> list[QueuedRollout]:
        """Writes the groups that may be sampled now; returns their rollouts."""
        run = team.lead
        versions = {one.id: self.fleets[one.config.pool].served_version(one.id) for one in team.runs}
        served = {run_id: version for run_id, version in versions.items() if version is not None}
        if len(served) <= len(run.config.served_policies):
            return []
        groups = groups_to_admit(team, served)
        if groups and groups[0].evaluation_id is None:
            groups = groups_to_admit(team, served, *await self._past_of(run))
        if not groups:
            return []
        rollout_ids = [rollout_id for group in groups for rollout_id in group.rollout_ids]
        async with self.database.session() as session:
            await admit_groups(session, groups, {rollout_id: _trace(rollout_id) for rollout_id in rollout_ids})
            fault_point("controller.groups_written")
        fault_point("controller.admitted")
        GROUPS_ADMITTED.labels("training" if groups[0].evaluation_id is None else "evaluation").inc(len(groups))
        log.info("groups admitted", run_id=run.id, groups=len(groups), first=groups[0].id, version=served[run.id])
        return [QueuedRollout(one, group.runner_type) for group in groups for one in group.rollout_ids]

    async def _past_of(self, run: RunFacts) -> tuple[dict[int, float], Replacements]:
        """The facts of earlier groups that decide on the tasks of the next ones."""
        curriculum = run.config.sampling.curriculum
        async with self.database.read() as session:
            if curriculum is None:
                return {}, await find_replacements(session, run.id)
            return await solve_rates(session, run.id, curriculum.window), Replacements()


async def _expire_leases(session: Session) -> list[AttemptKey]:
    """Ends leases that nobody renews; the next tick settles their rollouts."""
    expired = await expire_overdue(session)
    for one in expired:
        LEASES_EXPIRED.inc()
        log.warning("lease expired", rollout_id=one.rollout_id, attempt=one.attempt, owner=one.owner)
    return [AttemptKey(one.rollout_id, one.attempt) for one in expired]


def _trace(rollout_id: str) -> str:
    """Returns the trace context that the rollout's attempts continue."""
    with span("rollout admitted", attributes={"rollout.id": rollout_id}):
        return inject() or ""
