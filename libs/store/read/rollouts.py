"""Lists of rollouts: filtered, sorted and counted in Postgres."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, cast

from sqlalchemy import (
    ARRAY,
    ColumnElement,
    Double,
    Row,
    Select,
    String,
    bindparam,
    func,
    literal_column,
    select,
    text,
    tuple_,
)

from leyden.libs.contracts.api.rollouts import Cause, Rollout, RolloutPage
from leyden.libs.contracts.rewards import ROUNDING
from leyden.libs.contracts.states import ShownRolloutState
from leyden.libs.store import tables
from leyden.libs.store.attempts import ROLLOUT_STATE
from leyden.libs.store.database import ReadSession
from leyden.libs.store.read.paging import as_float, decode_cursor, page
from leyden.libs.store.rewards import GIVEN_OF_RUNS, GROUP_REWARD, KNOWN_REWARD

RolloutSort = Literal["newest", "oldest", "highest", "lowest"]
RolloutRow = Row[tables.Rollout, tables.Group, int | None, float | None, str]
RolloutQuery = Select[tables.Rollout, tables.Group, int | None, float | None, str]

_STATE: ColumnElement[str] = literal_column(ROLLOUT_STATE)
_REWARD: ColumnElement[float | None] = literal_column(KNOWN_REWARD)

# Why: for 10,000 rollouts, those above a reward by reward with their count took 280 ms by a lookup for each; this pass
# takes 110.
_EARNED = f"""
    WITH given AS MATERIALIZED ({GIVEN_OF_RUNS})
    SELECT rollouts.id, {GROUP_REWARD} AS reward
    FROM rollouts JOIN runs ON runs.id = rollouts.run_id JOIN groups ON groups.id = rollouts.group_id
    LEFT JOIN given ON given.id = rollouts.id WHERE rollouts.run_id = ANY(:run_ids)
"""  # noqa: S608  # constants alone

# Tool calls and tasks are searched as JSON, which has line ends and quotes written out. Requests are not searched: each
# repeats those before it.
_FOUND = """
    rollouts.id IN (
        SELECT r.id FROM rollouts r WHERE r.run_id = :run_id AND r.reason ILIKE :words
        UNION ALL
        SELECT o.rollout_id FROM outcomes o
        WHERE o.run_id = :run_id AND concat_ws(E'\\n', o.detail, o.stdout_tail, o.stderr_tail) ILIKE :words
        UNION ALL
        SELECT c.rollout_id FROM model_calls c
        WHERE c.run_id = :run_id
            AND (c.answer ->> 'content' ILIKE :words OR c.answer ->> 'tool_calls' ILIKE :json_words)
    ) OR (groups.dataset_id, groups.task_number) IN (
        SELECT t.dataset_id, t.number FROM tasks t
        WHERE t.dataset_id IN (SELECT dataset_id FROM groups g WHERE g.run_id = :run_id)
            AND t.payload::text ILIKE :json_words
    )
"""


# Why: one pass over the run's calls; a search for each rollout takes eight times as long.
_OF_CALLS = """rollouts.id IN (
    SELECT c.rollout_id FROM {table} c JOIN rollouts counted ON counted.id = c.rollout_id
    WHERE c.run_id = :of_run AND c.attempt = coalesce(counted.attempt, c.attempt) AND {condition})"""
_WITH_ROLE = _OF_CALLS.format(table="model_calls", condition="c.role = :role")
# An answer asks for a tool, or a span shows that it ran.
_WITH_TOOL = " OR ".join(
    (
        _OF_CALLS.format(table="model_calls", condition=f"{tables.CALLED_TOOLS} ? :tool"),
        _OF_CALLS.format(table="spans", condition=f"{tables.SPAN_TOOL} = :tool AND c.tool = :tool"),
    )
)
_WITH_COMPONENT = """(
    SELECT value FROM rollout_rewards
    WHERE rollout_id = rollouts.id AND attempt = coalesce(rollouts.attempt, rollouts.grading_attempt)
        AND component = :component
    ORDER BY revision DESC LIMIT 1
) BETWEEN :component_min AND :component_max"""

_WITH_CAUSE = """rollouts.id IN (
    SELECT id FROM rollouts WHERE run_id = :of_run AND reason = :cause
    UNION ALL
    SELECT r.id FROM group_credits c JOIN rollouts r USING (group_id)
    WHERE c.run_id = :of_run AND c.verdict = 'excluded' AND c.reason = :cause
    UNION ALL
    SELECT r.id FROM step_groups s JOIN rollouts r USING (group_id)
    WHERE s.run_id = :of_run AND s.verdict = :cause AND s.verdict <> 'trained')"""
MOST_CAUSES = 50
_CAUSES = text("""
    WITH groups_left AS (
        SELECT group_id, reason AS cause FROM group_credits WHERE run_id = :run AND verdict = 'excluded'
        UNION ALL
        SELECT group_id, verdict FROM step_groups WHERE run_id = :run AND verdict <> 'trained'
    ), found AS (
        SELECT id, reason AS cause FROM rollouts WHERE run_id = :run AND reason <> 'succeeded'
        UNION
        SELECT rollouts.id, groups_left.cause FROM groups_left JOIN rollouts USING (group_id) WHERE run_id = :run
    )
    SELECT cause, count(*) AS rollouts FROM found
    JOIN rollouts ON rollouts.run_id = :run AND rollouts.id = found.id JOIN groups ON groups.id = rollouts.group_id
    WHERE cause <> '' AND (CAST(:evaluation AS text) IS NULL OR coalesce(groups.evaluation_id, 'none') = :evaluation)
    GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT :limit
""")


@dataclass(frozen=True)
class RolloutFilter:
    """The rollouts that a list shows; a field that is None filters nothing.

    `evaluation`: the id of one, or `none` for training rollouts alone. `version`: the admitted one. `failed`: whether
    the agent or the platform failed: finished otherwise than `succeeded`, or excluded. `text`: a part of the reason,
    the output, the task or an answer of the model, capital or small; needs `run_id`. `cause`: why it was excluded,
    failed or taught nothing: its own reason, or why credit or the trainer left its group out; needs `run_id`.
    """

    run_id: str | None = None
    group_id: str | None = None
    evaluation: str | None = None
    state: ShownRolloutState | None = None
    failed: bool | None = None
    step: int | None = None
    version: int | None = None
    task_number: int | None = None
    agent: str | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    text: str | None = None
    cause: str | None = None
    role: str | None = None
    tool: str | None = None
    component: str | None = None
    component_min: float | None = None
    component_max: float | None = None


def select_rollouts() -> RolloutQuery:
    """Rollouts with their group, the step that consumed it, the reward and the shown state."""
    return _select(_REWARD)


def _select(reward: ColumnElement[float | None]) -> RolloutQuery:
    rollout, group, consumed = tables.Rollout, tables.Group, tables.StepGroup
    joined = select(rollout, group, consumed.step, reward, _STATE).join(group, group.id == rollout.group_id)
    return joined.outerjoin(consumed, (consumed.group_id == group.id) & (consumed.run_id == group.run_id))


def _matching(wanted: RolloutFilter, *, at_once: bool) -> tuple[RolloutQuery, ColumnElement[float | None]]:
    """Rollouts that the filter leaves, and their reward in the query.

    Args: at_once: whether the rewards of all rollouts of a run are computed, which pays where each is asked for
    """
    if not at_once or wanted.run_id is None:
        return _select(_REWARD).where(*_conditions(wanted, _REWARD)), _REWARD
    bound = text(_EARNED).bindparams(bindparam("run_ids", [wanted.run_id], ARRAY(String)))
    earned = bound.columns(id=String, reward=Double).cte("earned").prefix_with("MATERIALIZED")
    reward: ColumnElement[float | None] = earned.c.reward
    query = _select(reward).join(earned, earned.c.id == tables.Rollout.id)
    return query.where(*_conditions(wanted, reward)), reward


async def list_rollouts(
    session: ReadSession,
    wanted: RolloutFilter,
    *,
    sort: RolloutSort = "newest",
    count: bool = False,
    cursor: str | None,
    limit: int,
) -> RolloutPage:
    """A page of rollouts; by reward, those without one come last.

    Args: count: whether the first page counts all that the filter leaves
    Raises: BadCursor
    """
    total = None
    if count and cursor is None:
        # Why: a window over the page's own statement reads all its columns; this takes a third of the time.
        by_reward = wanted.reward_min is not None or wanted.reward_max is not None
        counted, _ = _matching(wanted, at_once=by_reward)
        total = await session.scalar(select(func.count()).select_from(counted.subquery()))
    query, reward = _matching(wanted, at_once=sort in ("highest", "lowest"))
    rows = (await session.execute(_sorted(query, reward, sort, cursor).limit(limit + 1))).all()
    found = page(f"rollouts {sort}", rows, limit, shown_rollout, lambda row: _key(row, sort))
    return RolloutPage(items=found.items, next_cursor=found.next_cursor, total=total)


async def list_causes(session: ReadSession, run_id: str, evaluation: str | None = None) -> list[Cause]:
    """Why rollouts of a run were excluded, failed or taught nothing, the most frequent first; each is a `cause` of the
    filter. A rollout may have several.

    Args: evaluation: that of the filter
    """
    rows = await session.execute(_CAUSES, {"run": run_id, "evaluation": evaluation, "limit": MOST_CAUSES})
    return [Cause(cause=row.cause, rollouts=row.rollouts) for row in rows]


def _conditions(wanted: RolloutFilter, reward: ColumnElement[float | None]) -> list[ColumnElement[bool]]:
    rollout, group, state = tables.Rollout, tables.Group, wanted.state
    equal: tuple[tuple[Any, object], ...] = (
        (rollout.run_id, wanted.run_id),
        (rollout.group_id, wanted.group_id),
        # Why: the column has an index; the computed state has none.
        (rollout.state, "queued" if state in (ShownRolloutState.RUNNING, ShownRolloutState.GRADING) else state),
        (_STATE, state),
        (tables.StepGroup.step, wanted.step),
        (group.admitted_version, wanted.version),
        (group.task_number, wanted.task_number),
        (group.agent, wanted.agent),
    )
    found: list[ColumnElement[bool]] = [column == value for column, value in equal if value is not None]
    if wanted.evaluation is not None:
        is_training = group.evaluation_id.is_(None)
        found.append(is_training if wanted.evaluation == "none" else group.evaluation_id == wanted.evaluation)
    if wanted.failed is not None:
        failed = (rollout.state == "excluded") | ((rollout.state == "finished") & (rollout.reason != "succeeded"))
        found.append(failed if wanted.failed else (rollout.state == "finished") & (rollout.reason == "succeeded"))
    if wanted.reward_min is not None:
        found.append(cast("ColumnElement[float]", reward) >= wanted.reward_min - ROUNDING)
    if wanted.reward_max is not None:
        found.append(cast("ColumnElement[float]", reward) <= wanted.reward_max + ROUNDING)
    if wanted.text:
        found.append(_has_text(wanted.run_id, wanted.text))
    if wanted.cause is not None:
        found.append(_bound(_WITH_CAUSE, of_run=wanted.run_id, cause=wanted.cause))
    if wanted.role is not None:
        found.append(_bound(_WITH_ROLE, of_run=wanted.run_id, role=wanted.role))
    if wanted.tool is not None:
        found.append(_bound(f"({_WITH_TOOL})", of_run=wanted.run_id, tool=wanted.tool))
    if wanted.component is not None:
        low = -math.inf if wanted.component_min is None else wanted.component_min - ROUNDING
        high = math.inf if wanted.component_max is None else wanted.component_max + ROUNDING
        found.append(_bound(_WITH_COMPONENT, component=wanted.component, component_min=low, component_max=high))
    return found


def _bound(condition: str, **values: str | float | None) -> ColumnElement[bool]:
    parameters = [
        bindparam(name, value, Double if isinstance(value, float) else String) for name, value in values.items()
    ]
    return cast("ColumnElement[bool]", text(condition).bindparams(*parameters))


def _has_text(run_id: str | None, words: str) -> ColumnElement[bool]:
    as_json = json.dumps(words, ensure_ascii=False)[1:-1]
    return _bound(f"({_FOUND})", run_id=run_id, words=_pattern(words), json_words=_pattern(as_json))


def _pattern(words: str) -> str:
    """A pattern of LIKE that stands for itself anywhere."""
    for special in ("\\", "%", "_"):
        words = words.replace(special, f"\\{special}")
    return f"%{words}%"


def _sorted(
    query: RolloutQuery, reward: ColumnElement[float | None], sort: RolloutSort, cursor: str | None
) -> RolloutQuery:
    created, key_id = tables.Rollout.created_at, tables.Rollout.id
    if sort in ("newest", "oldest"):
        order = tuple_(created, key_id)
        if key := decode_cursor(cursor, f"rollouts {sort}", datetime, str):
            query = query.where(order < tuple_(*key) if sort == "newest" else order > tuple_(*key))
        columns = (created, key_id)
        return query.order_by(*((column.desc() for column in columns) if sort == "newest" else columns))
    place = func.coalesce(-reward if sort == "highest" else reward, literal_column("'Infinity'::float8"))
    if key := decode_cursor(cursor, f"rollouts {sort}", str, str):
        query = query.where(tuple_(place, key_id) > tuple_(as_float(key[0]), key[1]))
    return query.order_by(place, key_id)


def _key(row: RolloutRow, sort: RolloutSort) -> tuple[str | datetime, str]:
    rollout, reward = row[0], row[3]
    if sort in ("newest", "oldest"):
        return rollout.created_at, rollout.id
    place = float("inf") if reward is None else -reward if sort == "highest" else reward
    return repr(place), rollout.id


def shown_rollout(row: RolloutRow) -> Rollout:
    """The row of `select_rollouts` as the API shows it."""
    rollout, group, step, reward, state = row
    return Rollout(
        id=rollout.id,
        run_id=rollout.run_id,
        group_id=rollout.group_id,
        evaluation_id=group.evaluation_id,
        agent=group.agent,
        sibling=rollout.sibling,
        greedy=rollout.greedy,
        rerolls_of=rollout.rerolls_of,
        from_call=rollout.from_call,
        dataset_id=group.dataset_id,
        task_number=group.task_number,
        admitted_version=group.admitted_version,
        step=step,
        state=state,
        attempt=rollout.attempt,
        reward=reward,
        reason=rollout.reason,
        created_at=rollout.created_at,
        finished_at=rollout.finished_at,
    )


async def rollouts_of_group(session: ReadSession, group_id: str, *, rerolls: bool = False) -> list[Rollout]:
    """The siblings of a group by number; with `rerolls` its re-rolls instead."""
    table = tables.Rollout
    kind = table.rerolls_of.is_not(None) if rerolls else table.rerolls_of.is_(None)
    query = select_rollouts().where(table.group_id == group_id, kind).order_by(table.sibling)
    return [shown_rollout(row) for row in (await session.execute(query)).all()]
