"""The status of every engine at the controller's last poll."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from sqlalchemy import delete, func, select
from sqlalchemy.dialects.postgresql import insert

from leyden.libs.contracts.states import EngineState
from leyden.libs.store import tables
from leyden.libs.store.database import ReadSession, Session


@dataclass(frozen=True)
class EngineStatus:
    """The version that an engine serves, or why it serves none."""

    url: str
    state: EngineState
    run_id: str | None = None
    policy_version: int | None = None
    detail: str | None = None


async def write_engines(session: Session, engines: Sequence[EngineStatus]) -> None:
    """Writes statuses, one row per url."""
    if not engines:
        return
    statement = insert(tables.Engine)
    written = {name: statement.excluded[name] for name in ("state", "run_id", "policy_version", "detail")}
    await session.execute(
        statement.on_conflict_do_update(index_elements=["url"], set_={**written, "updated_at": func.now()}),
        [asdict(engine) for engine in engines],
    )


async def forget_other_engines(session: Session, urls: Sequence[str]) -> None:
    """Removes engines that no longer exist, so that no request is sent to them."""
    await session.execute(delete(tables.Engine).where(tables.Engine.url.not_in(urls)))


async def serving_engines(session: ReadSession) -> Sequence[tuple[str, str, int | None]]:
    """URL, run and policy version of every engine that the controller last saw serving a run, by URL."""
    table = tables.Engine
    serving = (table.state == EngineState.SERVING) & table.run_id.is_not(None)
    columns = select(table.url, table.run_id, table.policy_version)
    rows = await session.execute(columns.where(serving).order_by(table.url))
    return [(url, run_id, version) for url, run_id, version in rows if run_id is not None]


async def newest_policy_version(session: ReadSession, run_id: str) -> int | None:
    """The newest version of a run's policy; None before its first."""
    return await session.scalar(
        select(func.max(tables.PolicyVersion.version)).where(tables.PolicyVersion.run_id == run_id)
    )
