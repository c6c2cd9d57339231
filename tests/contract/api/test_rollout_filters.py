"""Rollouts by the role and tools of their calls, and by the value of a component, through the typed client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Any

import httpx
import pytest
from sqlalchemy import event, text

from leyden.libs.client import Client, Refused
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.libs.store.read.rollouts import RolloutFilter, list_rollouts
from tests.contract.api.test_groups import add_component
from tests.fakes.served_api import TOKEN
from tests.support import builders

# With this many of one kind, the planner prefers an index to find the others.
COPIES = """
    INSERT INTO {table} SELECT (jsonb_populate_record(copied, jsonb_build_object('{key}', n::text))).*
    FROM {table} AS copied, generate_series(1, 3000) AS n WHERE rollout_id = :rollout
"""


@pytest.fixture
def leyden(api_url: str) -> Iterator[Client]:
    with Client(api_url, TOKEN, patience_seconds=0.0) as client:
        yield client


async def filtered_run(database: Database) -> tuple[tables.Run, list[tables.Rollout]]:
    """A run of four rollouts.

    0: a writer that calls search; right is 1. 1: search ran as a span; right is 0. 2: a writer in an attempt that does
    not count, then search. 3: it waits, and has called open.
    """
    run = await builders.add_run(database)
    _, rollouts = await builders.add_group(database, run, size=4)

    def calls(tool: str) -> dict[str, Any]:
        tools = [{"id": "1", "name": "other", "arguments": "{}"}, {"id": "2", "name": tool, "arguments": "{}"}]
        return {"answer": {"role": "assistant", "content": "", "tool_calls": tools}}

    await builders.add_call(database, rollouts[0], role="writer", **calls("search"))
    await builders.add_call(database, rollouts[1], role="reader")
    await builders.add_tool_span(database, rollouts[1], "search")
    await builders.add_call(database, rollouts[2], attempt=2, role="writer")
    await builders.add_call(database, rollouts[2], role="reader", **calls("search"))
    await builders.add_call(database, rollouts[3], role="reader", **calls("open"))
    for rollout, reward in zip(rollouts[:3], (0.5, -0.5, 0.0), strict=True):
        await builders.finish_rollout(database, rollout, reward=reward)
    for rollout, value in zip(rollouts[:2], (1.0, 0.0), strict=True):
        await add_component(database, rollout, value)
    return run, rollouts


async def test_rollouts_are_found_by_role_tool_and_value_of_a_component(leyden: Client, database: Database) -> None:
    run, rollouts = await filtered_run(database)
    await filtered_run(database)

    async def found(**wanted: Any) -> list[int]:
        listed = await asyncio.to_thread(lambda: list(leyden.rollouts(run=run.id, **wanted)))
        return sorted(one.sibling for one in listed)

    assert await found(role="writer") == [0]
    assert await found(role="reader") == [1, 2, 3]
    assert await found(tool="search") == [0, 1, 2]
    assert await found(tool="open") == [3]
    assert await found(tool="sear") == []
    assert await found(tool='search"}]} OR true --') == []
    assert await found(tool="search", role="reader") == [1, 2]
    assert await found(component="right") == [0, 1]
    assert await found(component="right", component_min=0.5) == [0]
    assert await found(component="right", component_max=0.5, text="2+2") == [1]
    assert await found(component="wrong") == []
    async with database.session() as session:
        keys = {"rollout_id": rollouts[0].id, "attempt": 1, "component": "right", "run_id": run.id, "position": 0}
        words = {"explanation": "", "source": "exact", "duration_seconds": 0.0}
        session.add(tables.RolloutReward(**keys, **words, revision=2, state="scored", weight=1.0, value=0.25))
    assert await found(component="right", component_min=0.5) == []


async def test_filters_by_tool_and_role_read_indexes_that_hold_names_of_any_length(database: Database) -> None:
    run, rollouts = await filtered_run(database)
    name = "searched " * 1000
    answer = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "name": name, "arguments": "{}"}]}
    await builders.add_call(database, rollouts[3], answer=answer)
    await builders.add_tool_span(database, rollouts[3], name)
    async with database.session() as session:
        for table, key in (("model_calls", "id"), ("spans", "span_id")):
            await session.execute(text(COPIES.format(table=table, key=key)), {"rollout": rollouts[1].id})
            await session.execute(text(f"ANALYZE {table}"))
    wanted = RolloutFilter(run_id=run.id, tool="open", role="writer")
    asked: list[tuple[str, Any]] = []
    engine = database.engine.sync_engine
    event.listen(engine, "before_cursor_execute", lambda *call: asked.append(call[2:4]))
    async with database.read() as session:
        found = await list_rollouts(session, wanted, cursor=None, limit=10)
        assert found.items == []
        statement, parameters = asked[-1]
        connection = await session.connection()
        lines = (await connection.exec_driver_sql(f"EXPLAIN {statement}", parameters)).scalars().all()
    plan = "\n".join(lines)
    assert all(index in plan for index in ("jsonb_path_query_array_idx", "role_rollout_id_attempt_idx", "left_idx")), (
        plan
    )


async def excused_run(database: Database, name: str = "broken: %_' DROP") -> tuple[tables.Run, list[str]]:
    """A run of four groups of two: credit excluded the first for `name`, the trainer refused the second, the third was
    trained, the last one's rollouts failed or succeeded, and it has no verdict. Returns the ids of all rollouts."""
    run = await builders.add_run(database)
    all_ids = list[str]()
    for number in range(4):
        group, rollouts = await builders.add_group(database, run, number)
        all_ids += [one.id for one in rollouts]
        for sibling, rollout in enumerate(rollouts):
            if (number, sibling) == (3, 1):
                async with database.session() as session:
                    last = await session.get_one(tables.Rollout, rollout.id)
                    last.state, last.reason, last.finished_at = "excluded", "ungraded", datetime.now(tz=UTC)
                continue
            kind = "agent_error" if number > 1 and sibling == 0 else "succeeded"
            await builders.finish_rollout(database, rollout, kind=kind)
        verdict = {"verdict": "excluded", "reason": name} if number == 0 else {}
        if number < 3:
            await builders.add_credited_group(database, group, **verdict)
        if number in (1, 2):
            async with database.session() as session:
                verdicts = {1: "stale", 2: "trained"}
                session.add(tables.StepGroup(group_id=group.id, run_id=run.id, step=number, verdict=verdicts[number]))
    return run, all_ids


async def test_rollouts_are_found_by_the_cause_for_which_they_do_not_count(leyden: Client, database: Database) -> None:
    name = "broken: %_' DROP"
    run, ids = await excused_run(database, name)
    await excused_run(database, "another")
    expected = {
        name: ids[0:2],
        "stale": ids[2:4],
        "agent_error": [ids[4], ids[6]],
        "ungraded": [ids[7]],
    }
    causes = await asyncio.to_thread(leyden.causes, run.id)
    assert {one.cause: one.rollouts for one in causes} == {cause: len(found) for cause, found in expected.items()}
    assert [one.rollouts for one in causes] == sorted((one.rollouts for one in causes), reverse=True)

    evaluation = f"{run.id}.e1"
    async with database.session() as session:
        columns = {"dataset_id": run.dataset_id, "policy_version": 0, "rollouts_per_task": 1}
        session.add(tables.Evaluation(id=evaluation, run_id=run.id, number=1, **columns))
        await session.flush()
        (await session.get_one(tables.Group, f"{run.id}.3")).evaluation_id = evaluation
    for chosen, counts in (
        ("none", {name: 2, "stale": 2, "agent_error": 1}),
        (evaluation, {"agent_error": 1, "ungraded": 1}),
    ):
        causes = await asyncio.to_thread(partial(leyden.causes, run.id, evaluation=chosen))
        assert {one.cause: one.rollouts for one in causes} == counts

    def found(**wanted: Any) -> list[str]:
        return sorted(one.id for one in leyden.rollouts(run=run.id, **wanted))

    for cause, wanted in expected.items():
        assert await asyncio.to_thread(found, cause=cause) == sorted(wanted)
    assert await asyncio.to_thread(found, cause="agent_error", step=2) == [ids[4]]
    # Neither the verdict of a rollout that counts nor a cause of another run finds one.
    for nothing in ("trained", "another", "", "%"):
        assert await asyncio.to_thread(found, cause=nothing) == []
    assert len(await asyncio.to_thread(found, cause="succeeded")) == 5


async def test_a_filter_without_what_it_needs_is_refused(leyden: Client, api_http: httpx.AsyncClient) -> None:
    with pytest.raises(Refused, match="tool: name the run"):
        await asyncio.to_thread(lambda: list(leyden.rollouts(tool="search")))
    with pytest.raises(Refused, match="cause: name the run"):
        await asyncio.to_thread(lambda: list(leyden.rollouts(cause="stale")))
    assert (await api_http.get("/v1/runs/none/causes")).status_code == 404
    answer = await api_http.get("/v1/rollouts", params={"component_min": 1})
    assert (answer.status_code, answer.json()["detail"][:10]) == (422, "component:")
