"""Re-rolls of a group's siblings, which the controller adds once all siblings have ended.

They are rollouts of the same group, so that it completes after them. Their numbers follow those of the siblings, in an
order that the ended siblings alone decide: adding them twice makes one row.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from sqlalchemy import text

from leyden.libs.contracts.ids import rollout_id
from leyden.libs.store.database import ReadSession, Session


class EndedSibling(NamedTuple):
    """A finished sibling of an open group: the number of requests to the model that its counted attempt had answered,
    and the number of siblings in its group."""

    run_id: str
    group_id: str
    size: int
    rollout_id: str
    calls: int


class NewReroll(NamedTuple):
    """A re-roll to add, by its number in the group: it repeats the calls of a sibling before `from_call`."""

    group_id: str
    number: int
    rerolls_of: str
    from_call: int


_ENDED = text("""
    SELECT g.run_id, g.id AS group_id, g.size, r.id AS rollout_id, (
        SELECT count(DISTINCT c.request_id) FROM model_calls c
        WHERE c.run_id = r.run_id AND c.rollout_id = r.id AND c.attempt = r.attempt AND c.status = 'completed') AS calls
    FROM groups g
    JOIN runs u ON u.id = g.run_id AND u.baseline = 'monte_carlo'
    JOIN rollouts r ON r.group_id = g.id AND r.state = 'finished'
    WHERE g.state = 'open' AND g.evaluation_id IS NULL AND NOT EXISTS (
        SELECT FROM rollouts o WHERE o.group_id = g.id AND (o.state = 'queued' OR o.rerolls_of IS NOT NULL))
    ORDER BY g.id, r.sibling
""")

# A second controller waits for the rows of the first one here, and then adds none.
_ADD = text("""
    INSERT INTO rollouts (id, run_id, group_id, sibling, state, rerolls_of, from_call, trace_parent)
    SELECT v.id, r.run_id, r.group_id, v.number, 'queued', v.source, v.from_call, r.trace_parent
    FROM unnest(CAST(:ids AS text[]), CAST(:numbers AS integer[]), CAST(:sources AS text[]),
                CAST(:calls AS integer[])) AS v (id, number, source, from_call)
    JOIN rollouts r ON r.id = v.source
    ON CONFLICT DO NOTHING
""")
_COUNT = text("""
    UPDATE groups g SET size = (SELECT count(*) FROM rollouts r WHERE r.group_id = g.id) WHERE g.id = ANY(:groups)
""")


async def ended_siblings(session: ReadSession) -> list[EndedSibling]:
    """The finished siblings of open groups that await their re-rolls: all rollouts of such a group have ended."""
    return [EndedSibling(*row) for row in await session.execute(_ENDED)]


async def add_rerolls(session: Session, rerolls: Iterable[NewReroll]) -> None:
    """Adds re-rolls, which wait for an attempt. Idempotency key: the group and the number."""
    rows = list(rerolls)
    if rows:
        columns = {
            "ids": [rollout_id(one.group_id, one.number) for one in rows],
            "numbers": [one.number for one in rows],
            "sources": [one.rerolls_of for one in rows],
            "calls": [one.from_call for one in rows],
        }
        await session.execute(_ADD, columns)
        await session.execute(_COUNT, {"groups": sorted({one.group_id for one in rows})})
