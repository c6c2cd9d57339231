"""Calls made whole: the view for people and what services do come to the same, and read each row of a chain once."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import psycopg
import pytest
from sqlalchemy import select, text

from leyden.libs.store import tables
from leyden.libs.store.chains import Whole, whole_calls
from leyden.libs.store.database import Database
from tests import builders


async def add_forest(database: Database, random: Random, calls: int) -> list[Whole]:
    """An attempt's calls as they were asked: each is stored whole, or continues an earlier one, all of it or a part."""
    _, [rollout] = await builders.add_group(database, await builders.add_run(database), size=1)
    asked: list[Whole] = []
    known: list[tuple[str, list[int], dict[str, Any]]] = []
    for number in range(calls):
        columns: dict[str, Any] = {}
        ids: list[int] = []
        document: dict[str, Any] = {"messages": [], "tools": random.choice([None, [number]])}
        added: dict[str, Any] = dict(document)
        # Mostly the last one, so that chains get long.
        earlier = random.choice([None, *known[-5:], *known[-1:] * 14]) if known else None
        if earlier is not None:
            columns["continues"], ids, document = earlier
            added = {}
            if random.random() < 0.6:
                messages = document["messages"]
                columns["kept_tokens"] = random.choice([len(ids), random.randint(0, len(ids))])
                columns["kept_messages"] = random.choice([len(messages), random.randint(0, len(messages))])
                ids = ids[: columns["kept_tokens"]]
                document = document | {"messages": messages[: columns["kept_messages"]]}
        new_ids, sampled = ([random.randrange(2**31) for _ in range(random.randint(0, 3))] for _ in range(2))
        new = [{"of": number, "at": place} for place in range(random.randint(0, 3))]
        ids, document = [*ids, *new_ids], document | {"messages": [*document["messages"], *new]}
        columns |= {"messages": added | {"messages": new}, "prompt_tokens": len(ids)}
        call = await builders.add_call(database, rollout, new_ids, sampled, **columns)
        asked.append(Whole(np.asarray(ids, "<i4").tobytes(), document))
        known.append((call.id, [*ids, *sampled], document))
    return asked


@pytest.mark.parametrize("seed", range(4))
async def test_services_and_the_view_make_the_same_calls_whole(database: Database, seed: int) -> None:
    asked = await add_forest(database, Random(seed), 80)
    async with database.read() as session:
        calls = (await session.scalars(select(tables.ModelCall).order_by(tables.ModelCall.sequence))).all()
        assert await whole_calls(session, calls) == asked
        assert [(await whole_calls(session, [call]))[0] for call in calls] == asked
        viewed = await session.execute(text("SELECT prompt_ids, messages FROM whole_calls ORDER BY sequence"))
        assert [Whole(row.prompt_ids or b"", row.messages) for row in viewed] == asked


async def test_the_view_shows_nothing_of_a_call_whose_chain_is_broken(database: Database, postgres_dsn: str) -> None:
    _, [rollout] = await builders.add_group(database, await builders.add_run(database), size=1)
    lost = await builders.add_call(database, rollout, continues="call-lost")
    await builders.add_call(database, rollout, continues=lost.id, kept_messages=1, kept_tokens=1, prompt_tokens=4)
    with psycopg.connect(postgres_dsn) as connection:
        found = connection.execute("SELECT prompt_ids, messages FROM whole_calls").fetchall()
    assert found == [(None, None), (None, None)]


@pytest.mark.parametrize("column", ["prompt_ids", "messages"])
async def test_the_view_puts_no_more_aside_than_a_chain_holds(
    database: Database, postgres_dsn: str, column: str
) -> None:
    _, [rollout] = await builders.add_group(database, await builders.add_run(database), size=1)
    message = {"role": "user", "content": "x" * 300}
    first = await builders.add_call(database, rollout, range(300), messages={"messages": [message], "tools": None})
    last = first.id
    for number in range(1, 241):
        columns: dict[str, Any] = {"continues": last, "kept_messages": number, "kept_tokens": 300 * number}
        columns |= {"messages": {"messages": [message] * 2}, "prompt_tokens": 300 * (number + 1)}
        last = (await builders.add_call(database, rollout, range(300), **columns)).id
    question = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) SELECT {column} FROM whole_calls WHERE id = %s"
    with psycopg.connect(postgres_dsn) as connection:
        connection.execute("SET work_mem = '64kB'")
        [[[plan]]] = connection.execute(question, [last]).fetchall()
    # Rows hold some 0.3 MB of either, and are put aside up to four times; made whole one by one they are 17 to 87.
    assert 8192 * plan["Plan"]["Temp Written Blocks"] < 2 * 2**20
