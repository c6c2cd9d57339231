"""The recorded calls of a rollout that a re-roll repeats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import select, text

from leyden.libs.contracts.states import CallStatus
from leyden.libs.store import tables
from leyden.libs.store.database import ReadSession
from leyden.libs.store.records.chains import FullCall, MissingParent, full_calls


class RecordedRequest(NamedTuple):
    """The request that a re-roll has to repeat next: its number, from 0, its choices in order and, in full, its
    conversation and prompt. Without choices the record has no such request."""

    number: int
    choices: Sequence[tables.ModelCall]
    full: FullCall | None


class Reroll(NamedTuple):
    """A re-roll; `repeats` is None where its next request is sampled."""

    repeats: RecordedRequest | None


# The place of the next request is a fact of the store: any gateway may get it.
_PLACE = text("""
    SELECT r.from_call, s.id AS source, s.attempt, (
        SELECT count(DISTINCT c.request_id) FROM model_calls c
        WHERE c.run_id = r.run_id AND c.rollout_id = r.id AND c.attempt = :attempt AND c.status = 'completed') AS place
    FROM rollouts r JOIN rollouts s ON s.id = r.rerolls_of
    WHERE r.id = :rollout
""")
_REQUEST = text("""
    SELECT request_id FROM model_calls
    WHERE run_id = :run AND rollout_id = :rollout AND attempt = :attempt AND status = 'completed'
    GROUP BY request_id ORDER BY min(sequence), request_id OFFSET :place LIMIT 1
""")


async def reroll_of(session: ReadSession, run_id: str, rollout_id: str, attempt: int) -> Reroll | None:
    """The next request of an attempt, if its rollout is a re-roll; None for a sibling."""
    found = (await session.execute(_PLACE, {"rollout": rollout_id, "attempt": attempt})).one_or_none()
    if found is None:
        return None
    if found.place >= found.from_call:
        return Reroll(None)
    where = {"run": run_id, "rollout": found.source, "attempt": found.attempt, "place": found.place}
    request_id = await session.scalar(_REQUEST, where)
    table = tables.ModelCall
    recorded = (table.run_id == run_id, table.request_id == request_id, table.status == CallStatus.COMPLETED)
    choices = (await session.scalars(select(table).where(*recorded).order_by(table.choice))).all()
    full = (await full_calls(session, choices[:1]))[0] if choices else None
    return Reroll(RecordedRequest(found.place, choices, None if isinstance(full, MissingParent) else full))
