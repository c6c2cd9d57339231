"""Runs as the API shows them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import ColumnElement, Row, func, literal_column, select, text, tuple_

from leyden.libs.contracts.api.runs import NextStep, Progress, Run, RunPage, RunParent, RunSort
from leyden.libs.contracts.config import BrokenDocument, RunConfig
from leyden.libs.contracts.states import ENDED, RunIntent, RunPhase
from leyden.libs.store import tables
from leyden.libs.store.alarms.stored import lasting_alarms
from leyden.libs.store.attempts import ROLLOUT_STATE
from leyden.libs.store.database import ReadSession
from leyden.libs.store.policies import IS_RUN, UnknownPolicy, base_models, further_policies, policies_by_id
from leyden.libs.store.read import step_figures
from leyden.libs.store.read.agents import agents_progress
from leyden.libs.store.read.call_counts import of_run
from leyden.libs.store.read.paging import as_float, decode_cursor, page
from leyden.libs.store.read.policies import shown_policies
from leyden.libs.store.rewards import GIVEN_OF_EACH, GROUP_REWARD, SIBLING, is_used
from leyden.libs.store.runs.trainer_ends import trainer_ends


class UnknownRun(LookupError):
    """No run has this id."""


NEEDS_DOCUMENT = frozenset({"continue", "evaluate", "pause", "resume"})
"""Actions that a run without a document that parses cannot do."""

_LAST_REWARD = f"""
    SELECT avg(reward) FROM (
        SELECT {GROUP_REWARD} AS reward FROM step_groups JOIN groups ON groups.id = step_groups.group_id
        JOIN rollouts ON rollouts.group_id = groups.id AND rollouts.state = 'finished' AND {SIBLING}
            AND {is_used("last_step.run_id")}
        JOIN runs ON runs.id = rollouts.run_id {GIVEN_OF_EACH}
        WHERE step_groups.run_id = last_step.run_id AND step_groups.step = last_step.number OFFSET 0
    ) AS earned
"""  # noqa: S608  # constants alone
_STEP = "coalesce((SELECT max(number) FROM steps WHERE steps.run_id = runs.id), 0)"
_LAST_STEP = f"SELECT runs.id AS run_id, {_STEP} AS number"
_REWARD = f"(SELECT ({_LAST_REWARD}) FROM ({_LAST_STEP}) AS last_step)"  # noqa: S608  # constants alone
_PHASES = ", ".join(f"'{phase}'" for phase in (*RunPhase,))

_PLACES: dict[RunSort, str] = {
    "newest": "0",
    "oldest": "-extract(epoch FROM runs.created_at)",
    "highest": _REWARD,
    "lowest": f"-{_REWARD}",
    "most_steps": _STEP,
    "fewest_steps": f"-{_STEP}",
    "phase": f"-array_position(ARRAY[{_PHASES}], coalesce(run_status.phase, 'pending'))",
}
"""SQL: the place of a run, the largest first. Runs with the same place come newest first."""

# Why: nearly all rollouts of a long run are finished, so the sizes of groups count them, and partial indexes the rest.
_PROGRESS = text(f"""
    SELECT runs.id, coalesce(status.phase, 'pending') AS phase, status.reason, status.started_at, status.finished_at,
        last_step.number AS step,
        (SELECT max(version) FROM policy_versions WHERE run_id = runs.id) AS policy_version,
        to_regclass(format('%I', 'model_calls__' || runs.id)) IS NULL AS pruned,
        coalesce((
            WITH others AS (
                SELECT {ROLLOUT_STATE} AS state, count(*) FROM rollouts JOIN groups ON groups.id = rollouts.group_id
                WHERE rollouts.run_id = runs.id AND groups.evaluation_id IS NULL AND rollouts.state = 'queued'
                GROUP BY 1
                UNION ALL
                SELECT rollouts.state, count(*) FROM rollouts JOIN groups ON groups.id = rollouts.group_id
                WHERE rollouts.run_id = runs.id AND groups.evaluation_id IS NULL
                    AND rollouts.state IN ('excluded', 'cancelled')
                GROUP BY rollouts.state
            )
            SELECT jsonb_object_agg(state, count) FROM (
                SELECT * FROM others
                UNION ALL
                SELECT 'finished', sum(size) - coalesce((SELECT sum(count) FROM others), 0)
                FROM groups WHERE run_id = runs.id AND evaluation_id IS NULL
            ) AS states WHERE count > 0
        ), '{{}}') AS rollouts,
        ({_LAST_REWARD}) AS reward_mean
    FROM runs LEFT JOIN run_status AS status ON status.run_id = runs.id
    CROSS JOIN LATERAL ({_LAST_STEP}) AS last_step
    WHERE runs.id = ANY(:run_ids)
""")  # noqa: S608  # constants alone


EXCLUDED_REASONS = 20
_EXCLUDED = text("""
    SELECT coalesce(rollouts.reason, '') AS reason, count(*) AS rollouts
    FROM rollouts JOIN groups ON groups.id = rollouts.group_id
    WHERE rollouts.run_id = :run AND rollouts.state = 'excluded' AND groups.evaluation_id IS NULL
    GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT :limit
""")


async def get_run(session: ReadSession, run_id: str) -> Run:
    """One run with its progress and the counts of its calls.

    Raises: UnknownRun
    """
    run = (await with_progress(session, [await check_run(session, run_id)]))[0]
    progress = run.progress.model_copy(update={"next_step": await _next_step(session, run)})
    policies = {
        name: policy.model_copy(update=await _ends(session, policy.id)) for name, policy in run.policies.items()
    }
    excluded = await session.execute(_EXCLUDED, {"run": run_id, "limit": EXCLUDED_REASONS})
    changes = {
        "progress": progress,
        "calls": await of_run(session, run_id),
        "agents": await agents_progress(session, run_id, [one.name for one in run.config.agents] if run.config else []),
        "policies": policies,
        "excluded": {row.reason: row.rollouts for row in excluded},
        **await _judges(session, run_id),
        **await _ends(session, run_id),
    }
    return run.model_copy(update=changes)


async def _next_step(session: ReadSession, run: Run) -> NextStep | None:
    made, steps = run.progress.step, run.progress.steps
    if run.phase in ENDED or run.config is None or run.config.algorithm.type == "sft" or made >= (steps or 0):
        return None
    return await step_figures.next_step(session, run.id, made + 1, run.config)


async def _judges(session: ReadSession, run_id: str) -> dict[str, object]:
    used = await session.get(tables.JudgeUsage, run_id)
    if used is None:
        return {}
    return {
        "judge_tokens": used.tokens,
        "judge_cost": used.cost if used.unpriced_tokens < used.tokens else None,
        "judge_unpriced_tokens": used.unpriced_tokens,
    }


async def _ends(session: ReadSession, policy_id: str) -> dict[str, object]:
    ends, last_end = await trainer_ends(session, policy_id)
    return {"trainer_ends": ends, "last_trainer_end": last_end}


async def check_run(session: ReadSession, run_id: str) -> tables.Run:
    """The run's row.

    Raises: UnknownRun
    """
    row = await session.scalar(select(tables.Run).where(tables.Run.id == run_id, IS_RUN))
    if row is None:
        raise await unknown_run(session, run_id)
    return row


async def unknown_run(session: ReadSession, run_id: str) -> UnknownRun:
    """The error for an id that no run has; that of a policy names its run."""
    policy = (await policies_by_id(session, [run_id])).get(run_id)
    if policy is None:
        return UnknownRun(f"no run has the id {run_id!r}: list runs to find it")
    return UnknownRun(f"{run_id!r} is policy {policy.name!r} of run {policy.run_id}: name that run and the policy")


async def policy_id(session: ReadSession, run_id: str, name: str | None) -> str:
    """The id of a run's further policy; that of its own model without a name.

    Raises: UnknownRun; UnknownPolicy
    """
    await check_run(session, run_id)
    if name is None:
        return run_id
    found = await further_policies(session, run_id)
    if name not in found:
        known = ", ".join(found) or "none"
        raise UnknownPolicy(f"run {run_id} has no policy {name!r} with versions of its own: it has {known}")
    return found[name].id


async def list_runs(
    session: ReadSession,
    *,
    name: str | None,
    phase: RunPhase | None,
    dataset_id: str | None = None,
    sort: RunSort = "newest",
    count: bool = False,
    cursor: str | None,
    limit: int,
) -> RunPage:
    """A page of runs; by reward, those without one come last.

    Args: dataset_id: those that train on its tasks, or evaluate a version on them; count: whether the first page
        counts all that the filter leaves
    Raises: BadCursor
    """
    table, status = tables.Run, tables.RunStatus
    conditions: list[ColumnElement[bool]] = [IS_RUN, *([table.name == name] if name else [])]
    if phase is not None:
        conditions.append(func.coalesce(status.phase, str(RunPhase.PENDING)) == str(phase))
    if dataset_id is not None:
        evaluated = select(tables.Evaluation.run_id).where(tables.Evaluation.dataset_id == dataset_id)
        conditions.append((table.dataset_id == dataset_id) | table.id.in_(evaluated))
    place: ColumnElement[float] = literal_column(f"coalesce(({_PLACES[sort]})::float8, '-Infinity')")
    found = select(table, place).outerjoin(status, status.run_id == table.id).where(*conditions)
    total = None
    if count and cursor is None:
        total = await session.scalar(select(func.count()).select_from(found.with_only_columns(table.id).subquery()))
    listed = f"runs {sort}"
    if key := decode_cursor(cursor, listed, str, datetime, str):
        found = found.where(tuple_(place, table.created_at, table.id) < tuple_(as_float(key[0]), *key[1:]))
    in_order = found.order_by(place.desc(), table.created_at.desc(), table.id.desc())
    rows: Sequence[Row[tables.Run, float]] = (await session.execute(in_order.limit(limit + 1))).all()
    shown = await with_progress(session, [row[0] for row in rows])
    places = {row[0].id: row[1] for row in rows}
    made = page(listed, shown, limit, lambda run: run, lambda run: (repr(places[run.id]), run.created_at, run.id))
    return RunPage(items=made.items, next_cursor=made.next_cursor, total=total)


async def with_progress(session: ReadSession, rows: Sequence[tables.Run]) -> list[Run]:
    run_ids = [row.id for row in rows]
    result = await session.execute(_PROGRESS, {"run_ids": run_ids})
    alarms = await lasting_alarms(session, run_ids)
    found = {record["id"]: record for record in result.mappings()}
    policies = await shown_policies(session, run_ids)
    pools = await session.execute(select(tables.Pool.name, tables.Pool.model_path))
    bases = await base_models(session, run_ids)
    paces = await step_figures.read_paces(session, run_ids)
    models = {row.name: row.model_path for row in pools}
    runs = []
    for row in rows:
        record, config = found[row.id], RunConfig.read(row.config)
        document = None if isinstance(config, BrokenDocument) else config
        allowed = allowed_actions(
            RunIntent(row.intent),
            RunPhase(record["phase"]),
            pruned=record["pruned"],
            has_versions=record["policy_version"] is not None,
        )
        runs.append(
            Run(
                id=row.id,
                name=row.name,
                dataset_id=row.dataset_id,
                intent=row.intent,
                phase=record["phase"],
                reason=_reason(record["reason"], config),
                created_at=row.created_at,
                started_at=record["started_at"],
                finished_at=record["finished_at"],
                progress=Progress(
                    step=record["step"],
                    steps=row.steps,
                    policy_version=record["policy_version"],
                    rollouts=record["rollouts"],
                    reward_mean=record["reward_mean"],
                    seconds_left=_seconds_left(paces.get(row.id), (row.steps or 0) - record["step"]),
                ),
                pruned=record["pruned"],
                alarms=alarms[row.id],
                agent_names=_agent_names(document) if document else [],
                model=(document.model or bases.get(row.id) or models.get(document.pool)) if document else None,
                parent=_parent(row),
                policies=policies.get(row.id, {}),
                allowed_actions=[one for one in allowed if document or one not in NEEDS_DOCUMENT],
                config=document,
            )
        )
    return runs


def _reason(recorded: str | None, config: RunConfig | BrokenDocument) -> str | None:
    """The controller may have recorded that the document is broken; a run that had ended before has its own reason."""
    if not isinstance(config, BrokenDocument) or (recorded is not None and str(config) in recorded):
        return recorded
    return "; ".join(filter(None, (recorded, str(config))))


def _seconds_left(pace: tuple[float, float] | None, steps: int) -> float | None:
    """Args: pace: the median seconds of a step, and those since the last one; steps: that are left"""
    if pace is None or steps <= 0:
        return None
    median, since = pace
    return max(0.0, median - since) + (steps - 1) * median


def _agent_names(config: RunConfig) -> list[str]:
    return [one.name or " ".join(one.agent.command) or one.runner.type for one in config.group_agents]


def _parent(row: tables.Run) -> RunParent | None:
    if row.parent_run_id is None or row.parent_version is None:
        return None
    return RunParent(run_id=row.parent_run_id, version=row.parent_version)


def allowed_actions(
    intent: RunIntent, phase: RunPhase, *, pruned: bool = False, has_versions: bool = False
) -> list[str]:
    """The actions that the state of a run permits.

    A pruned run has no partitions for new records, and one without versions has nothing for a new run to begin with.
    """
    if intent is RunIntent.DELETED:
        return []
    continues = ["continue"] if phase in ENDED and has_versions else []
    if intent is RunIntent.CANCELLED or phase is RunPhase.CANCELLED:
        return continues
    if phase is RunPhase.COMPLETED:
        return continues if pruned else ["evaluate", *continues]
    if phase is RunPhase.FAILED:
        return ["cancel", *continues]
    return ["resume" if intent is RunIntent.PAUSED else "pause", "cancel", "evaluate"]
