"""Model calls in the store: all of a transaction or none, as they were given, and a repeat changes nothing."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import numpy as np
import pytest
from sqlalchemy import select

from leyden.libs.contracts.conversation import Dialect, ToolCall, Turn, turn_json
from leyden.libs.contracts.states import CallStatus, Continuation
from leyden.libs.store import tables
from leyden.libs.store.database import Database, Refused, StoreAway
from leyden.libs.store.engines import serving_engines
from leyden.libs.store.records.calls import NewCall, completed_calls, write_calls
from tests.faults.proxy import COPY_END, FaultProxy, Trouble
from tests.support import builders


def call(run_id: str, number: int) -> NewCall:
    return NewCall(
        run_id=run_id,
        id=f"c{number:024x}",
        rollout_id=f"{run_id}.0.0",
        attempt=1,
        request_id=f"c{number:024x}",
        choice=0,
        sequence=number,
        status=CallStatus.COMPLETED,
        trainable=True,
        untrainable_reason=None,
        masks_forced=False,
        request_sha256=bytes(32),
        dialect=Dialect.CHAT_COMPLETIONS,
        request={"model": "m"},
        parent_call_id=None,
        shared_turns=0,
        shared_tokens=0,
        turns=(),
        tools=(),
        answer=Turn("assistant", "\x00 \\u0000 \\\x00"),
        prompt_ids=b"\x01\x00\x00\x00",
        sampled_ids=b"\x02\x00\x00\x00",
        generator_logprobs=bytes(4),
        policy_versions=bytes(4),
        prompt_tokens=1,
        completion_tokens=1,
        cached_tokens=0,
        min_policy_version=0,
        max_policy_version=0,
        temperature=1.0,
        finish_reason="stop",
        trace_id=None,
        parent_span_id=None,
        agent="0" * 16,
        agent_name=None,
        role=None,
        continuation=Continuation.FRESH,
        queued_seconds=0.0,
        first_token_seconds=None,
        total_seconds=0.1,
    )


async def stored_ids(database: Database) -> list[str]:
    async with database.read() as session:
        return list(await session.scalars(select(tables.ModelCall.id).order_by(tables.ModelCall.id)))


async def test_calls_are_stored_unchanged_and_a_repeat_changes_nothing(database):
    run = await builders.add_run(database)
    await write_calls(database, [call(run.id, 1), call(run.id, 2)])
    await write_calls(database, [replace(call(run.id, 2), temperature=0.5), call(run.id, 3)], may_exist=True)
    await write_calls(database, [call(run.id, 4)])
    async with database.read() as session:
        known = [f"c{1:024x}", f"c{3:024x}"]
        found = await completed_calls(session, run.id, f"{run.id}.0.0", 1, except_ids=known)
    second, fourth = (row for row, _ in found)
    assert (second.temperature, second.sequence, fourth.sequence) == (1.0, 2, 4)
    assert second.answer == {"role": "assistant", "content": "\ufffd \\u0000 \\\ufffd"}
    assert (second.prompt_ids, second.first_token_seconds) == (b"\x01\x00\x00\x00", None)


async def test_a_stored_call_is_the_same_for_any_batch_size_and_for_a_repeat(database):
    run = await builders.add_run(database)
    ids = np.arange(20_000, dtype="<i4")
    asked = ToolCall("1", "f", '{"x": "\x00"}')
    turns = Turn("user", "größer \U0001f600" * 9000, name="a"), Turn("assistant", "\x00", tool_calls=(asked,))
    values = {
        "parent_call_id": "c0",
        "shared_turns": 3,
        "shared_tokens": 2**31 - 1,
        "turns": turns,
        "tools": [{"b": 1, "a": "\x00"}],
        "answer": None,
        "prompt_ids": ids.data.cast("B"),
        "prompt_tokens": len(ids),
        "cached_tokens": 2**31 - 1,
        "min_policy_version": None,
        "trainable": False,
        "untrainable_reason": "größer",
        "sequence": -(2**63),
        "temperature": 5e-324,
        "generator_logprobs": b"",
        "trace_id": "",
    }
    calls = [replace(call(run.id, number), **values) for number in range(6)]
    await write_calls(database, calls[:1])
    await write_calls(database, calls[1:4])
    await write_calls(database, calls[3:], may_exist=True)
    async with database.read() as session:
        rows = (await session.execute(select(tables.ModelCall.__table__).order_by("id"))).mappings().all()
    names = [field.name for field in fields(NewCall)]
    shown = json.loads(json.dumps([turn_json(turn) for turn in turns]).replace("\\u0000", "\\ufffd"))
    stored = {"turns": shown, "tools": [{"b": 1, "a": "\ufffd"}], "prompt_ids": ids.tobytes()}
    assert [{name: row[name] for name in names} for row in rows] == [
        {name: getattr(one, name) for name in names} | stored for one in calls
    ]
    assert [list(tool) for row in rows for tool in row["tools"]] == [["b", "a"]] * len(calls)


@pytest.mark.parametrize(
    "changes",
    [
        {"run_id": "run-without-partition"},
        {"status": "unheard"},
        {"attempt": 2**31},
        {"finish_reason": "a\x00b"},
        {"finish_reason": "\ud800"},
    ],
)
async def test_a_batch_with_a_call_that_cannot_be_stored_stores_nothing(database, changes):
    run = await builders.add_run(database)
    for may_exist in (False, True):
        with pytest.raises(Refused):
            await write_calls(database, [call(run.id, 1), replace(call(run.id, 2), **changes)], may_exist)
    with pytest.raises(Refused):
        await write_calls(database, [call(run.id, 1), call(run.id, 1)])
    assert await stored_ids(database) == []
    await write_calls(database, [call(run.id, 1)])
    assert await stored_ids(database) == [f"c{1:024x}"]


@pytest.mark.parametrize("count", [1, 6])
@pytest.mark.parametrize("cut_answer", [False, True])
async def test_calls_whose_answer_was_lost_are_no_success_and_are_stored_once(database, count, cut_answer):
    run = await builders.add_run(database)
    calls = [call(run.id, number) for number in range(count)]
    with FaultProxy.of(database.dsn) as proxy:
        behind = Database(proxy.url(database.dsn))
        await write_calls(behind, [call(run.id, count)])
        proxy.trouble = Trouble(cut_at=COPY_END if cut_answer else calls[0].id.encode(), cut_answer=cut_answer)
        with pytest.raises(StoreAway):
            await write_calls(behind, calls)
        assert await stored_ids(database) == [
            f"c{number:024x}" for number in range(0 if cut_answer else count, count + 1)
        ]
        proxy.heal()
        await write_calls(behind, calls, may_exist=True)
        await behind.close()
    assert await stored_ids(database) == [f"c{number:024x}" for number in range(count + 1)]


async def test_a_store_that_does_not_answer_counts_as_down():
    database = Database("postgresql://leyden@127.0.0.1:9/none")
    with pytest.raises(StoreAway):
        await write_calls(database, [call("run-a", 1)])


async def test_engines_that_serve_a_run_are_read(database):
    engines = [
        tables.Engine(url="http://b", state="serving", run_id="run-a", policy_version=2),
        tables.Engine(url="http://a", pool="small", state="serving", run_id="run-b"),
        tables.Engine(url="http://c", state="updating", run_id="run-a", policy_version=2),
        tables.Engine(url="http://d", state="serving"),
    ]
    async with database.session() as session:
        session.add_all(engines)
        await session.flush()
        session.add(tables.EngineAdapter(url="http://d", run_id="run-c", policy_version=0))
        session.add(tables.EngineAdapter(url="http://d", run_id="run-d", policy_version=4, adapter="run-d:4"))
        session.add(tables.EngineAdapter(url="http://c", run_id="run-e", policy_version=1, adapter="run-e:1"))
    async with database.read() as session:
        found = await serving_engines(session)
    assert found == [
        ("http://a", "run-b", None, "small", False, None),
        ("http://b", "run-a", 2, "default", False, None),
        ("http://d", "run-c", 0, "default", True, None),
        ("http://d", "run-d", 4, "default", True, "run-d:4"),
    ]
