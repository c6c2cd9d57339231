"""Pools of engines, and the status of every engine at the controller's last poll."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from sqlalchemy import Boolean, bindparam, case, delete, func, select, text, update
from sqlalchemy.dialects.postgresql import insert

from leyden.libs.contracts.config import DEFAULT_POOL, stored_object
from leyden.libs.contracts.states import EngineState
from leyden.libs.store import tables
from leyden.libs.store.database import Database, ReadSession, Session
from leyden.libs.store.policies import base_models

_POOL_SETTINGS = ("model_path", "context_length", "adapters", "max_adapter_rank", "embeddings")

_SERVING = f"""
    SELECT e.url, e.run_id, e.policy_version, e.pool, false, NULL FROM engines e
    WHERE e.state = '{EngineState.SERVING}' AND e.run_id IS NOT NULL
    UNION ALL
    SELECT a.url, a.run_id, a.policy_version, e.pool, true, a.adapter
    FROM engine_adapters a JOIN engines e ON e.url = a.url WHERE e.state = '{EngineState.SERVING}'
"""  # noqa: S608  # constants alone

_ASSIGN = text("""
    UPDATE pools SET run_id = wanted.run_ids[1], run_ids = wanted.run_ids, waiting = wanted.waiting, updated_at = now()
    FROM (SELECT CAST(:run_ids AS text[]) AS run_ids, CAST(:waiting AS text[]) AS waiting) AS wanted
    WHERE name = :name AND (pools.run_id, pools.run_ids, pools.waiting)
        IS DISTINCT FROM (wanted.run_ids[1], wanted.run_ids, wanted.waiting)
""")


@dataclass(frozen=True)
class Pool:
    """Engines of one model; `model_path` and `context_length` None: the services' own settings.

    `adapters`: so many runs share the engines, each with a LoRA adapter of `max_adapter_rank` at most. `embeddings`:
    they embed, and get no weights of runs.
    """

    name: str
    model_path: str | None = None
    context_length: int | None = None
    adapters: int | None = None
    max_adapter_rank: int | None = None
    embeddings: bool = False


class RunModel(NamedTuple):
    """A run's pool, and the folder of the model that the run names or began with; None: it begins with the pool's."""

    pool: Pool
    own: str | None


@dataclass(frozen=True)
class Assignment:
    """The runs that have the engines of a pool, and those that wait for them, in order."""

    run_ids: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()


class Adapter(NamedTuple):
    """One run's adapter on a shared engine. `name` is None for version 0, the base model alone."""

    run_id: str
    policy_version: int
    name: str | None


@dataclass(frozen=True)
class EngineStatus:
    """The version that an engine serves, or the adapters of several runs, or why it serves none."""

    url: str
    state: EngineState
    run_id: str | None = None
    policy_version: int | None = None
    detail: str | None = None
    adapters: tuple[Adapter, ...] = ()


_SWAPPED = text("""
    INSERT INTO weight_swaps (run_id, policy_version, url, seconds)
    SELECT id, :policy_version, :url, :seconds FROM runs WHERE id = :run_id FOR KEY SHARE
""")


async def record_swap(session: Session, run_id: str, policy_version: int, url: str, seconds: float) -> None:
    """Records for how long an engine was paused for a version; nothing of a run that is gone."""
    row = {"run_id": run_id, "policy_version": policy_version, "url": url, "seconds": seconds}
    await session.execute(_SWAPPED, row)


async def write_pools(session: Session, pools: Sequence[Pool]) -> None:
    """Makes these the only pools; engines of others go."""
    names = [pool.name for pool in pools]
    await session.execute(delete(tables.Pool).where(tables.Pool.name.not_in(names)))
    await session.execute(delete(tables.Engine).where(tables.Engine.pool.not_in(names)))
    statement = insert(tables.Pool)
    written = {name: statement.excluded[name] for name in _POOL_SETTINGS}
    await session.execute(
        statement.on_conflict_do_update(index_elements=["name"], set_={**written, "updated_at": func.now()}),
        [asdict(pool) for pool in pools],
    )


async def write_assignments(session: Session, assignments: Mapping[str, Assignment]) -> None:
    """Writes the runs that have each pool and the runs that wait for it. Leaves rows without a change alone."""
    for name, one in assignments.items():
        await session.execute(_ASSIGN, {"name": name, "run_ids": list(one.run_ids), "waiting": list(one.waiting)})


async def read_pools(session: ReadSession) -> dict[str, Pool]:
    """Every pool by name."""
    rows = await session.scalars(select(tables.Pool).order_by(tables.Pool.name))
    return {row.name: _pool(row) for row in rows}


async def pool_of_run(session: ReadSession, run_id: str) -> Pool | None:
    """The pool that a run names; None where it no longer exists. Raises: BrokenDocument"""
    found = await read_run_model(session, run_id)
    return None if found is None else found.pool


async def read_run_model(session: ReadSession, run_id: str) -> RunModel | None:
    """The pool and the model of a run; None where the pool no longer exists. Raises: BrokenDocument"""
    document = await session.scalar(select(tables.Run.config).where(tables.Run.id == run_id))
    config = {} if document is None else stored_object(document)
    name = config.get("pool", DEFAULT_POOL)
    own = config.get("model") or (await base_models(session, [run_id])).get(run_id)
    row = await session.get(tables.Pool, name)
    if row is None:
        return RunModel(Pool(name), own) if name == DEFAULT_POOL else None
    return RunModel(_pool(row), own)


def _pool(row: tables.Pool) -> Pool:
    return Pool(row.name, row.model_path, row.context_length, row.adapters, row.max_adapter_rank, row.embeddings)


async def embedding_engines(session: ReadSession, pool: str) -> Sequence[EngineStatus] | None:
    """The engines of a pool that embeds, by URL, as the controller last saw them; None where there is no such pool."""
    found = await session.get(tables.Pool, pool)
    if found is None or not found.embeddings:
        return None
    table = tables.Engine
    rows = await session.scalars(select(table).where(table.pool == pool).order_by(table.url))
    return [EngineStatus(row.url, EngineState(row.state), detail=row.detail) for row in rows]


async def write_engines(session: Session, engines: Sequence[EngineStatus], pool: str = DEFAULT_POOL) -> None:
    """Writes statuses of a pool's engines, one row per url."""
    if not engines:
        return
    statement = insert(tables.Engine)
    columns = ("url", "state", "run_id", "policy_version", "detail")
    written = {name: statement.excluded[name] for name in ("pool", *columns[1:])}
    silent = statement.excluded.silent_since
    first = func.coalesce(tables.Engine.silent_since, silent)
    changed = {**written, "updated_at": func.now(), "silent_since": case((silent.is_not(None), first))}
    await session.execute(
        statement.values(silent_since=case((bindparam("is_silent", type_=Boolean), func.now()))).on_conflict_do_update(
            index_elements=["url"], set_=changed
        ),
        [
            {
                **{name: getattr(engine, name) for name in columns},
                "pool": pool,
                "is_silent": engine.state is not EngineState.SERVING,
            }
            for engine in engines
        ],
    )
    table = tables.EngineAdapter
    await session.execute(delete(table).where(table.url.in_([engine.url for engine in engines])))
    shared = [
        {"url": engine.url, "run_id": one.run_id, "policy_version": one.policy_version, "adapter": one.name}
        for engine in engines
        for one in engine.adapters
    ]
    if shared:
        await session.execute(insert(table), shared)


async def forget_other_engines(session: Session, urls: Sequence[str], pool: str = DEFAULT_POOL) -> None:
    """Removes a pool's engines that no longer exist, so that no request is sent to them."""
    table = tables.Engine
    gone = await session.execute(delete(table).where(table.pool == pool, table.url.not_in(urls)).returning(table.url))
    if gone.all():
        await session.execute(update(tables.Pool).where(tables.Pool.name == pool).values(updated_at=func.now()))


class ServingEngine(NamedTuple):
    """One engine, one run that it serves, and the version served. `adapter` is None if the engine loaded full weights.

    `is_shared`: the engine serves adapters of several runs, and reports the versions of its base model alone.
    """

    url: str
    run_id: str
    policy_version: int | None
    pool: str
    is_shared: bool = False
    adapter: str | None = None


async def serving_engines(session: ReadSession) -> Sequence[ServingEngine]:
    """Every engine that the controller last saw serving a run, once for each run, by URL and run."""
    return _serving(await session.execute(text(_SERVING)))


async def read_serving_engines(database: Database) -> Sequence[ServingEngine]:
    """The same without a session, for a process that reads them several times a second. Raises: StoreAway"""
    async with database.statements() as connection:
        return _serving(await (await connection.execute(_SERVING)).fetchall())


def _serving(rows: Iterable[Iterable[Any]]) -> Sequence[ServingEngine]:
    return sorted((ServingEngine(*row) for row in rows), key=lambda one: (one.url, one.run_id))


async def has_engines(session: ReadSession) -> bool:
    """Whether a controller manages any engine; without one, the gateway's settings alone name engines."""
    return bool(await session.scalar(select(select(tables.Engine.url).exists())))


async def newest_policy_version(session: ReadSession, run_id: str) -> int | None:
    """The newest version of a run's policy; None before its first."""
    return await session.scalar(
        select(func.max(tables.PolicyVersion.version)).where(tables.PolicyVersion.run_id == run_id)
    )
