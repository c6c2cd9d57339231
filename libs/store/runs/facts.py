"""Facts of runs that are not over, from which the controller decides their next phase and their admissions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple

from sqlalchemy import Text, cast, select, text

from leyden.libs.contracts.config import BrokenDocument, RunConfig
from leyden.libs.contracts.states import RunIntent, RunPhase
from leyden.libs.store import tables
from leyden.libs.store.database import ReadSession


@dataclass(frozen=True)
class EvaluationFacts:
    """The progress of an evaluation: `groups` of `expected` are admitted, `open_groups` of them have not ended.

    `policy_version` is the version asked for, None for the last one; `started_version` that of its first group.
    """

    id: str
    number: int
    dataset_id: str
    policy_version: int | None
    rollouts_per_task: int
    expected: int
    groups: int
    open_groups: int
    started_version: int | None = None

    @property
    def finished(self) -> bool:
        """Whether every group has ended."""
        return self.groups >= self.expected and self.open_groups == 0


@dataclass(frozen=True)
class RunFacts:
    """The facts that decide the next phase and admissions of a run.

    `counting_groups`: groups that count or still may (`admission.py` of the controller); `servable_versions`: the
    newest two versions and those of the run's evaluations, if their files exist; `stop_reason`: the decision to stop
    training early.

    A further policy, `policy` of run `of_run`, has facts of its own, with the groups and live attempts of the run;
    `run_phase` is the run's phase. All three are null for the run itself and its own model.
    """

    id: str
    config: RunConfig
    intent: RunIntent
    phase: RunPhase
    reason: str | None
    dataset_id: str
    task_count: int
    created_at: datetime
    steps_done: int
    latest_version: int | None
    servable_versions: frozenset[int]
    counting_groups: int
    open_training_groups: int
    next_group: int
    live_attempts: int
    evaluations: tuple[EvaluationFacts, ...] = ()
    of_run: str | None = None
    run_phase: RunPhase | None = None
    policy: str | None = None
    stop_reason: str | None = None

    @property
    def has_all_steps(self) -> bool:
        """Whether every step of the document is done; without steps a trainer has to record version 0."""
        return self.latest_version is not None and self.steps_done >= self.config.training.steps


@dataclass(frozen=True)
class BrokenRun:
    """A run, or a policy of run `of_run`, whose stored document does not parse, as `cause` says."""

    id: str
    of_run: str
    phase: RunPhase
    reason: str | None
    cause: str


class LoadedRuns(NamedTuple):
    """Runs and policies that the controller decides on, and those about which it cannot."""

    runs: list[RunFacts]
    broken: list[BrokenRun]


# Why: training groups have consecutive numbers from 0, so the largest number counts them, and partial indexes count the
# few that are cancelled, excluded or stale: the cost does not grow with a run's past.
_RUNS = text("""
    SELECT r.id, r.config::text AS document, r.intent, r.dataset_id, r.created_at, d.task_count,
           nullif(p.run_id, r.id) AS of_run, nullif(p.name, '') AS policy,
           (SELECT phase FROM run_status WHERE run_id = nullif(p.run_id, r.id)) AS run_phase,
           coalesce(s.phase, 'pending') AS phase, s.reason, s.stop_reason,
           (SELECT max(number) FROM steps WHERE run_id = r.id) AS steps_done,
           (SELECT max(version) FROM policy_versions WHERE run_id = r.id) AS latest_version,
           ARRAY(SELECT v.version FROM (
                     SELECT (SELECT max(version) FROM policy_versions WHERE run_id = r.id) - older AS version
                     FROM (VALUES (0), (1)) AS of (older)
                     UNION SELECT policy_version FROM evaluations WHERE run_id = p.run_id
                 ) AS wanted
                 JOIN policy_versions v ON v.run_id = r.id AND v.version = wanted.version AND v.pruned_at IS NULL
           ) AS servable,
           (SELECT count(*) FROM attempts a JOIN rollouts o ON o.id = a.rollout_id
            WHERE o.run_id = p.run_id AND o.state = 'queued' AND a.state IN ('leased', 'running')) AS live_attempts,
           g.next_number - g.cancelled - g.excluded - g.stale - CASE WHEN r.refills > 0 THEN (
               SELECT coalesce(sum(least(found, r.refills)), 0) FROM (
                   SELECT count(*) AS found FROM step_groups
                   WHERE run_id = r.id AND verdict = 'no_variance' GROUP BY step
                   UNION ALL
                   SELECT count(*) FROM group_credits c WHERE c.run_id = r.id AND c.verdict = 'credited'
                   AND c.min_policy_version IS NOT NULL AND NOT c.has_variance
                   AND NOT EXISTS (SELECT FROM step_groups WHERE group_id = c.group_id AND run_id = c.run_id)
               ) AS without_variance
           ) ELSE 0 END AS counting, g.open, g.next_number
    FROM runs r
    JOIN policies p ON p.id = r.id
    JOIN datasets d ON d.id = r.dataset_id
    LEFT JOIN run_status s ON s.run_id = r.id
    CROSS JOIN LATERAL (
        SELECT (SELECT coalesce(max(number) + 1, 0) FROM groups
                WHERE run_id = p.run_id AND evaluation_id IS NULL) AS next_number,
               (SELECT count(*) FROM groups
                WHERE run_id = p.run_id AND evaluation_id IS NULL AND state = 'cancelled') AS cancelled,
               (SELECT count(*) FROM groups
                WHERE run_id = p.run_id AND evaluation_id IS NULL AND state = 'open') AS open,
               (SELECT count(*) FROM group_credits WHERE run_id = r.id AND verdict = 'excluded') AS excluded,
               (SELECT count(*) FROM step_groups WHERE run_id = r.id AND verdict = 'stale') AS stale
    ) g
    WHERE coalesce(s.phase, 'pending') NOT IN ('completed', 'failed', 'cancelled') OR p.run_id = ANY(:reopened)
    ORDER BY r.created_at, r.id
""")

_EVALUATIONS = text("""
    SELECT e.id, e.run_id, e.number, e.dataset_id, e.policy_version, e.rollouts_per_task,
           e.agents * least(d.task_count, coalesce(e.max_tasks, d.task_count)) AS expected, g.groups, g.open,
           g.started_version
    FROM evaluations e
    JOIN datasets d ON d.id = e.dataset_id
    LEFT JOIN run_status s ON s.run_id = e.run_id
    CROSS JOIN LATERAL (
        SELECT count(*) AS groups, count(*) FILTER (WHERE state = 'open') AS open,
               min(admitted_version) AS started_version
        FROM groups WHERE run_id = e.run_id AND evaluation_id = e.id
    ) g
    WHERE coalesce(s.phase, 'pending') NOT IN ('failed', 'cancelled') AND NOT (e.id = ANY(:finished))
    -- Training that stopped early makes no later versions.
    AND NOT (s.phase IS NOT DISTINCT FROM 'completed' AND coalesce(e.policy_version, 0) > coalesce(
        (SELECT max(version) FROM policy_versions WHERE run_id = e.run_id), 0))
""")

# Runs that ended long ago are left out at once: they are almost all, and their last step is older.
_AT_LAST_STEP = text("""
    SELECT r.id, r.config::text AS document, last.number
    FROM run_status s
    JOIN runs r ON r.id = s.run_id
    JOIN policies p ON p.id = r.id
    JOIN runs lead ON lead.id = p.run_id
    CROSS JOIN LATERAL (SELECT number, created_at FROM steps WHERE run_id = r.id ORDER BY number DESC LIMIT 1) last
    WHERE lead.intent <> 'deleted' AND (s.run_id = ANY(:supervised)
            OR coalesce(s.finished_at, 'infinity') > clock_timestamp() - make_interval(secs => :seconds))
        AND (s.run_id = ANY(:supervised) OR last.created_at > clock_timestamp() - make_interval(secs => :seconds))
""")


async def load_runs(session: ReadSession, finished_evaluations: Iterable[str] = ()) -> LoadedRuns:
    """Every run that is not over, and completed ones that have an unfinished evaluation, oldest first.

    Args: finished_evaluations: finished for good; the query skips their counts
    """
    evaluations: dict[str, list[EvaluationFacts]] = {}
    for row in await session.execute(_EVALUATIONS, {"finished": list(finished_evaluations)}):
        evaluations.setdefault(row.run_id, []).append(_evaluation(row))
    reopened = [run for run, found in evaluations.items() if not all(one.finished for one in found)]
    loaded = LoadedRuns([], [])
    for row in await session.execute(_RUNS, {"reopened": reopened}):
        config = _parsed(row.document)
        if isinstance(config, BrokenDocument):
            loaded.broken.append(BrokenRun(row.id, row.of_run or row.id, RunPhase(row.phase), row.reason, str(config)))
        else:
            loaded.runs.append(_run(row, config, evaluations.get(row.id, [])))
    return loaded


async def finishing_runs(session: ReadSession, seconds: float, supervised: Iterable[str] = ()) -> frozenset[str]:
    """Runs and policies, over or not, with all of their steps, whose trainers may still write the last one. A deleted
    run's need not.

    Args: seconds: since the last step; supervised: runs whose trainers may write it whenever it was made
    """
    rows = await session.execute(_AT_LAST_STEP, {"seconds": seconds, "supervised": list(supervised)})
    found = [(row.id, row.number, _parsed(row.document)) for row in rows]
    return frozenset(
        one for one, step, config in found if isinstance(config, RunConfig) and step >= config.training.steps
    )


async def run_configs(session: ReadSession, run_ids: Iterable[str]) -> dict[str, RunConfig | BrokenDocument]:
    """Documents by run id."""
    table = tables.Run
    rows = await session.execute(select(table.id, cast(table.config, Text)).where(table.id.in_(list(run_ids))))
    return {run_id: _parsed(document) for run_id, document in rows}


@lru_cache(maxsize=1024)
def _parsed(document: str) -> RunConfig | BrokenDocument:
    """Parses a run's document once: the controller reads it at every tick."""
    return RunConfig.read(json.loads(document))


def _evaluation(row: Any) -> EvaluationFacts:
    return EvaluationFacts(
        id=row.id,
        number=row.number,
        dataset_id=row.dataset_id,
        policy_version=row.policy_version,
        rollouts_per_task=row.rollouts_per_task,
        expected=row.expected,
        groups=row.groups,
        open_groups=row.open,
        started_version=row.started_version,
    )


def _run(row: Any, config: RunConfig, evaluations: Sequence[EvaluationFacts]) -> RunFacts:
    return RunFacts(
        id=row.id,
        config=config,
        intent=RunIntent(row.intent),
        phase=RunPhase(row.phase),
        reason=row.reason,
        stop_reason=row.stop_reason,
        dataset_id=row.dataset_id,
        task_count=row.task_count,
        created_at=row.created_at,
        steps_done=row.steps_done or 0,
        latest_version=row.latest_version,
        servable_versions=frozenset(row.servable),
        counting_groups=int(row.counting or 0),
        open_training_groups=row.open or 0,
        next_group=row.next_number or 0,
        live_attempts=row.live_attempts,
        evaluations=tuple(evaluations),
        of_run=row.of_run,
        policy=row.policy,
        run_phase=None if row.run_phase is None else RunPhase(row.run_phase),
    )
