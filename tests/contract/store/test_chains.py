"""A row stores what its call adds to its parent, and readers get the complete conversation and prompt."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select

from leyden.libs.contracts.conversation import Turn, turn_json
from leyden.libs.contracts.samples import RoutedExperts
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.libs.store.records.chains import FullCall, MissingParent, RoutedCall, full_calls, routed_calls
from tests.support import builders


async def add_forest(database: Database, random: Random, calls: int) -> list[FullCall]:
    """The calls of one attempt in full; each row is complete, or shares the beginning of an earlier one."""
    _, [rollout] = await builders.add_group(database, await builders.add_run(database), size=1)
    added: list[FullCall] = []
    # Id, turns with the answer, tools, tokens with the sampled ones.
    earlier: list[tuple[str, list[Turn], list[Any], list[int]]] = []
    for number in range(calls):
        parent = random.choice([None, *earlier[-5:], *earlier[-1:] * 14]) if earlier else None
        columns: dict[str, Any] = {}
        turns, tools, ids = list[Turn](), [{"of": number}] * random.randint(0, 1), list[int]()
        own_tools: list[Any] | None = tools
        if parent is not None:
            parent_id, turns, parent_tools, ids = parent
            turns = turns[: random.choice([len(turns), random.randint(0, len(turns))])]
            ids = ids[: random.choice([len(ids), random.randint(0, len(ids))])]
            columns = {"parent_call_id": parent_id, "shared_turns": len(turns), "shared_tokens": len(ids)}
            if random.random() < 0.8:
                tools, own_tools = parent_tools, None
        own_ids, sampled = ([random.randrange(2**31) for _ in range(random.randint(0, 3))] for _ in range(2))
        own_turns = [Turn("user", f"{number}.{place}") for place in range(random.randint(0, 3))]
        answer = random.choice([Turn("assistant", f"answer {number}"), None])
        turns, ids = [*turns, *own_turns], [*ids, *own_ids]
        columns |= {"turns": [turn_json(turn) for turn in own_turns], "tools": own_tools, "prompt_tokens": len(ids)}
        columns["answer"] = None if answer is None else turn_json(answer)
        call = await builders.add_call(database, rollout, own_ids, sampled, **columns)
        added.append(FullCall(tuple(turns), tuple(tools), np.asarray(ids, "<i4").tobytes()))
        earlier.append((call.id, [*turns, *([answer] if answer else [])], tools, [*ids, *sampled]))
    return added


@pytest.mark.parametrize("seed", range(4))
async def test_calls_are_the_same_in_full_read_together_or_one_by_one(database: Database, seed: int) -> None:
    added = await add_forest(database, Random(seed), 80)
    async with database.read() as session:
        rows = (await session.scalars(select(tables.ModelCall).order_by(tables.ModelCall.sequence))).all()
        assert await full_calls(session, rows) == added
        assert [(await full_calls(session, [row]))[0] for row in rows] == added


async def test_a_call_without_its_parent_and_all_its_descendants_are_errors(database: Database) -> None:
    _, [rollout] = await builders.add_group(database, await builders.add_run(database), size=1)
    lost = await builders.add_call(database, rollout, parent_call_id="call-lost")
    await builders.add_call(database, rollout, parent_call_id=lost.id, shared_turns=1, shared_tokens=1)
    async with database.read() as session:
        rows = (await session.scalars(select(tables.ModelCall))).all()
        found = await full_calls(session, rows)
    assert [type(error) for error in found] == [MissingParent] * 2
    assert {str(error) for error in found} == {f"call {lost.id} has the parent call-lost, which is not in the store"}


async def test_experts_are_those_of_a_call_and_its_ancestors_and_no_other_read_loads_them(database: Database) -> None:
    run = await builders.add_run(database)
    _, [rollout] = await builders.add_group(database, run, size=1)
    experts = [RoutedExperts(start, 2, 1, bytes([start, 1])) for start in (0, 3)]
    first = await builders.add_call(database, rollout, routed_experts=experts[0].stored())
    second = await builders.add_call(database, rollout, parent_call_id=first.id, shared_tokens=4)
    last = {"parent_call_id": second.id, "shared_tokens": 6, "routed_experts": experts[1].stored()}
    third = await builders.add_call(database, rollout, **last)
    lost = await builders.add_call(database, rollout, parent_call_id="call-lost")
    async with database.read() as session:
        found = await routed_calls(session, run.id, [third.id, first.id, lost.id])
        [row] = await session.scalars(select(tables.ModelCall).where(tables.ModelCall.id == first.id))
        assert "routed_experts" not in vars(row)
    assert found == {
        first.id: [RoutedCall(0, experts[0])],
        third.id: [RoutedCall(0, experts[0]), RoutedCall(4, None), RoutedCall(6, experts[1])],
    }
