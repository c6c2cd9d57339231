"""Objects that agents store by the Responses API: conversations, their items, and marks of deleted responses."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from sqlalchemy import func, select, update
from sqlalchemy.dialects.postgresql import insert

from leyden.libs.contracts.conversation import Json
from leyden.libs.store.database import ReadSession, Session
from leyden.libs.store.tables import AgentObject


class AttemptOfRun(NamedTuple):
    """The attempt that stores an object, in the columns' words."""

    run_id: str
    rollout_id: str
    attempt: int


async def add_objects(
    session: Session, attempt: AttemptOfRun, owner_id: str, documents: Mapping[str, Json | None]
) -> None:
    """Stores documents by id, in order, after all earlier ones; those whose id exists stay as they are.

    Args: documents: None marks a deleted object
    """
    if not documents:
        return
    # The clocks of gateways differ: the store alone knows what is earlier. Requests that end at once take turns.
    await session.execute(
        select(AgentObject.id).where(*_in(attempt, owner_id), AgentObject.id == owner_id).with_for_update()
    )
    last = await session.scalar(select(func.max(AgentObject.position)).where(*_in(attempt, owner_id))) or 0
    rows = [
        {**attempt._asdict(), "owner_id": owner_id, "id": name, "position": last + index, "document": document}
        for index, (name, document) in enumerate(documents.items(), 1)
    ]
    await session.execute(insert(AgentObject).on_conflict_do_nothing(), rows)


async def replace_object(
    session: Session, attempt: AttemptOfRun, owner_id: str, name: str | None, document: Json | None
) -> None:
    """Replaces a document, or deletes it where `document` is None. Args: name: None for all objects of the owner."""
    condition = [AgentObject.id == name] if name is not None else []
    await session.execute(update(AgentObject).where(*_in(attempt, owner_id), *condition).values(document=document))


async def owned_objects(session: ReadSession, attempt: AttemptOfRun, owner_id: str) -> dict[str, Json]:
    """An object and its items that are not deleted, by id, in order."""
    rows = await session.scalars(
        select(AgentObject).where(*_in(attempt, owner_id)).order_by(AgentObject.position, AgentObject.id)
    )
    return {row.id: row.document for row in rows if row.document is not None}


async def objects_by_id(session: ReadSession, attempt: AttemptOfRun, ids: Collection[str]) -> dict[str, Json | None]:
    """Items and deleted responses with these ids; None for what was deleted."""
    rows = await session.scalars(select(AgentObject).where(*_in(attempt, None), AgentObject.id.in_(ids)))
    return {row.id: row.document for row in rows}


def _in(attempt: AttemptOfRun, owner_id: str | None) -> list[Any]:
    columns = {**attempt._asdict()} | ({} if owner_id is None else {"owner_id": owner_id})
    return [getattr(AgentObject, name) == value for name, value in columns.items()]
