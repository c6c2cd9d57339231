"""A rollout's trajectory in the API: transitions of calls and tools, with semantic variables."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from typing import Any

import httpx
from sqlalchemy import text

from leyden.libs.client import Client
from leyden.libs.contracts.api.trajectory import Transition
from leyden.libs.contracts.config import RunConfig
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.libs.store.read.paging import encode_cursor
from leyden.libs.store.read.trajectory.transitions import TEXT_CHARACTERS, VALUE_CHARACTERS, VARIABLES
from leyden.libs.store.runs.actions import create_run
from leyden.services.credit.worker import credit_pending
from tests.contract.credit.test_worker import complete
from tests.fakes.served_api import TOKEN
from tests.support import builders

CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "t1", "name": "search", "arguments": '{"q": "x"}'}],
}
RESULT = {"role": "tool", "content": "two hits", "tool_call_id": "t1"}
HOSTILE = "</script>\u202e'; DROP TABLE runs; -- \\u0000 😀 {{x}} %s :run "


async def trajectory(http: httpx.AsyncClient, rollout: tables.Rollout, **query: Any) -> Any:
    answer = await http.get(f"/v1/rollouts/{rollout.id}/trajectory", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def values(state: Any) -> dict[str, str]:
    return {name: one["text"] for name, one in state["variables"].items()}


async def one_rollout(database: Database) -> tables.Rollout:
    run = await builders.add_run(database)
    _, [rollout, _] = await builders.add_group(database, run)
    return rollout


async def add_credit(database: Database, call: tables.ModelCall, reward: float) -> None:
    numbers = {"intermediate_reward": reward, "return_": 1.0, "baseline": 0.5, "advantage": 0.5}
    names = {"run_id": call.run_id, "call_id": call.id, "rollout_id": call.rollout_id}
    async with database.session() as session:
        session.add(tables.CallCredit(**names, depth=0, state_key="", tools={"calls": []}, **numbers))


async def test_calls_and_tools_are_transitions_with_the_rewards_of_credit_and_the_state_between_them(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    rollout = await one_rollout(database)
    asks = await builders.add_call(database, rollout, answer=CALLED, sequence=1000, role="solver")
    attributes = {"gen_ai.tool.call.arguments": '{"q": "x"}', "gen_ai.tool.call.result": "two hits, by the span"}
    span = await builders.add_tool_span(
        database, rollout, "search", start_ns=2000, end_ns=3000, tool_call_id="t1", attributes=attributes
    )
    ends = await builders.add_call(
        database, rollout, sequence=4000, agent_name="writer", parent_call_id=asks.id, shared_turns=2, turns=[RESULT]
    )
    await builders.finish_rollout(database, rollout)
    await add_credit(database, asks, 0.3)

    first, tool, last = (await trajectory(api_http, rollout))["items"]
    shown = [(one["type"], one["id"], one["component"], one["status"], one["reward"]) for one in (first, tool, last)]
    assert shown == [
        ("llm", asks.id, "solver", "completed", 0.3),
        ("tool", span.span_id, "search", "ok", None),
        ("llm", ends.id, "writer", "completed", None),
    ]
    assert (first["attempt"], first["started_ns"]) == (1, 1000)
    assert json.loads(first["output"]["text"])["tool_calls"][0]["name"] == "search"
    assert (tool["input"]["text"], tool["output"]["text"]) == ('{"q": "x"}', "two hits, by the span")
    assert json.loads(last["input"]["text"]) == [RESULT]
    async with database.read() as session:
        [task] = await session.scalars(text("SELECT payload FROM tasks WHERE number = 0"))
    fields = {f"task.{name}": one if isinstance(one, str) else json.dumps(one) for name, one in task.items()}
    assert values(first["state"]) == values(tool["state"]) == fields
    # The second request holds the result as the model reads it.
    assert values(last["state"]) == {**fields, "tool.search": "two hits"}
    assert [first["next_state"], tool["next_state"], last["next_state"]] == [tool["state"], last["state"], None]

    for one, kind in ((first, "id"), (tool, "span_id"), (last, "id")):
        [whole] = (await api_http.get(one["whole"])).json()["items"]
        assert whole[kind] == one["id"]


async def test_calls_of_further_policies_have_the_rewards_that_credit_computed_for_them(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    document = builders.run_document(
        credit={"air": {"weights": {"search": 0.25}, "failure": -2.0}},
        roles=[{"name": "checker", "agent_name": "checker", "policy": "checker"}],
        policies={"checker": {"pool": "second"}},
    )
    await builders.add_dataset(database)
    async with database.session() as session:
        made = await create_run(session, RunConfig.model_validate(document))
        run = await session.get_one(tables.Run, made.id)
        session.add(tables.RunStatus(run_id=run.id, phase="running"))
    group, rollouts = await builders.add_group(database, run)
    for rollout, reward in zip(rollouts, (1.0, 0.0), strict=True):
        for place, (role, status) in enumerate(((None, "ok"), ("checker", "error"))):
            asked = [{"id": f"t{place}", "name": "search", "arguments": "{}"}]
            answer = {"role": "assistant", "content": "", "tool_calls": asked}
            call = await builders.add_call(
                database, rollout, [1, place], answer=answer, role=role, policy_version=1, sequence=1000 * place + 1
            )
            times = {"start_ns": 1000 * place + 2, "end_ns": 1000 * place + 3}
            await builders.add_tool_span(database, rollout, "search", tool_call_id=f"t{place}", status=status, **times)
        await builders.finish_rollout(database, rollout, reward=reward)
    assert call.role == "checker"
    await complete(database, group)
    assert await credit_pending(database, 8)
    items = (await trajectory(api_http, rollouts[0]))["items"]
    assert [(one["type"], one["component"], one["reward"]) for one in items] == [
        ("llm", None, 0.25),
        ("tool", "search", None),
        ("llm", "checker", -0.5),
        ("tool", "search", None),
    ]


async def test_a_state_has_the_newest_result_of_each_tool_and_what_the_agents_own_telemetry_gave(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    rollout = await one_rollout(database)
    begin = time.time_ns()
    for place, result in enumerate(("one", "two")):
        at = begin + 1000 * place
        found = {"output.value": result}
        await builders.add_tool_span(database, rollout, "look", start_ns=at, end_ns=at + 500, attributes=found)
    async with database.session() as session:
        for key, giver, value in (("a", None, 0.25), ("b", "a person", 0.75)):
            names = {"rollout_id": rollout.id, "run_id": rollout.run_id, "attempt": 1}
            session.add(tables.Feedback(key=key, component=f"part_{key}", value=value, token_name=giver, **names))
    await builders.add_attempt(database, rollout)
    await builders.add_call(database, rollout, sequence=time.time_ns() + 10**9)

    items = (await trajectory(api_http, rollout))["items"]
    found = [{k: v for k, v in values(one["state"]).items() if not k.startswith("task.")} for one in items]
    assert found == [{}, {"tool.look": "one"}, {"tool.look": "two", "agent.part_a": "0.25"}]


async def test_a_result_has_the_tool_of_the_newest_call_with_its_id(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    rollout = await one_rollout(database)
    await builders.add_attempt(database, rollout)
    for place, tool in enumerate(("look", "read", "write")):
        asked = [{"id": "call_0", "name": tool, "arguments": "{}"}]
        answer = {"role": "assistant", "content": "", "tool_calls": asked}
        turns = [{"role": "tool", "content": f"result {place}", "tool_call_id": "call_0"}] if place else []
        await builders.add_call(database, rollout, sequence=place, answer=answer, turns=turns)
    [*_, last] = (await trajectory(api_http, rollout))["items"]
    found = {name: value for name, value in values(last["state"]).items() if name.startswith("tool.")}
    assert found == {"tool.look": "result 1", "tool.read": "result 2"}


async def test_the_counting_attempt_is_shown_and_else_the_newest(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    rollout = await one_rollout(database)
    assert (await trajectory(api_http, rollout)) == {"items": [], "next_cursor": None}
    await builders.add_attempt(database, rollout, state="expired")
    await builders.add_attempt(database, rollout, 2)
    calls = [await builders.add_call(database, rollout, attempt=number) for number in (1, 1, 2, 2)]
    page = await trajectory(api_http, rollout, limit=1)
    assert [one["id"] for one in page["items"]] == [calls[2].id]
    async with database.session() as session:
        row = await session.get_one(tables.Rollout, rollout.id)
        row.attempt = 1
    assert [one["id"] for one in (await trajectory(api_http, rollout))["items"]] == [calls[0].id, calls[1].id]
    # The cursor is of the other attempt.
    stale = await api_http.get(f"/v1/rollouts/{rollout.id}/trajectory", params={"cursor": page["next_cursor"]})
    assert (stale.status_code, stale.json()["cause"]) == (400, "cursor")
    forged = encode_cursor(f"trajectory of {rollout.id} 1", (2**70, ""))
    answer = await api_http.get(f"/v1/rollouts/{rollout.id}/trajectory", params={"cursor": forged})
    assert answer.status_code == 422
    nowhere = await api_http.get("/v1/rollouts/nowhere/trajectory")
    assert nowhere.status_code == 404


async def test_hostile_texts_are_cut_with_a_mark_and_states_have_a_bound(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    rollout = await one_rollout(database)
    await builders.add_attempt(database, rollout)
    long = HOSTILE * 5000
    results = [{"role": "tool", "name": f"{number}{HOSTILE * 20}", "content": long} for number in range(2 * VARIABLES)]
    await builders.add_call(database, rollout, sequence=1, turns=results, answer={"role": "tool", "tool_calls": 7})
    await builders.add_call(database, rollout, sequence=2, status="failed", answer=None, turns=[])
    await builders.add_tool_span(
        database, rollout, HOSTILE, start_ns=3, end_ns=2**63 - 1, attributes={"output.value": {"deep": [long]}}
    )
    answer = await api_http.get(f"/v1/rollouts/{rollout.id}/trajectory")
    assert len(answer.content) < 200_000
    first, second, tool = answer.json()["items"]
    assert (first["input"]["cut"], len(first["input"]["text"])) == (True, TEXT_CHARACTERS)
    assert first["input"]["characters"] > 2 * VARIABLES * len(long)
    assert (second["output"], second["input"]["text"]) == (None, "[]")
    assert (tool["component"], tool["output"]["cut"], tool["input"]) == (HOSTILE, True, None)
    found = [name for name in tool["state"]["variables"] if name.startswith("tool.")]
    assert (len(found), tool["state"]["left_out"], first["state"]["left_out"]) == (VARIABLES, True, True)
    assert found[-1].startswith(f"tool.{2 * VARIABLES - 1}<")
    newest = tool["state"]["variables"][found[-1]]
    assert newest == {"text": long[:VALUE_CHARACTERS], "cut": True, "characters": len(long)}


MANY = text("""
    INSERT INTO model_calls SELECT (jsonb_populate_record(c, jsonb_build_object(
        'id', 'c' || lpad(n::text, 24, '0'), 'request_id', 'c' || lpad(n::text, 24, '0'), 'sequence', 10 * n + 1000,
        'turns', jsonb_build_array(jsonb_build_object('role', 'tool', 'name', 'look', 'content', 'result ' || n))
    ))).* FROM model_calls c, generate_series(1, :calls) AS n WHERE c.id = :id
""")


async def test_the_client_iterates_over_all_pages(api_url: str, database: Database) -> None:
    rollout = await one_rollout(database)
    await builders.add_attempt(database, rollout)
    first = await builders.add_call(database, rollout, sequence=1)
    async with database.session() as session:
        await session.execute(MANY, {"calls": 150, "id": first.id})

    def listed() -> list[Transition]:
        with Client(api_url, TOKEN) as leyden:
            return list(leyden.trajectory(rollout.id))

    found = await asyncio.to_thread(listed)
    assert (len(found), found[0].id, found[-1].next_state) == (151, first.id, None)
    assert all(one.next_state == later.state for one, later in itertools.pairwise(found))


async def test_ten_thousand_calls_are_read_page_by_page(api_http: httpx.AsyncClient, database: Database) -> None:
    rollout = await one_rollout(database)
    await builders.add_attempt(database, rollout)
    first = await builders.add_call(database, rollout, sequence=1)
    async with database.session() as session:
        await session.execute(MANY, {"calls": 10_000, "id": first.id})
    seen, cursor = 0, None
    for _ in range(3):
        page = await trajectory(api_http, rollout, limit=100, **({"cursor": cursor} if cursor else {}))
        assert len(page["items"]) == 100
        for number, one in enumerate(page["items"], start=seen):
            assert values(one["state"]).get("tool.look") == (f"result {number}" if number else None)
            assert values(one["next_state"])["tool.look"] == f"result {number + 1}"
        seen, cursor = seen + 100, page["next_cursor"]
    assert len(json.dumps(page)) < 500_000
    too_many = await api_http.get(f"/v1/rollouts/{rollout.id}/trajectory", params={"limit": 101})
    assert too_many.status_code == 422
