"""A tick of the controller: all that it does once. Every part may run twice."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from prometheus_client import Counter, Gauge

from leyden.libs.contracts.call_counts import why_nothing_trains
from leyden.libs.contracts.states import RunPhase
from leyden.libs.faults import fault_point
from leyden.libs.queue.connection import QueueUnavailable
from leyden.libs.queue.leases import expire_overdue
from leyden.libs.queue.notifications import Notifications, Topic
from leyden.libs.queue.stream import RolloutQueue
from leyden.libs.store.attempts import AttemptKey
from leyden.libs.store.database import Database, Session
from leyden.libs.store.engines import Assignment, Pool, write_assignments, write_pools
from leyden.libs.store.read.call_counts import runs_that_train_nothing
from leyden.libs.store.runs import failure_rewards
from leyden.libs.store.runs.admission import Replacements, admit_groups, find_replacements, solve_rates
from leyden.libs.store.runs.facts import RunFacts, load_runs, run_configs
from leyden.libs.store.runs.phases import (
    Phase,
    cancel_open_work,
    cancel_training,
    causes_of_leads,
    evaluation_rewards,
    runs_without_success,
    step_rewards,
    write_phases,
)
from leyden.libs.store.runs.rollouts import (
    QueuedRollout,
    Resolution,
    await_grades,
    complete_groups,
    ended_attempts,
    excuse_attempts,
    queued_rollouts,
    resolve_rollouts,
)
from leyden.libs.store.training import read_version
from leyden.libs.telemetry import RateLimitedLogger, inject, logger, span
from leyden.services.controller.engines.client import TargetVersion
from leyden.services.controller.engines.fleet import Fleet
from leyden.services.controller.runs import admission, phases, settling
from leyden.services.controller.runs.stopping import stop_reason
from leyden.services.controller.settings import Settings
from leyden.services.controller.trainers.supervisor import TrainerSupervisor

log = logger()
limited_log = RateLimitedLogger(log)

GROUPS_ADMITTED = Counter("controller_groups_admitted_total", "Groups admitted.", ["kind"])
ROLLOUTS_ENDED = Counter("controller_rollouts_ended_total", "Rollouts that ended.", ["state", "reason"])
RUNS_FAILED = Counter("controller_runs_failed_total", "Runs that the controller ended as failed.")
LEASES_EXPIRED = Counter("controller_leases_expired_total", "Leases whose runner stopped renewing them.")
ROLLOUTS_QUEUED = Gauge("controller_rollouts_queued", "Rollouts that wait for an attempt.")


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
        self._stops: dict[str, tuple[tuple[int, int], str | None]] = {}
        self._enqueued_at = 0.0
        self._enqueued: set[str] = set()

    async def tick(self) -> None:
        """Settles ended attempts, moves runs on, admits groups, and enqueues rollouts.

        One transaction does all the reading, so an idle tick costs a few milliseconds.
        """
        async with self.database.session() as session:
            resolutions, ungraded, complete = await self.settle(session)
            if complete:
                fault_point("controller.groups_completed")
            expired = await self.expire_leases(session)
            runs, moved = await self.move_runs(session)
            queued = await queued_rollouts(session)
        if complete:
            fault_point("controller.committed")
        await self._report(resolutions, ungraded, complete, moved)
        await self.notifications.publish_ended(
            None if any(one.phase is RunPhase.CANCELLED for one in moved) else expired
        )
        holders = {run_id for one in self._assign(runs).values() for run_id in one.run_ids}
        active = [run for run in runs if run.id in holders]
        self.reconcile_trainers(active)
        admitted: list[QueuedRollout] = []
        by_id = {run.id: run for run in runs}
        for run in active:
            await self.set_engine_target(run, by_id[run.lead_run_id or run.id])
        for pool, fleet in self.fleets.items():
            fleet.retain_targets({run.id for run in active if run.config.pool == pool})
        for run in active:
            if run.lead_run_id is None:
                admitted += await self.admit(run, [one for one in active if one.lead_run_id == run.id])
        await self.enqueue(queued, admitted)

    async def take_over(self) -> None:
        """Writes the pools of the settings, which API, gateways and trainers read, and what an earlier leader left."""
        pools = [
            Pool(
                name,
                None if one.model_path is None else str(one.model_path),
                one.context_length,
                one.adapters,
                one.max_adapter_rank,
            )
            for name, one in self.settings.engine_pools().items()
        ]
        async with self.database.session() as session:
            await write_pools(session, pools)
            await failure_rewards.decide_late(session)

    async def settle(self, session: Session) -> tuple[list[Resolution], list[str], list[str]]:
        """Ends rollouts whose last attempt ended, hands those with components to the graders, and ends groups whose
        rollouts all have ended; returns all three."""
        ended = await ended_attempts(session)
        if not ended:
            return [], [], []
        configs = await run_configs(session, {one.run_id for one in ended})
        resolved = [settling.resolve(one, configs[one.run_id]) for one in ended]
        resolutions = [one for one in resolved if isinstance(one, Resolution)]
        await resolve_rollouts(session, resolutions)
        attempts: dict[settling.Next, dict[str, int]] = {one: {} for one in settling.Next}
        for one, resolution in zip(ended, resolved, strict=True):
            if isinstance(resolution, settling.Next):
                attempts[resolution][one.rollout_id] = one.attempt
        await excuse_attempts(session, attempts[settling.Next.AGAIN])
        await await_grades(session, attempts[settling.Next.GRADE])
        complete = await complete_groups(session)
        if complete:
            failing = await runs_without_success(session, self.settings.groups_without_success)
            await _fail(session, {run: f"no rollout succeeds: {cause}" for run, cause in failing.items()})
        return resolutions, list(attempts[settling.Next.GRADE]), complete

    async def expire_leases(self, session: Session) -> list[AttemptKey]:
        """Ends leases that nobody renews; the next tick settles their rollouts."""
        expired = await expire_overdue(session)
        for one in expired:
            LEASES_EXPIRED.inc()
            log.warning("lease expired", rollout_id=one.rollout_id, attempt=one.attempt, owner=one.owner)
        return [AttemptKey(one.rollout_id, one.attempt) for one in expired]

    async def move_runs(self, session: Session) -> tuple[list[RunFacts], list[Phase]]:
        """Writes changed phases and cancels the work of runs that ended early; returns the runs as they are now."""
        await _fail(session, self.trainers.pop_failures())
        await _fail(session, await _idle_runs(session))
        runs = await self._load_runs(session)
        moved = self._changed_phases(runs)
        if moved:
            await write_phases(session, moved)
            cancelled = [one.run_id for one in moved if one.phase is RunPhase.CANCELLED]
            await cancel_open_work(session, cancelled, "the run was cancelled")
            runs = await self._load_runs(session)
        await write_assignments(session, self._assign(runs))
        self._finished_evaluations |= {one.id for run in runs for one in run.evaluations if one.finished}
        return runs, moved

    def _assign(self, runs: Sequence[RunFacts]) -> dict[str, Assignment]:
        return phases.assign(runs, self._pools())

    def _pools(self) -> dict[str, int]:
        """How many runs each pool takes at a time."""
        return {name: fleet.adapters or 1 for name, fleet in self.fleets.items()}

    async def _load_runs(self, session: Session) -> list[RunFacts]:
        """Returns the facts of runs with the decision to stop early, which ends their open training groups."""
        runs = []
        loaded = await load_runs(session, self._finished_evaluations)
        for run in loaded:
            if run.lead_run_id is not None:
                continue
            stopped = replace(run, stop_reason=await self._stop_reason(session, run))
            if stopped.stop_reason is not None and stopped.open_training_groups:
                await cancel_training(session, run.id)
                fault_point("controller.training_stopped")
                stopped = replace(stopped, open_training_groups=0)
            others = [replace(one, stop_reason=stopped.stop_reason) for one in loaded if one.lead_run_id == run.id]
            runs += [replace(stopped, has_unfinished_policies=not all(map(phases.has_made_steps, others))), *others]
        leads = {run.id for run in runs}
        return runs + [one for one in loaded if one.lead_run_id is not None and one.lead_run_id not in leads]

    async def _stop_reason(self, session: Session, run: RunFacts) -> str | None:
        """Reads the run's rewards only after a step or an evaluation has ended; a decision is final."""
        stopping = run.config.training.early_stopping
        if stopping is None or run.steps_done >= run.config.training.steps:
            return None
        ended = {one.id for one in run.evaluations if one.finished}
        ended |= {one for one in self._finished_evaluations if one.startswith(f"{run.id}.")}
        progress, reason = self._stops.get(run.id, (None, None))
        if reason is None and progress != (run.steps_done, len(ended)):
            if stopping.metric == "evaluation_reward":
                values = await evaluation_rewards(session, run.id, ended)
            else:
                values = await step_rewards(session, run.id)
            reason = stop_reason(stopping, values)
            self._stops[run.id] = (run.steps_done, len(ended)), reason
        return reason

    def _changed_phases(self, runs: Sequence[RunFacts]) -> list[Phase]:
        assignments = self._assign(runs)
        found: dict[str, tuple[RunPhase, str | None]] = {}
        for run in runs:
            if run.lead_run_id is None:
                found[run.id] = self._phase(run, [one for one in runs if one.lead_run_id == run.id], assignments)
        for run in runs:
            if run.lead_run_id is not None:
                lead = found.get(run.lead_run_id, (run.lead_phase or run.phase, None))
                found[run.id] = phases.policy_phase(run, lead)
        return [Phase(run.id, *found[run.id]) for run in runs if found[run.id] != (run.phase, run.reason)]

    def _phase(
        self, run: RunFacts, others: Sequence[RunFacts], assignments: Mapping[str, Assignment]
    ) -> tuple[RunPhase, str | None]:
        """Args: others: the runs that carry its further policies"""
        team = (run, *others)
        waiting = phases.waiting_reason(team, assignments, self._pools())
        phase, reason = phases.next_phase(run, waiting)
        if waiting is None and reason is None and phase in phases.AT_WORK:
            reason = next(filter(None, map(self._waiting_reason, team)), None)
        return phase, reason

    def _waiting_reason(self, run: RunFacts) -> str | None:
        """Says, for users, why the active run does not sample."""
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

    async def set_engine_target(self, run: RunFacts, lead: RunFacts) -> None:
        """Points the pool's engines at the version of the active run that they should serve.

        Args: lead: the run itself, or the one whose policy it carries
        """
        version = phases.target_version(run) if run is lead else phases.policy_target(run, lead)
        fleet = self.fleets[run.config.pool]
        if version is not None and not fleet.has_target(run.id, version):
            async with self.database.read() as session:
                found = await read_version(session, run.id, version)
            # The version comes from the run's rows, which never go.
            assert found is not None
            fleet.set_target(TargetVersion(run.id, version, found.path, found.content_sha256))

    def reconcile_trainers(self, active: Sequence[RunFacts]) -> None:
        """Keeps a trainer for each active run while it has steps to do, or its last version to export again."""
        self.trainers.reconcile({run.id: run.steps_done for run in active if self._needs_trainer(run)})

    def _needs_trainer(self, run: RunFacts) -> bool:
        if run.phase not in phases.AT_WORK:
            return False
        lost = self.fleets[run.config.pool].lost_version(run.id)
        return not phases.has_made_steps(run) or (run.steps_done > 0 and lost == run.steps_done)

    async def admit(self, run: RunFacts, others: Sequence[RunFacts]) -> list[QueuedRollout]:
        """Writes the groups that may be sampled now; returns the ids of their rollouts.

        Args: others: the runs that carry its further policies
        """
        served = self.fleets[run.config.pool].served_version(run.id)
        of_others = [(one, self.fleets[one.config.pool].served_version(one.id)) for one in others]
        with_versions = [(one, version) for one, version in of_others if version is not None]
        if served is None or len(with_versions) < len(run.config.carried_policies):
            return []
        groups = admission.groups_to_admit(run, served, others=with_versions)
        if groups and groups[0].evaluation_id is None:
            rates, replacements = await self._past_of(run)
            groups = admission.groups_to_admit(run, served, rates, with_versions, replacements)
        if not groups:
            return []
        rollout_ids = [rollout_id for group in groups for rollout_id in group.rollout_ids]
        async with self.database.session() as session:
            await admit_groups(session, groups, {rollout_id: _trace(rollout_id) for rollout_id in rollout_ids})
            fault_point("controller.groups_written")
        fault_point("controller.admitted")
        GROUPS_ADMITTED.labels("training" if groups[0].evaluation_id is None else "evaluation").inc(len(groups))
        log.info("groups admitted", run_id=run.id, groups=len(groups), first=groups[0].id, version=served)
        return [QueuedRollout(one, 0, None, run.config.runner.type) for one in rollout_ids]

    async def _past_of(self, run: RunFacts) -> tuple[dict[int, float], Replacements]:
        """The facts of earlier groups that decide on the tasks of the next ones."""
        curriculum = run.config.sampling.curriculum
        async with self.database.read() as session:
            if curriculum is None:
                return {}, await find_replacements(session, run.id)
            return await solve_rates(session, run.id, curriculum.window), Replacements()

    async def enqueue(self, queued: Sequence[QueuedRollout], admitted: Sequence[QueuedRollout]) -> None:
        """Enqueues waiting rollouts: new ones at once, all of them every few seconds, since Redis may be wiped."""
        due = [one for one in queued if self._is_due(one)] + list(admitted)
        ROLLOUTS_QUEUED.set(len(queued) + len(admitted))
        if time.monotonic() - self._enqueued_at > self.settings.enqueue_again_seconds:
            self._enqueued.clear()
            self._enqueued_at = time.monotonic()
        fresh = [one for one in due if one.rollout_id not in self._enqueued]
        try:
            for runner_type in dict.fromkeys(one.runner_type for one in fresh):
                ids = [one.rollout_id for one in fresh if one.runner_type == runner_type]
                await self.queue.enqueue(ids, runner_type)
            if fresh:
                fault_point("controller.enqueued")
        except QueueUnavailable as error:
            limited_log.warning("rollouts not enqueued", cause=str(error))
            return
        # A rollout that is retried within this time waits until all are enqueued again.
        self._enqueued.update(one.rollout_id for one in fresh)

    def _is_due(self, queued: QueuedRollout) -> bool:
        if queued.waited_seconds is None:
            return True
        return queued.waited_seconds >= settling.retry_seconds(queued.attempt, self.settings.retry_seconds)


async def _idle_runs(session: Session) -> dict[str, str]:
    """Returns the runs whose newest steps had nothing to train, with the reason and the remedy."""
    return {
        run_id: f"no token of {'steps' if len(steps) > 1 else 'step'} {' and '.join(map(str, steps))} can be trained:"
        f" {why_nothing_trains(counts)}"
        for run_id, (steps, counts) in (await runs_that_train_nothing(session)).items()
    }


def _trace(rollout_id: str) -> str:
    """Returns the trace context that the rollout's attempts continue."""
    with span("rollout admitted", attributes={"rollout.id": rollout_id}):
        return inject() or ""


async def _fail(session: Session, causes: dict[str, str]) -> None:
    if causes:
        causes = {**await causes_of_leads(session, causes), **causes}
        await write_phases(session, [Phase(run, RunPhase.FAILED, cause) for run, cause in causes.items()])
        await cancel_open_work(session, list(causes), "the run failed")
        RUNS_FAILED.inc(len(causes))
        log.error("runs failed", causes=causes)
