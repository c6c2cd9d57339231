"""Datasets and their tasks, stored in one transaction."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast

from sqlalchemy import ARRAY, ColumnElement, Text, delete, func, or_, select, text, tuple_
from sqlalchemy import cast as cast_as
from sqlalchemy.orm import aliased

from leyden.libs.contracts.api.body import Page
from leyden.libs.contracts.api.datasets import Dataset, Task
from leyden.libs.contracts.ids import new_id
from leyden.libs.store import tables
from leyden.libs.store.database import ReadSession, Session, raw_connection
from leyden.libs.store.policies import IS_RUN
from leyden.libs.store.read.paging import decode_cursor, page

ROWS_AT_ONCE = 20
"""Rows of a dataset that lie in memory together while they are checked."""


class DatasetConflict(ValueError):
    """The name belongs to a dataset with other rows."""


class DatasetInUse(ValueError):
    """Runs name the dataset."""


class UnknownDataset(LookupError):
    """No dataset has this id or name."""


@dataclass(frozen=True)
class StoredDataset:
    """The dataset of an upload: a new one, or the equal one that it repeats."""

    dataset: Dataset
    created: bool


@dataclass(frozen=True)
class StagedRows:
    """The rows of an upload, which its transaction alone sees and drops at its end."""

    content_sha256: str
    """The hash over the row hashes."""
    count: int


async def store_dataset(session: Session, name: str, rows: StagedRows) -> StoredDataset:
    """Makes a dataset of the transaction's staged rows.

    Idempotency key: the name and the rows' hash; an equal upload gets the row of the first.

    Raises: DatasetConflict: the name belongs to a dataset with other rows
    """
    # Two uploads under one name: the second waits here and then sees the first.
    await session.execute(
        text("SELECT pg_advisory_xact_lock(hashtextextended('dataset:' || :name, 0))"), {"name": name}
    )
    found = await session.scalar(select(tables.Dataset).where(tables.Dataset.name == name))
    if found is not None:
        if found.content_sha256 == rows.content_sha256:
            return StoredDataset(_dataset(found), created=False)
        raise DatasetConflict(
            f"dataset {name!r} exists with other rows ({found.task_count} tasks, id {found.id}):"
            " datasets never change; upload under another name"
        )
    dataset = tables.Dataset(id=new_id("dataset"), name=name, content_sha256=rows.content_sha256, task_count=rows.count)
    session.add(dataset)
    await session.flush()
    await session.execute(
        text(
            "INSERT INTO tasks (dataset_id, number, row_sha256, payload)"
            " SELECT :dataset_id, number, row_sha256, payload FROM incoming_rows"
        ),
        {"dataset_id": dataset.id},
    )
    await session.refresh(dataset)
    return StoredDataset(_dataset(dataset), created=True)


async def stage_rows(session: Session, rows: AsyncIterable[str]) -> StagedRows:
    """Writes rows by COPY as they arrive; an iterator that raises leaves nothing.

    Args: rows: canonical JSON text of each task, in order
    """
    connection = await raw_connection(session)
    content, count = hashlib.sha256(), 0
    async with connection.cursor() as cursor:
        # An upload lasts as long as its sender; the API bounds it by the size and the silence it allows.
        await cursor.execute("SET LOCAL statement_timeout = 0")
        await cursor.execute(
            "CREATE TEMPORARY TABLE incoming_rows (number int, row_sha256 bytea, payload jsonb) ON COMMIT DROP"
        )
        async with cursor.copy("COPY incoming_rows FROM STDIN") as copy:
            async for row in rows:
                row_sha256 = hashlib.sha256(row.encode()).digest()
                content.update(row_sha256)
                await copy.write_row((count, row_sha256, row))
                count += 1
    return StagedRows(content.hexdigest(), count)


async def find_dataset(session: ReadSession, id_or_name: str) -> Dataset:
    """A dataset by its id or its name.

    Raises: UnknownDataset
    """
    match = or_(tables.Dataset.id == id_or_name, tables.Dataset.name == id_or_name)
    # An id wins over an equal name of another dataset.
    order = (tables.Dataset.id != id_or_name, tables.Dataset.id)
    found = await session.scalar(select(tables.Dataset).where(match).order_by(*order).limit(1))
    if found is None:
        raise UnknownDataset(f"no dataset has the id or name {id_or_name!r}: upload it, or list datasets")
    return _dataset(found)


async def first_fault(
    session: ReadSession,
    dataset_id: str,
    fault: Callable[[Mapping[str, Any]], str | None],
    *,
    first: int,
    size_bytes: int,
) -> tuple[int, str] | None:
    """The number of the first task whose row has a fault, and that; None if none of those that are read has any.

    Args: fault: of a row, None for a good one; first: at most so many tasks are read, and no more once their rows have
        `size_bytes` as JSON together
    """
    task, read_bytes = tables.Task, 0
    columns = task.number, task.payload, func.octet_length(cast_as(task.payload, Text))
    # A row may have a MiB: all at once would be a GiB in memory, beside those of other requests.
    for start in range(0, first, ROWS_AT_ONCE):
        of_part = task.number.between(start, min(start + ROWS_AT_ONCE, first) - 1)
        query = select(*columns).where(task.dataset_id == dataset_id, of_part).order_by(task.number)
        rows = (await session.execute(query)).all()
        for number, payload, size in rows:
            if found := fault(payload):
                return number, found
            read_bytes += size
        if len(rows) < ROWS_AT_ONCE or read_bytes >= size_bytes:
            break
    return None


async def task_of_rollout(session: ReadSession, rollout_id: str) -> dict[str, object] | None:
    """The row of the rollout's task; None for an unknown rollout."""
    group, task = tables.Group, tables.Task
    query = (
        select(task.payload)
        .join(group, (group.dataset_id == task.dataset_id) & (group.task_number == task.number))
        .join(tables.Rollout, tables.Rollout.group_id == group.id)
        .where(tables.Rollout.id == rollout_id)
    )
    return cast(dict[str, object] | None, await session.scalar(query))


async def list_datasets(session: ReadSession, *, name: str | None, cursor: str | None, limit: int) -> Page[Dataset]:
    """Datasets, newest first."""
    table = tables.Dataset
    conditions: list[ColumnElement[bool]] = [table.name == name] if name else []
    if key := decode_cursor(cursor, "datasets", datetime, str):
        conditions.append(tuple_(table.created_at, table.id) < tuple_(*key))
    query = select(table).where(*conditions).order_by(table.created_at.desc(), table.id.desc()).limit(limit + 1)
    rows = (await session.scalars(query)).all()
    return page("datasets", rows, limit, _dataset, lambda row: (row.created_at, row.id))


async def delete_dataset(session: Session, id_or_name: str) -> None:
    """Deletes a dataset and its tasks.

    Raises: UnknownDataset; DatasetInUse: a run or its evaluation names it
    """
    dataset = await find_dataset(session, id_or_name)
    # A new run waits for this lock, and then does not find the dataset.
    await session.execute(select(tables.Dataset.id).where(tables.Dataset.id == dataset.id).with_for_update())
    trained = select(tables.Run.id).where(tables.Run.dataset_id == dataset.id, IS_RUN)
    evaluated = select(tables.Evaluation.run_id).where(tables.Evaluation.dataset_id == dataset.id)
    if runs := sorted(await session.scalars(trained.union(evaluated).limit(10))):
        raise DatasetInUse(f"dataset {dataset.name!r} belongs to {', '.join(runs)}: delete these runs first")
    await session.execute(delete(tables.Dataset).where(tables.Dataset.id == dataset.id))


async def list_tasks(session: ReadSession, dataset_id: str, *, cursor: str | None, limit: int) -> Page[Task]:
    """Tasks of a dataset in the order of its upload."""
    table = tables.Task
    conditions, name = [table.dataset_id == dataset_id], f"tasks of {dataset_id}"
    if key := decode_cursor(cursor, name, int):
        conditions.append(table.number > cast(int, key[0]))
    query = select(table).where(*conditions).order_by(table.number).limit(limit + 1)
    rows = (await session.scalars(query)).all()
    return page(
        name, rows, limit, lambda row: Task.model_validate(row, from_attributes=True), lambda row: (row.number,)
    )


async def tasks_of_groups(session: ReadSession, groups: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """The task of each group, as it was uploaded, by the group's id."""
    task, group = tables.Task, tables.Group
    query = (
        select(group.id, task.payload)
        .join(task, (task.dataset_id == group.dataset_id) & (task.number == group.task_number))
        .where(group.id.in_(groups))
    )
    return {row.id: row.payload for row in await session.execute(query)}


async def task_without(
    session: ReadSession, dataset_id: str, field: Sequence[str], *, first: int, null_is_missing: bool = False
) -> int | None:
    """The number of a task among the first of a dataset that lacks a field; None if each has it.

    Args: field: the names of objects' fields and the numbers of lists' items, from outside to inside;
        null_is_missing: counts a field whose value is null as lacking
    """
    tasks = select(tables.Task).where(tables.Task.dataset_id == dataset_id).order_by(tables.Task.number).limit(first)
    table = aliased(tables.Task, tasks.subquery())
    lacks = table.payload.op("#>>" if null_is_missing else "#>")(cast_as(list(field), ARRAY(Text))).is_(None)
    return await session.scalar(select(table.number).where(lacks).order_by(table.number).limit(1))


async def has_field(session: ReadSession, dataset_id: str, field: Sequence[str], *, first: int) -> bool:
    """Whether any task among the first of a dataset has the field with a value. Args: field: see `task_without`"""
    tasks = select(tables.Task).where(tables.Task.dataset_id == dataset_id).order_by(tables.Task.number).limit(first)
    table = aliased(tables.Task, tasks.subquery())
    has = table.payload.op("#>>")(cast_as(list(field), ARRAY(Text))).is_not(None)
    return await session.scalar(select(table.number).where(has).limit(1)) is not None


def _dataset(row: tables.Dataset) -> Dataset:
    return Dataset.model_validate(row, from_attributes=True)
