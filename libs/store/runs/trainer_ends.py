"""The ends of trainers that were not planned: the controller counts them, and the run shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert

from leyden.libs.contracts.api import runs as api
from leyden.libs.store import tables
from leyden.libs.store.database import Database, ReadSession

MAX_OUTPUT = 20_000


@dataclass(frozen=True)
class TrainerEnd:
    """One end; the fields are those of the table's columns."""

    run_id: str
    attempt: int
    state: str
    reason: str
    output: str = ""


class StoredEnds:
    """The journal of the controller's supervisor, in Postgres."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def last_attempt(self, run_id: str) -> int:
        """The newest attempt whose end is recorded; 0 for none."""
        table = tables.TrainerEnd
        async with self._database.read() as session:
            return await session.scalar(select(func.max(table.attempt)).where(table.run_id == run_id)) or 0

    async def record(self, end: TrainerEnd) -> Sequence[TrainerEnd]:
        """Records an end, and returns those of the run after its last step, oldest first.

        A repeat changes nothing; idempotency key: run and attempt.
        """
        table, step = tables.TrainerEnd, tables.Step
        row = {**vars(end), "reason": _text(end.reason), "output": _text(end.output[-MAX_OUTPUT:])}
        async with self._database.session() as session:
            made = await session.scalar(select(func.max(step.number)).where(step.run_id == end.run_id)) or 0
            await session.execute(insert(table).values(**row, step=made).on_conflict_do_nothing())
            query = select(table).where(table.run_id == end.run_id, table.step == made).order_by(table.attempt)
            rows = (await session.scalars(query)).all()
            return [TrainerEnd(one.run_id, one.attempt, one.state, one.reason, one.output) for one in rows]


async def trainer_ends(session: ReadSession, run_id: str) -> tuple[int, api.TrainerEnd | None]:
    """How often a trainer of the run ended without a plan, and the last of these ends."""
    table = tables.TrainerEnd
    count = await session.scalar(select(func.count()).select_from(table).where(table.run_id == run_id)) or 0
    query = select(table).where(table.run_id == run_id).order_by(table.attempt.desc()).limit(1)
    row = (await session.scalars(query)).one_or_none()
    names = api.TrainerEnd.model_fields
    return count, None if row is None else api.TrainerEnd(**{name: getattr(row, name) for name in names})


def _text(output: str) -> str:
    """Postgres stores no NUL."""
    return output.replace("\0", "\ufffd")
