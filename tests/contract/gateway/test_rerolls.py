"""Re-rolls: the gateway answers a rollout's first calls from the record of another one, and then asks the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
from sqlalchemy import select

from leyden.libs.contracts.states import DIVERGED
from leyden.libs.contracts.untrainable import REROLL
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from tests.fakes.chat_model import CHATML_WITH_TOOLS
from tests.fakes.gateway import Scene, scene
from tests.support import builders

CREDIT = {"rule": {"type": "identical"}, "baseline": {"type": "monte_carlo", "calls": 1, "samples": 2}}
RUN = builders.run_document(credit=CREDIT)
CALL = '<tool_call>\n{"name": "search", "arguments": {"q": "one"}}\n</tool_call>'
TOOLS: list[Any] = [{"type": "function", "function": {"name": "search", "parameters": {}}}]
SAYS = [CALL, "first", "second", "third", "fourth"]


async def set_reroll(database: Database, rollout_id: str, from_call: int) -> str:
    """Makes the next sibling a re-roll of a rollout, whose attempt 1 counts; its id."""
    async with database.session() as session:
        source = await session.get_one(tables.Rollout, rollout_id)
        source.attempt = 1
        query = select(tables.Rollout).where(tables.Rollout.group_id == source.group_id, tables.Rollout.sibling == 1)
        reroll = (await session.scalars(query)).one()
        reroll.rerolls_of, reroll.from_call = rollout_id, from_call
        return reroll.id


async def play(client: openai.AsyncOpenAI, turns: int, *, stream: bool = False, result: str = "7") -> list[str]:
    """An agent that uses a tool and goes on talking; its answers."""
    messages: list[Any] = [{"role": "user", "content": "one?"}]
    said = []
    for _ in range(turns):
        options: Any = {"model": "m", "messages": messages, "tools": TOOLS, "temperature": 0.7}
        if stream:
            final = await _streamed(client, options)
        else:
            final = (await client.chat.completions.create(**options)).choices[0].message.model_dump(exclude_none=True)
        said.append(final.get("content") or final["tool_calls"][0]["id"])
        messages.append({"role": "assistant", **final})
        if final.get("tool_calls"):
            messages.append({"role": "tool", "content": result, "tool_call_id": final["tool_calls"][0]["id"]})
        else:
            messages.append({"role": "user", "content": "go on"})
    return said


async def _streamed(client: openai.AsyncOpenAI, options: dict[str, Any]) -> dict[str, Any]:
    content, calls = "", []
    async for chunk in await client.chat.completions.create(stream=True, **options):
        for choice in chunk.choices:
            content += choice.delta.content or ""
            calls += [one.model_dump(exclude_none=True) for one in choice.delta.tool_calls or ()]
    for one in calls:
        one.pop("index")
    return {"content": content or None, "tool_calls": calls} if calls else {"content": content}


async def of(stage: Scene, rollout_id: str) -> list[tables.ModelCall]:
    return [call for call in await stage.calls() if call.rollout_id == rollout_id]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_first_calls_come_from_the_record_and_the_others_from_the_engine(
    tmp_path: Path, database: Database, stream: bool
) -> None:
    async with scene(tmp_path, database, run=RUN, template=CHATML_WITH_TOOLS, says=SAYS) as stage:
        async with stage.client() as client:
            original = await play(client, 3)
        reroll = await set_reroll(database, stage.rollout_id, 2)
        asked = len(stage.engine.requests)
        async with stage.gateway.client(reroll) as client:
            again = await play(client, 3, stream=stream)
        recorded, repeated = await of(stage, stage.rollout_id), await of(stage, reroll)
    assert (original[1:], again) == (["first", "second"], [*original[:2], "third"])
    assert len(stage.engine.requests) == asked + 1
    for name in ("prompt_ids", "temperature", "turns", "answer"):
        assert [getattr(call, name) for call in repeated[:2]] == [getattr(call, name) for call in recorded[:2]]
    for name in ("sampled_ids", "generator_logprobs", "policy_versions", "finish_reason"):
        assert [getattr(call, name) for call in repeated[:2]] == [getattr(call, name) for call in recorded[:2]]
    # The third prompt begins with the recorded tokens, so that its state is that of the source.
    assert repeated[2].prompt_ids == recorded[2].prompt_ids
    assert [(call.status, call.trainable, call.untrainable_reason) for call in repeated] == [
        ("completed", False, REROLL)
    ] * 3
    assert all(call.trainable for call in recorded)


async def test_another_request_ends_the_reroll_and_asks_no_engine(tmp_path: Path, database: Database) -> None:
    async with scene(tmp_path, database, run=RUN, template=CHATML_WITH_TOOLS, says=SAYS) as stage:
        async with stage.client() as client:
            await play(client, 3)
        reroll = await set_reroll(database, stage.rollout_id, 2)
        asked = len(stage.engine.requests)
        async with stage.gateway.client(reroll) as client:
            with pytest.raises(openai.BadRequestError, match="not deterministic") as refused:
                await play(client, 3, result="8")
            assert refused.value.code == DIVERGED
            # An agent that asks again is refused again.
            with pytest.raises(openai.BadRequestError):
                await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "so?"}])
        calls = await of(stage, reroll)
        assert len(stage.engine.requests) == asked
    assert [(call.status, call.finish_reason) for call in calls] == [
        ("completed", "tool_calls"),
        ("refused", DIVERGED),
        ("refused", DIVERGED),
    ]


async def test_any_gateway_goes_on_where_another_one_died(tmp_path: Path, database: Database) -> None:
    async with scene(tmp_path, database, run=RUN, template=CHATML_WITH_TOOLS, says=SAYS) as stage:
        async with stage.client() as client:
            original = await play(client, 3)
        reroll = await set_reroll(database, stage.rollout_id, 2)
        async with stage.gateway.client(reroll) as client:
            assert await play(client, 1) == original[:1]
        await stage.gateway.stop()
        messages: list[Any] = [
            {"role": "user", "content": "one?"},
            {
                "role": "assistant",
                "tool_calls": [
                    {
                        "id": original[0],
                        "type": "function",
                        "function": {"name": "search", "arguments": '{"q": "one"}'},
                    }
                ],
            },
            {"role": "tool", "content": "7", "tool_call_id": original[0]},
        ]
        async with stage.another_gateway() as other, other.client(reroll) as client:
            answer = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS, temperature=0.7)
    assert answer.choices[0].message.content == "first"


async def test_siblings_of_a_run_with_rerolls_are_sampled(tmp_path: Path, database: Database) -> None:
    async with scene(tmp_path, database, run=RUN, template=CHATML_WITH_TOOLS, says=SAYS) as stage:
        async with stage.client() as client:
            await play(client, 2)
        (first, second) = await stage.calls()
    assert (first.trainable, second.trainable, len(stage.engine.requests)) == (True, True, 2)
