"""The tasks of a run with what its versions earned on them, summed up in Postgres."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from sqlalchemy import text

from leyden.libs.contracts.api.tasks import RunTask, RunTaskPage, TaskFailure, TaskVerdict, VersionOnTask
from leyden.libs.store.database import ReadSession
from leyden.libs.store.read.paging import BadCursor, decode_cursor, page
from leyden.libs.store.rewards import EARNED, GIVEN_OF_RUNS, SIBLING, SOLVED

TaskSort = Literal["number", "highest", "lowest", "attempts", "failure"]
TEXT_CHARACTERS = 300
"""Shown of a task."""

# Places in the order of each sort, the smallest first; tasks without a reward or a failure come last.
_PLACES: dict[TaskSort, str] = {
    "number": "0::float8",
    "highest": "coalesce(-reward_mean, 'Infinity')",
    "lowest": "coalesce(reward_mean, 'Infinity')",
    "attempts": "-attempts::float8",
    "failure": "coalesce(-extract(epoch FROM failed_at)::float8, 'Infinity')",
}

# Greedy rollouts show what the policy would do, not what it samples. A reward that is still to come is unknown.
_OF_TASKS = f"""
    WITH given AS MATERIALIZED ({GIVEN_OF_RUNS}), earned AS MATERIALIZED (
        SELECT groups.dataset_id, groups.task_number, groups.id AS group_id, groups.created_at, groups.admitted_version,
            rollouts.id, rollouts.reason, rollouts.finished_at,
            rollouts.state = 'excluded' OR rollouts.state = 'finished' AND rollouts.reason <> 'succeeded' AS failed,
            CASE WHEN {SIBLING} THEN {EARNED} END AS reward,
            -- The counted attempt is the last one. Why: counting the rows of all takes a third of the time.
            coalesce(rollouts.attempt, (SELECT max(number) FROM attempts WHERE rollout_id = rollouts.id), 0) AS attempts
        FROM groups JOIN rollouts ON rollouts.group_id = groups.id JOIN runs ON runs.id = groups.run_id
            LEFT JOIN given ON given.id = rollouts.id
        WHERE groups.run_id = :run_id AND rollouts.rerolls_of IS NULL AND ((:evaluation)::text IS NULL
            OR CASE :evaluation WHEN 'none' THEN groups.evaluation_id IS NULL
               ELSE groups.evaluation_id = :evaluation END)
    ), of_versions AS (
        SELECT dataset_id, task_number, admitted_version, count(*) AS rollouts, sum(attempts) AS attempts,
            count(DISTINCT group_id) AS groups, count(reward) AS rewarded, sum(reward) AS total,
            count(*) FILTER (WHERE reward {SOLVED}) AS solved
        FROM earned GROUP BY 1, 2, 3
    ), failures AS (
        SELECT DISTINCT ON (dataset_id, task_number) dataset_id, task_number, id AS failed_id, reason AS failed_reason,
            finished_at AS failed_at
        FROM earned WHERE failed ORDER BY dataset_id, task_number, finished_at DESC NULLS LAST, id
    ), newest AS (
        SELECT DISTINCT ON (dataset_id, task_number) dataset_id, task_number, group_id
        FROM earned ORDER BY dataset_id, task_number, created_at DESC, group_id
    ), of_tasks AS (
        SELECT dataset_id, task_number, sum(rollouts)::bigint AS rollouts, sum(attempts)::bigint AS attempts,
            sum(groups)::bigint AS groups, sum(rewarded)::bigint AS rewarded,
            sum(total) / nullif(sum(rewarded), 0) AS reward_mean,
            CASE WHEN sum(rewarded) = 0 THEN NULL WHEN sum(solved) = sum(rewarded) THEN 'solved'
                WHEN sum(solved) = 0 THEN 'unsolved' ELSE 'mixed' END AS verdict,
            jsonb_agg(jsonb_build_object('version', admitted_version, 'rollouts', rewarded,
                'reward_mean', total / nullif(rewarded, 0)) ORDER BY admitted_version) AS versions
        FROM of_versions GROUP BY 1, 2
    )
"""  # noqa: S608  # constants alone

# One row without a task where the filter leaves none: it has the counts.
_PAGE = f"""{_OF_TASKS}, placed AS (
        SELECT of_tasks.*, newest.group_id, failed_id, failed_reason, failed_at, {{place}} AS place
        FROM of_tasks JOIN newest USING (dataset_id, task_number)
        LEFT JOIN failures USING (dataset_id, task_number)
    ), counts AS (
        SELECT coalesce(jsonb_object_agg(name, count), '{{}}') AS verdicts FROM (
            SELECT coalesce(verdict, 'unknown') AS name, count(*) FROM of_tasks GROUP BY 1
        ) AS of_verdicts
    )
    SELECT placed.*, counts.verdicts FROM counts LEFT JOIN placed
        ON ((:verdict)::text IS NULL OR coalesce(verdict, 'unknown') = :verdict)
        AND ((:dataset_id)::text IS NULL
            OR (place, dataset_id, task_number) > (CAST(:after AS float8), :dataset_id, CAST(:number AS integer)))
    ORDER BY place, dataset_id, task_number LIMIT :limit
"""  # noqa: S608  # constants alone

# Why: rows of tasks may have a MiB; those of a page are read alone.
_TEXTS = text("""
    SELECT tasks.dataset_id, tasks.number, left(tasks.payload::text, :characters) AS text
    FROM unnest(CAST(:datasets AS text[]), CAST(:numbers AS integer[])) AS asked (dataset_id, number)
    JOIN tasks USING (dataset_id, number)
""")


async def list_run_tasks(
    session: ReadSession,
    run_id: str,
    *,
    evaluation: str | None,
    verdict: TaskVerdict | Literal["unknown"] | None,
    sort: TaskSort,
    cursor: str | None,
    limit: int,
) -> RunTaskPage:
    """A page of the tasks that a run has groups of; without a place in the order, a task comes last.

    Args: evaluation: the id of one, `none` for training rollouts alone, None for all
    Raises: BadCursor
    """
    name = f"tasks of {run_id} {sort}"
    key = decode_cursor(cursor, name, str, str, int)
    place, dataset_id, number = key or (None, None, None)
    after = {"after": _float(place), "dataset_id": dataset_id, "number": number}
    wanted = {
        "run_id": run_id,
        "run_ids": [run_id],
        "evaluation": evaluation,
        **after,
        "verdict": verdict,
        "limit": limit + 1,
    }
    every = (await session.execute(text(_PAGE.replace("{place}", _PLACES[sort])), wanted)).mappings().all()
    rows = [row for row in every if row["dataset_id"] is not None]
    texts = await task_texts(session, [(row["dataset_id"], row["task_number"]) for row in rows])
    made = page(
        name,
        rows,
        limit,
        lambda row: _task(row, texts.get((row["dataset_id"], row["task_number"]))),
        lambda row: (repr(row["place"]), row["dataset_id"], row["task_number"]),
    )
    verdicts = every[0]["verdicts"] if cursor is None else None
    return RunTaskPage(items=made.items, next_cursor=made.next_cursor, verdicts=verdicts)


async def task_texts(session: ReadSession, asked: Sequence[tuple[str, int]]) -> dict[tuple[str, int], str]:
    """The first 300 characters of tasks by dataset and number; those that are gone are left out."""
    places = {"datasets": [dataset for dataset, _ in asked], "numbers": [number for _, number in asked]}
    found = await session.execute(_TEXTS, {**places, "characters": TEXT_CHARACTERS})
    return {(row.dataset_id, row.number): row.text for row in found}


def _float(part: object) -> float | None:
    try:
        return None if part is None else float(str(part))
    except ValueError:
        raise BadCursor("cursor does not belong to this list: leave it out to begin at the first page") from None


def _task(row: Mapping[Any, Any], beginning: str | None) -> RunTask:
    failure = None
    if row["failed_id"] is not None:
        failure = TaskFailure(rollout_id=row["failed_id"], reason=row["failed_reason"], finished_at=row["failed_at"])
    same = ("dataset_id", "group_id", "groups", "rollouts", "attempts", "rewarded", "reward_mean", "verdict")
    return RunTask(
        **{name: row[name] for name in same},
        number=row["task_number"],
        text=beginning,
        versions=[VersionOnTask.model_validate(one) for one in row["versions"]],
        last_failure=failure,
    )
