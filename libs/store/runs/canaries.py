"""Canaries of policy versions, and the answers of engines to them."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert

from leyden.libs.contracts.canary import Canary
from leyden.libs.contracts.states import CanaryVerdict
from leyden.libs.store import tables
from leyden.libs.store.database import ReadSession, Session


@dataclass(frozen=True)
class CanaryAnswer:
    """The answer of an engine to a version's canary; the fields are those of the table's columns."""

    url: str
    run_id: str
    policy_version: int
    verdict: CanaryVerdict
    tokens: int | None = None
    gap: float | None = None
    largest: float | None = None
    gap_limit: float | None = None
    moved: float | None = None
    detail: str | None = None


async def add_canary(session: Session, run_id: str, version: int, canary: Canary) -> None:
    """Records the canary of a version. A repeat changes nothing; idempotency key: run and version."""
    row = {"run_id": run_id, "version": version, "canary": canary.model_dump(mode="json")}
    await session.execute(insert(tables.VersionCanary).values(row).on_conflict_do_nothing())


async def has_canary(session: ReadSession, run_id: str, version: int) -> bool:
    """Whether the trainer has recorded the canary of a version."""
    table = tables.VersionCanary
    return (
        await session.scalar(select(table.version).where(table.run_id == run_id, table.version == version)) is not None
    )


async def read_canaries(session: ReadSession, run_id: str, version: int) -> tuple[Canary | None, Canary | None]:
    """The canary of a version, and that of the version before."""
    table = tables.VersionCanary
    query = select(table).where(table.run_id == run_id, table.version.in_([version, version - 1]))
    found = {row.version: Canary.model_validate(row.canary) for row in await session.scalars(query)}
    return found.get(version), found.get(version - 1)


async def record_answer(session: Session, answer: CanaryAnswer) -> None:
    """Records the newest answer of an engine for a run; it replaces the one before."""
    row = {**vars(answer), "answered_at": func.now()}
    statement = insert(tables.CanaryAnswer).values(row)
    await session.execute(statement.on_conflict_do_update(index_elements=["url", "run_id"], set_=row))
