"""Pools of engines, and the status of every engine at the controller's last poll."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from sqlalchemy import delete, func, select, text
from sqlalchemy.dialects.postgresql import insert

from leyden.libs.contracts.config import DEFAULT_POOL
from leyden.libs.contracts.states import EngineState
from leyden.libs.store import tables
from leyden.libs.store.database import ReadSession, Session

_ASSIGN = text("""
    UPDATE pools SET run_id = :run_id, waiting = CAST(:waiting AS text[]), updated_at = now()
    WHERE name = :name AND (run_id, waiting) IS DISTINCT FROM (CAST(:run_id AS text), CAST(:waiting AS text[]))
""")


@dataclass(frozen=True)
class Pool:
    """Engines of one model; `model_path` and `context_length` None: the services' own settings."""

    name: str
    model_path: str | None = None
    context_length: int | None = None


@dataclass(frozen=True)
class Assignment:
    """The run that has the engines of a pool, and those that wait for them, in order."""

    run_id: str | None
    waiting: tuple[str, ...] = ()


@dataclass(frozen=True)
class EngineStatus:
    """The version that an engine serves, or why it serves none."""

    url: str
    state: EngineState
    run_id: str | None = None
    policy_version: int | None = None
    detail: str | None = None


async def write_pools(session: Session, pools: Sequence[Pool]) -> None:
    """Makes these the only pools; engines of others go."""
    names = [pool.name for pool in pools]
    await session.execute(delete(tables.Pool).where(tables.Pool.name.not_in(names)))
    await session.execute(delete(tables.Engine).where(tables.Engine.pool.not_in(names)))
    statement = insert(tables.Pool)
    written = {name: statement.excluded[name] for name in ("model_path", "context_length")}
    await session.execute(
        statement.on_conflict_do_update(index_elements=["name"], set_={**written, "updated_at": func.now()}),
        [asdict(pool) for pool in pools],
    )


async def write_assignments(session: Session, assignments: Mapping[str, Assignment]) -> None:
    """Writes which run has each pool and which wait; rows that say so already stay as they are."""
    for name, one in assignments.items():
        await session.execute(_ASSIGN, {"name": name, "run_id": one.run_id, "waiting": list(one.waiting)})


async def read_pools(session: ReadSession) -> dict[str, Pool]:
    """Every pool by name."""
    rows = await session.scalars(select(tables.Pool).order_by(tables.Pool.name))
    return {row.name: Pool(row.name, row.model_path, row.context_length) for row in rows}


async def pool_of_run(session: ReadSession, run_id: str) -> Pool | None:
    """The pool that a run names; None where it no longer exists."""
    config = await session.scalar(select(tables.Run.config).where(tables.Run.id == run_id))
    name = (config or {}).get("pool", DEFAULT_POOL)
    row = await session.get(tables.Pool, name)
    if row is None:
        return Pool(name) if name == DEFAULT_POOL else None
    return Pool(row.name, row.model_path, row.context_length)


async def write_engines(session: Session, engines: Sequence[EngineStatus], pool: str = DEFAULT_POOL) -> None:
    """Writes statuses of a pool's engines, one row per url."""
    if not engines:
        return
    statement = insert(tables.Engine)
    written = {name: statement.excluded[name] for name in ("pool", "state", "run_id", "policy_version", "detail")}
    await session.execute(
        statement.on_conflict_do_update(index_elements=["url"], set_={**written, "updated_at": func.now()}),
        [{**asdict(engine), "pool": pool} for engine in engines],
    )


async def forget_other_engines(session: Session, urls: Sequence[str], pool: str = DEFAULT_POOL) -> None:
    """Removes a pool's engines that no longer exist, so that no request is sent to them."""
    table = tables.Engine
    await session.execute(delete(table).where(table.pool == pool, table.url.not_in(urls)))


async def serving_engines(session: ReadSession) -> Sequence[tuple[str, str, int | None, str]]:
    """URL, run, policy version and pool of every engine that the controller last saw serving a run, by URL."""
    table = tables.Engine
    serving = (table.state == EngineState.SERVING) & table.run_id.is_not(None)
    columns = select(table.url, table.run_id, table.policy_version, table.pool)
    rows = await session.execute(columns.where(serving).order_by(table.url))
    return [(url, run_id, version, pool) for url, run_id, version, pool in rows if run_id is not None]


async def newest_policy_version(session: ReadSession, run_id: str) -> int | None:
    """The newest version of a run's policy; None before its first."""
    return await session.scalar(
        select(func.max(tables.PolicyVersion.version)).where(tables.PolicyVersion.run_id == run_id)
    )
