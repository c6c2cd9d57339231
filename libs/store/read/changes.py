"""Marks of what a run has: a mark that differs from an earlier one says that there is something new to read."""

from __future__ import annotations

from sqlalchemy import text

from leyden.libs.contracts.api.runs import RUN_PARTS
from leyden.libs.store.database import ReadSession
from leyden.libs.store.read.runs import unknown_run

LATEST_SECONDS = 360
"""A row has the start of its transaction, and becomes visible beside newer ones when that commits; one that commits
later than this is not told. Transactions here are short, and Postgres ends one that waits 300 s for a statement."""


def _newest(table: str) -> str:
    """SQL over `runs`: the newest row of a table, and the number of those that may have come after it."""
    return f"""(
        SELECT concat(newest.moment, '|', (
            SELECT count(*) FROM {table} WHERE run_id = runs.id
                AND created_at > newest.moment - interval '{LATEST_SECONDS} seconds'))
        FROM (SELECT max(created_at) AS moment FROM {table} WHERE run_id = runs.id) AS newest)"""  # noqa: S608  # constants


# Each is one row, or the end of an index and the rows of its last minutes, so that a stream may ask every few seconds.
_MARKS = text(f"""
    SELECT md5(concat_ws('|', runs.intent, s.phase, s.reason)) AS run,
        (SELECT max(number) FROM steps WHERE run_id = runs.id) AS steps,
        (SELECT concat(count(*), '|', max(created_at)) FROM evaluations WHERE run_id = runs.id) AS evaluations,
        concat_ws('|', {_newest("rollouts")}, {_newest("outcomes")}, {_newest("group_credits")}) AS rollouts
    FROM runs JOIN policies ON policies.id = runs.id AND policies.name = ''
    LEFT JOIN run_status s ON s.run_id = runs.id WHERE runs.id = :run_id
""")  # noqa: S608  # constants alone


async def read_marks(session: ReadSession, run_id: str) -> list[str]:
    """A mark of each of `RUN_PARTS`: the run's state, newest step, evaluations, and newest rollouts, ends and credit.

    Raises: UnknownRun
    """
    row = (await session.execute(_MARKS, {"run_id": run_id})).one_or_none()
    if row is None:
        raise await unknown_run(session, run_id)
    return [str(getattr(row, part)) for part in RUN_PARTS]
