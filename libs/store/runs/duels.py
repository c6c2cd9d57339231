"""Duels of evaluations: stored pairs, and the win rates that follow from them at each reading."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from sqlalchemy import select, text

from leyden.libs.contracts.api.body import Page
from leyden.libs.contracts.api.duels import Duel, DuelRequest, WinRate
from leyden.libs.store import tables
from leyden.libs.store.database import ReadSession, Session
from leyden.libs.store.read.intervals import TaskSums, statistic
from leyden.libs.store.read.paging import decode_cursor, page

_ROLLOUTS = text("""
    SELECT rollouts.id, groups.run_id, groups.evaluation_id, groups.dataset_id, groups.task_number AS task
    FROM rollouts JOIN groups ON groups.id = rollouts.group_id WHERE rollouts.id = ANY(:ids)
""")

_VERSIONS = text("""
    SELECT evaluation_id AS id, min(run_id) AS run_id, min(admitted_version) AS version FROM groups
    WHERE evaluation_id = ANY(:ids) GROUP BY 1
""")


class DuelRefused(ValueError):
    """A pair is none of these evaluations, or its values are of other components."""


async def add_duel(session: Session, run_id: str, asked: DuelRequest, given_by: str) -> Duel:
    """Stores the pairs of a duel.

    Raises: DuelRefused
    """
    names = [one.name for one in asked.reward.components]
    ids = {one for pair in asked.pairs for one in (pair.rollout, pair.against)}
    found = {row.id: row for row in await session.execute(_ROLLOUTS, {"ids": sorted(ids)})}
    pairs, seen = [], set[tuple[str, str]]()
    for number, pair in enumerate(asked.pairs):
        mine, rival = found.get(pair.rollout), found.get(pair.against)
        place = f"pairs.{number}"
        if mine is None or (mine.run_id, mine.evaluation_id) != (run_id, asked.evaluation):
            raise DuelRefused(f"{place}.rollout: it is none of evaluation {asked.evaluation!r} of run {run_id!r}")
        if rival is None or rival.evaluation_id != asked.against:
            raise DuelRefused(f"{place}.against: it is none of evaluation {asked.against!r}")
        if (mine.dataset_id, mine.task) != (rival.dataset_id, rival.task):
            raise DuelRefused(f"{place}: the rollouts have different tasks: compare answers to one task")
        if (pair.rollout, pair.against) in seen:
            raise DuelRefused(f"{place}: it is there already, and would count twice: send each pair once")
        seen.add((pair.rollout, pair.against))
        if sorted(pair.values) != sorted(names):
            raise DuelRefused(f"{place}.values: write one of each component of `reward`: {', '.join(names)}")
        pairs.append({**pair.model_dump(), "task": mine.task})
    row = tables.Duel(
        run_id=run_id,
        evaluation_id=asked.evaluation,
        against_id=asked.against,
        reward=asked.reward.model_dump(mode="json"),
        pairs=pairs,
        given_by=given_by,
    )
    session.add(row)
    await session.flush()
    await session.refresh(row)
    return (await _shown(session, [row]))[0]


async def list_duels(session: ReadSession, run_id: str, *, cursor: str | None, limit: int) -> Page[Duel]:
    """Duels of a run's evaluations, newest first."""
    table, name = tables.Duel, f"duels of {run_id}"
    conditions = [table.run_id == run_id]
    if key := decode_cursor(cursor, name, int):
        conditions.append(table.number < cast(int, key[0]))
    query = select(table).where(*conditions).order_by(table.number.desc()).limit(limit + 1)
    found = await _shown(session, (await session.scalars(query)).all())
    return page(name, found, limit, lambda item: item, lambda item: (item.number,))


async def _shown(session: ReadSession, rows: Sequence[tables.Duel]) -> list[Duel]:
    ids = sorted({one for row in rows for one in (row.evaluation_id, row.against_id)})
    versions = {row.id: row for row in await session.execute(_VERSIONS, {"ids": ids})}
    return [_duel(row, versions) for row in rows]


def _duel(row: tables.Duel, versions: Mapping[str, Any]) -> Duel:
    mine, rival = versions.get(row.evaluation_id), versions.get(row.against_id)
    return Duel(
        number=row.number,
        run_id=row.run_id,
        evaluation_id=row.evaluation_id,
        version=mine.version if mine else None,
        against_id=row.against_id,
        against_run_id=rival.run_id if rival else None,
        against_version=rival.version if rival else None,
        pairs=len(row.pairs),
        rates=[win_rate(one["name"], row.pairs) for one in row.reward["components"]],
        reward=row.reward,
        given_by=row.given_by,
        created_at=row.created_at,
    )


def win_rate(component: str, pairs: Iterable[Mapping[str, Any]]) -> WinRate:
    """The rate of one judge. The interval takes tasks as the sample, and stays between 0 and 1."""
    values = [(pair["task"], pair["values"][component]) for pair in pairs]
    of_tasks: dict[int, list[float]] = defaultdict(list)
    for task, value in values:
        if value is not None:
            of_tasks[task].append(value)
    counted = [value for _, value in values if value is not None]
    found = statistic(_sums(list(of_tasks.values()))) if counted else None
    if found is not None and found.low is not None and found.high is not None:
        found = found.model_copy(update={"low": max(0.0, found.low), "high": min(1.0, found.high)})
    wins, losses = counted.count(1.0), counted.count(0.0)
    return WinRate(
        component=component,
        wins=wins,
        ties=len(counted) - wins - losses,
        losses=losses,
        lost=len(values) - len(counted),
        rate=found,
    )


def _sums(by_task: list[list[float]]) -> TaskSums:
    counts, sums = [len(values) for values in by_task], [sum(values) for values in by_task]
    return TaskSums(
        tasks=len(by_task),
        count=sum(counts),
        total=sum(sums),
        squares=sum(one * one for one in sums),
        products=sum(n * one for n, one in zip(counts, sums, strict=True)),
        counts=sum(n * n for n in counts),
        is_binary=all(value in {0.0, 1.0} for values in by_task for value in values),
    )
