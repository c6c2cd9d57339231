"""Later prompts begin with the exact tokens of the calls that they continue; tool calls survive the round trip."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from prometheus_client import REGISTRY
from sqlalchemy import select

from leyden.libs.contracts.conversation import Tool, Turn
from leyden.libs.store import tables
from tests.fakes.chat_model import CHATML_FORGETTING, CHATML_WITH_TOOLS, EOS
from tests.fakes.gateway import Scene, scene
from tests.support import builders

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather in a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
SAMPLED_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city":  "Paris"}}\n</tool_call>'


def ids(data: bytes) -> list[int]:
    return np.frombuffer(data, "<i4").tolist()


def tokens_of(call: tables.ModelCall) -> list[int]:
    return ids(call.prompt_ids) + ids(call.sampled_ids)


def begins_with(later: tables.ModelCall, earlier: tables.ModelCall) -> bool:
    return ids(later.prompt_ids)[: len(tokens_of(earlier))] == tokens_of(earlier)


def forks() -> float:
    return REGISTRY.get_sample_value("gateway_prompts_total", {"continuation": "fork"}) or 0.0


def say(*tokens: int) -> Any:
    return lambda _body: tokens


async def converse(stage: Scene, *questions: str, **parameters: Any) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    async with stage.client() as client:
        for question in questions:
            messages.append({"role": "user", "content": question})
            create: Any = client.chat.completions.create
            answer = await create(model="m", messages=messages, **parameters)
            messages.append(answer.choices[0].message.model_dump(exclude_none=True))
    return messages


async def test_each_call_names_its_agent_and_how_it_continues(tmp_path, database):
    async with scene(tmp_path, database) as stage, stage.client() as client:

        async def ask(system: str, *turns: dict[str, Any], tools: tuple[str, ...] = (), **headers: str) -> str:
            named = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in tools]
            answer = await client.chat.completions.create(
                model="m",
                messages=[{"role": "system", "content": system}, *turns],
                extra_body={"tools": named} if named else None,
                extra_headers=headers,
            )
            return answer.choices[0].message.content or ""

        question = {"role": "user", "content": "a"}
        said = {"role": "assistant", "content": await ask("Plan.", question), "name": "planner"}
        await ask("Plan.", question, said, question)
        await ask("Plan.", question, {**said, "content": "rewritten"}, question)
        await ask("Search.", question)
        await ask("Plan.", question, tools=("search", "clock"))
        await ask("Plan.", {**question, "content": "b"}, tools=("clock", "search"))
        await ask("Plan.", question, **{"x-agent-name": "critic"})
        calls = await stage.calls()
    agents = [call.agent for call in calls]
    assert [agents.index(agent) for agent in agents] == [0, 0, 0, 3, 4, 4, 6]
    assert [call.agent_name for call in calls] == [None, "planner", "planner", None, None, None, "critic"]
    continuations = [call.continuation for call in calls]
    assert continuations == ["fresh", "extend", "fork", "fresh", "fresh", "fresh", "fresh"]


async def test_calls_have_the_first_role_that_fits_and_train_where_the_run_trains_it(tmp_path, database):
    roles = [
        {"name": "critic", "agent_name": "crit*"},
        {"name": "searcher", "tools": ["search"], "system": "You search"},
        {"name": "writer", "model": "writer-*"},
    ]
    document = builders.run_document(roles=roles, train=["writer", "searcher"])
    async with scene(tmp_path, database, run=document) as stage, stage.client() as client:

        async def ask(system: str = "", model: str = "m", tools: tuple[str, ...] = (), **headers: str) -> None:
            named = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in tools]
            turns: Any = [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": "a"}]
            await client.chat.completions.create(
                model=model, messages=turns, extra_body={"tools": named} if named else None, extra_headers=headers
            )

        await ask(model="writer-2", **{"x-agent-name": "critic"})
        await ask("Hello. You search the web.", tools=("clock", "search"))
        await ask("Hello. You search the web.", tools=("clock",))
        await ask(model="writer-2")
        calls = await stage.calls()
    assert [call.role for call in calls] == ["critic", "searcher", None, "writer"]
    assert [call.trainable for call in calls] == [False, True, False, True]
    assert [call.untrainable_reason for call in calls] == [
        *("role critic does not train", None, "no role, and the run's train names those that train", None)
    ]


async def test_a_name_once_seen_belongs_to_the_agent_in_the_whole_run(tmp_path, database):
    """LangChain names an agent in the answers that it sends back, so that no first call has a name."""
    roles = [{"name": "planner", "agent_name": "planner"}, {"name": "others"}]
    document = builders.run_document(roles=roles, train=["planner"])

    said = {"role": "assistant", "content": "Hello.", "name": "planner"}
    async with scene(tmp_path, database, run=document) as stage, stage.another_gateway() as other:

        async def ask(sibling: int, system: str, *later: Any, name: str | None = None, gateway: Any = None) -> None:
            first: Any = {"role": "system", "content": system} | ({"name": name} if name else {})
            rollout = stage.rollout_id.removesuffix("0") + str(sibling)
            async with (gateway or stage.gateway).client(rollout) as client:
                messages = [first, {"role": "user", "content": "a"}, *later]
                await client.chat.completions.create(model="m", messages=messages)

        await ask(0, "Plan.")
        await ask(0, "Plan.", said, {"role": "user", "content": "b"})
        await ask(1, "Plan.")
        await ask(1, "Search.")
        await ask(2, "Draw.", name="planner")
        first, *_ = await stage.calls()
        async with database.session() as session:
            session.add(tables.AgentName(run_id=stage.run_id, agent=first.agent, name="planner"))
        # Another gateway asks the store, in which credit has put the name.
        await ask(3, "Plan.", gateway=other)
        calls = await stage.calls()
    expected = ["others", "planner", "planner", "others", "planner", "planner"]
    assert [call.role for call in calls] == expected
    assert [call.agent_name for call in calls] == [name if name == "planner" else None for name in expected]


async def test_a_later_prompt_begins_with_the_sampled_tokens_even_if_no_encoder_produces_them(tmp_path, database):
    letters = [ord("h") - 33, ord("e") - 33]
    async with scene(tmp_path, database, says=say(*letters, EOS)) as stage:
        await converse(stage, "a", "b", "c")
        first, second, third = await stage.calls()
        appended = stage.model.tokenizer.encode("\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n").tolist()
        # What was sampled as two tokens is one token to the encoder.
        assert len(stage.model.tokenizer.encode("he")) == 1
    assert ids(first.sampled_ids) == [*letters, EOS]
    assert ids(second.prompt_ids) == tokens_of(first) + appended
    assert begins_with(third, second)


@pytest.mark.parametrize("parameters", [{"max_tokens": 2}, {"stop": "lo"}])
async def test_a_turn_that_did_not_end_itself_is_closed_for_the_model(tmp_path, database, parameters):
    async with scene(tmp_path, database, says="hello") as stage:
        await converse(stage, "a", "b", **parameters)
        first, second = await stage.calls()
        appended = stage.model.tokenizer.encode(
            "<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
        ).tolist()
    assert ids(first.sampled_ids)[-1] != EOS
    assert ids(second.prompt_ids) == tokens_of(first) + appended


async def test_an_agent_that_trims_and_respells_what_it_echoes_still_continues_its_tokens(tmp_path, database):
    async with (
        scene(
            tmp_path, database, says=[f"Let me see.\n{SAMPLED_CALL}", " It rains. ", "bye"], template=CHATML_WITH_TOOLS
        ) as stage,
        stage.client() as client,
    ):
        messages: list[Any] = [{"role": "user", "content": "weather?"}]
        answer = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
        (call,) = answer.choices[0].message.tool_calls or []
        assert call.type == "function"
        # What LangChain sends back: a name, and the arguments spelled anew.
        echoed = {"name": "weather", "arguments": '{"city": "Paris"}'}
        messages += [
            {
                "role": "assistant",
                "name": "agent",
                "content": "Let me see.",
                "tool_calls": [{"id": call.id, "type": "function", "function": echoed}],
            },
            {"role": "tool", "tool_call_id": call.id, "content": "rain"},
        ]
        answer = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
        content = (answer.choices[0].message.content or "").strip()
        messages += [
            {"role": "assistant", "content": [{"type": "text", "text": content}]},
            {"role": "user", "content": "?"},
        ]
        await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
        first, second, third = await stage.calls()
    assert call.function.arguments == '{"city":  "Paris"}'
    assert begins_with(second, first)
    assert begins_with(third, second)


async def test_each_branch_continues_its_own_parent_call(tmp_path, database):
    async with scene(tmp_path, database, says=["left", "right", "x", "y"]) as stage, stage.client() as client:
        create: Any = client.chat.completions.create
        root = [{"role": "user", "content": "?"}]
        await create(model="m", messages=root, n=1)
        await create(model="m", messages=root, n=1)
        for text in ("right", "left"):
            await create(model="m", messages=[*root, {"role": "assistant", "content": text}, *root])
        left, right, after_right, after_left = await stage.calls()
    assert begins_with(after_right, right)
    assert begins_with(after_left, left)


async def test_history_written_by_the_agent_is_encoded_and_starts_a_branch(tmp_path, database):
    before = forks()
    async with scene(tmp_path, database, says="hello") as stage, stage.client() as client:
        create: Any = client.chat.completions.create
        await create(model="m", messages=[{"role": "user", "content": "a"}])
        changed = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "never said"},
            {"role": "user", "content": "b"},
        ]
        await create(model="m", messages=changed)
        _, second = await stage.calls()
        text = stage.model.tokenizer.decode(ids(second.prompt_ids))
    assert "never said<|im_end|>" in text
    assert forks() - before == 1


async def test_an_answer_sent_back_without_its_reasoning_is_shown_so_and_counted(tmp_path, database):
    before = forks()
    async with scene(tmp_path, database, says="<think>x</think>yes") as stage, stage.client() as client:
        create: Any = client.chat.completions.create
        messages: list[Any] = [{"role": "user", "content": "a"}]
        await create(model="m", messages=messages)
        messages += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "b"}]
        await create(model="m", messages=messages)
        _, second = await stage.calls()
        text = stage.model.tokenizer.decode(ids(second.prompt_ids))
    assert "<think>" not in text
    assert forks() - before == 1


async def test_a_template_that_rewrites_history_forks_and_is_counted(tmp_path, database):
    before = forks()
    async with scene(tmp_path, database, says="<think>x</think>yes", template=CHATML_FORGETTING) as stage:
        await converse(stage, "a", "b")
        first, second = await stage.calls()
        text = stage.model.tokenizer.decode(ids(second.prompt_ids))
    assert not begins_with(second, first)
    assert "<think>" not in text
    assert forks() - before == 1


@pytest.mark.parametrize("template", [None, CHATML_WITH_TOOLS])
async def test_the_tokens_of_a_turn_survive_a_restart_and_are_shared_by_replicas(tmp_path, database, template):
    options: dict[str, Any] = {} if template is None else {"template": template}
    letters = [ord("h") - 33, ord("e") - 33]
    async with scene(tmp_path, database, says=say(*letters, EOS), **options) as stage:
        messages = await converse(stage, "a", "b")
        async with stage.another_gateway() as other, other.client(stage.rollout_id) as client:
            create: Any = client.chat.completions.create
            messages.append({"role": "user", "content": "c"})
            answer = await create(model="m", messages=messages)
        messages += [answer.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "d"}]
        async with stage.client() as client:
            create = client.chat.completions.create
            await create(model="m", messages=messages)
        _, second, third, fourth = await stage.calls()
    assert begins_with(third, second)
    assert begins_with(fourth, third)


async def test_an_answer_is_unknown_where_the_store_has_lost_a_call_before_it(tmp_path, database):
    """As after a failover to a standby that was behind."""
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "4"}]
    async with scene(tmp_path, database, says="hello") as stage, stage.client() as client:
        lost = {"turns": said[:1], "parent_call_id": "call-lost"}
        await builders.add_call(database, stage.rollout, **lost)
        for question in "bc":
            said.append({"role": "user", "content": question})
            answer = await client.chat.completions.create(model="m", messages=said)
            said.append(answer.choices[0].message.model_dump(exclude_none=True))
        _, second, third = await stored(stage)
    assert (second.parent_call_id, second.turns) == (None, said[:3])
    assert len(ids(second.prompt_ids)) == second.prompt_tokens
    assert third.parent_call_id == second.id


async def test_prompts_never_continue_calls_of_another_attempt(tmp_path, database):
    letters = [ord("h") - 33, ord("e") - 33]
    async with scene(tmp_path, database, says=say(*letters, EOS)) as stage:
        messages = await converse(stage, "a")
        await builders.end_attempt(database, stage.rollout_id)
        await builders.add_attempt(database, stage.rollout, 2)
        async with stage.gateway.client(stage.rollout_id, 2) as client:
            create: Any = client.chat.completions.create
            await create(model="m", messages=[*messages, {"role": "user", "content": "b"}])
        first, second = await stage.calls()
    assert (first.attempt, second.attempt) == (1, 2)
    assert not begins_with(second, first)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("template", [None, CHATML_WITH_TOOLS])
async def test_tool_calls_are_rendered_again_with_their_arguments_as_sampled(tmp_path, database, template, stream):
    options: dict[str, Any] = {} if template is None else {"template": template}
    says = f"Let me see. \n{SAMPLED_CALL}\n{SAMPLED_CALL}"
    async with scene(tmp_path, database, says=says, **options) as stage, stage.client() as client:
        create: Any = client.chat.completions.create
        answer = await create(model="m", messages=[{"role": "user", "content": "?"}], tools=TOOLS, stream=stream)
        message, finish = await _message(answer, stream=stream)
        (call,) = await stage.calls()
        prompt = stage.model.tokenizer.decode(ids(call.prompt_ids))
    assert '"description": "Weather in a city"' in prompt
    assert (message["content"], finish) == ("Let me see.", "tool_calls")
    assert [(call["id"], call["name"], call["arguments"]) for call in message["calls"]] == [
        (f"call_{call.id}_{k}", "weather", '{"city":  "Paris"}') for k in range(2)
    ]
    assert call.answer is not None
    assert [entry["id"] for entry in call.answer["tool_calls"]] == [f"call_{call.id}_0", f"call_{call.id}_1"]


async def _message(answer: Any, *, stream: bool) -> tuple[dict[str, Any], str]:
    if not stream:
        choice = answer.choices[0]
        calls = [
            {"id": c.id, "name": c.function.name, "arguments": c.function.arguments} for c in choice.message.tool_calls
        ]
        return {"content": choice.message.content, "calls": calls}, choice.finish_reason
    content, calls, finish = "", [], ""
    async for chunk in answer:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            calls += [
                {"id": c.id, "name": c.function.name, "arguments": c.function.arguments}
                for c in choice.delta.tool_calls or []
            ]
            finish = choice.finish_reason or finish
    return {"content": content, "calls": calls}, finish


async def test_the_generic_form_shows_calls_and_results_to_a_model_without_tools(tmp_path, database):
    async with scene(tmp_path, database, says=[SAMPLED_CALL, "rain"]) as stage, stage.client() as client:
        create: Any = client.chat.completions.create
        messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "?"}]
        answer = await create(model="m", messages=messages, tools=TOOLS)
        call = answer.choices[0].message.tool_calls[0]
        messages += [
            answer.choices[0].message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "rain"},
        ]
        await create(model="m", messages=messages, tools=TOOLS)
        first, second = await stage.calls()
        text = stage.model.tokenizer.decode(ids(second.prompt_ids))
    assert begins_with(second, first)
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert text.endswith(
        f"{SAMPLED_CALL}<|im_end|>\n<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_a_malformed_tool_call_is_a_tool_call_and_marked(tmp_path, database, stream):
    broken = 'I try <tool_call>{"name": "weather", "arguments": {"city": }}</tool_call>'
    async with scene(tmp_path, database, says=broken) as stage, stage.client() as client:
        create: Any = client.chat.completions.create
        answer = await create(model="m", messages=[{"role": "user", "content": "?"}], tools=TOOLS, stream=stream)
        message, finish = await _message(answer, stream=stream)
        messages: list[Any] = [
            {"role": "user", "content": "?"},
            {
                "role": "assistant",
                "content": message["content"],
                "tool_calls": [
                    {"id": "own", "type": "function", "function": {"name": "weather", "arguments": '{"city": }'}}
                ],
            },
            {"role": "tool", "tool_call_id": "own", "content": "The arguments are no JSON."},
        ]
        await create(model="m", messages=messages, tools=TOOLS)
        first, second = await stage.calls()
    assert (message["content"], finish) == ("I try", "tool_calls")
    assert [(call["name"], call["arguments"]) for call in message["calls"]] == [("weather", '{"city": }')]
    assert first.answer is not None
    assert [call["is_malformed"] for call in first.answer["tool_calls"]] == [True]
    assert begins_with(second, first)
    assert (second.parent_call_id, second.shared_turns) == (first.id, 1)


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_a_prompt_shows_the_one_call_that_the_agent_was_shown(tmp_path, database, is_restarted):
    before = forks()
    async with scene(tmp_path, database, says=SAMPLED_CALL * 2, template=CHATML_WITH_TOOLS) as stage:
        messages: list[Any] = [{"role": "user", "content": "?"}]
        async with stage.client() as client:
            create: Any = client.chat.completions.create
            answer = await create(model="m", messages=messages, tools=TOOLS, parallel_tool_calls=False)
        said = answer.choices[0].message.model_dump(exclude_none=True)
        messages += [said, {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "rain"}]
        async with AsyncExitStack() as stack:
            gateway = await stack.enter_async_context(stage.another_gateway()) if is_restarted else stage.gateway
            client = await stack.enter_async_context(gateway.client(stage.rollout_id))
            create = client.chat.completions.create
            await create(model="m", messages=messages, tools=TOOLS, parallel_tool_calls=False)
        first, second = await stage.calls()
        sampled, prompt = [stage.model.tokenizer.decode(ids(data)) for data in (first.sampled_ids, second.prompt_ids)]
    assert (sampled.count('"Paris"'), prompt.count('"Paris"')) == (2, 1)
    assert (second.parent_call_id, second.shared_turns) == (first.id, 2)
    assert forks() - before == 1


async def test_without_parallel_calls_the_first_counts_and_with_none_none_is_parsed(tmp_path, database):
    async with scene(tmp_path, database, says=SAMPLED_CALL * 2) as stage, stage.client() as client:
        create: Any = client.chat.completions.create
        messages = [{"role": "user", "content": "?"}]
        single = await create(model="m", messages=messages, tools=TOOLS, parallel_tool_calls=False)
        plain = await create(model="m", messages=messages, tools=TOOLS, tool_choice="none")
        required = await create(model="m", messages=messages, tools=TOOLS, tool_choice="required")
    assert len(single.choices[0].message.tool_calls) == 1
    assert (plain.choices[0].message.content, plain.choices[0].message.tool_calls) == (SAMPLED_CALL * 2, None)
    assert len(required.choices[0].message.tool_calls) == 2


async def stored(stage: Scene) -> list[tables.ModelCall]:
    """The rows as they are."""
    async with stage.database.read() as session:
        return list(await session.scalars(select(tables.ModelCall).order_by(tables.ModelCall.sequence)))


async def test_a_row_stores_only_the_addition_to_its_parent_call(tmp_path, database):
    async with scene(tmp_path, database, says="hello", template=CHATML_WITH_TOOLS) as stage:
        said = await converse(stage, "a", "tell me of c1e10f", "c", tools=TOOLS)
        rows, calls = await stored(stage), await stage.calls()
    assert [row.parent_call_id for row in rows] == [None, rows[0].id, rows[1].id]
    assert [(row.turns, row.tools) for row in rows] == [(said[:1], TOOLS), (said[2:3], None), (said[4:5], None)]
    assert [len(row.prompt_ids) // 4 for row in rows] == [
        rows[0].prompt_tokens,
        *(row.prompt_tokens - before.prompt_tokens - before.completion_tokens for before, row in pairwise(rows)),
    ]
    assert [(call.turns, call.tools) for call in calls] == [(said[:end], TOOLS) for end in (1, 3, 5)]
    assert [len(call.prompt_ids) // 4 for call in calls] == [row.prompt_tokens for row in rows]


async def test_every_choice_and_every_way_on_from_an_answer_continues_its_call(tmp_path, database):
    async with scene(tmp_path, database, says="hello") as stage, stage.client() as client:
        create: Any = client.chat.completions.create
        asked = [{"role": "user", "content": "a"}]
        answer = await create(model="m", messages=asked, n=2)
        asked.append(answer.choices[0].message.model_dump(exclude_none=True))
        for question in ("b", "c"):
            await create(model="m", messages=[*asked, {"role": "user", "content": question}], n=2)
        rows = await stored(stage)
    assert [row.parent_call_id for row in rows] == [None, None] + [rows[0].id] * 4
    assert [row.turns[-1]["content"] for row in rows[2:]] == ["b", "b", "c", "c"]


@pytest.mark.parametrize(
    "change",
    [
        lambda messages: messages[0].update(content="another a"),
        lambda messages: messages[0].update(name="somebody"),
    ],
)
async def test_a_call_without_a_common_beginning_is_stored_in_full(tmp_path, database, change):
    async with scene(tmp_path, database, says="hello") as stage, stage.client() as client:
        said = await converse(stage, "a", "b")
        change(said)
        create: Any = client.chat.completions.create
        await create(model="m", messages=[*said, {"role": "user", "content": "c"}])
        *_, last = await stored(stage)
    assert last.parent_call_id is None
    assert [turn["role"] for turn in last.turns] == ["user", "assistant"] * 2 + ["user"]


async def remind(
    stage: Scene, gateway: Any, messages: list[dict[str, Any]], *questions: str, **parameters: Any
) -> None:
    """Goes on, each request with a last message that is in no later one."""
    async with gateway.client(stage.rollout_id) as client:
        for question in questions:
            messages.append({"role": "user", "content": question})
            reminder = {"role": "system", "content": f"step {len(messages):02}"}
            create: Any = client.chat.completions.create
            answer = await create(model="m", messages=[*messages, reminder], **parameters)
            messages.append(answer.choices[0].message.model_dump(exclude_none=True))


def encoded(stage: Scene, messages: list[dict[str, Any]]) -> list[int]:
    """The tokens of a conversation that continues none."""
    turns = tuple(Turn(message["role"], message["content"]) for message in messages)
    rendered = stage.model.render(turns, tuple(map(Tool, TOOLS)), {}, add_generation_prompt=True)
    return stage.model.tokenizer.encode(rendered).tolist()


async def full(stage: Scene) -> list[tuple[Any, Any, list[int]]]:
    """The turns, tools and prompt of each call."""
    return [(call.turns, call.tools, ids(call.prompt_ids)) for call in await stage.calls()]


async def test_a_row_stores_the_new_turns_when_the_agent_drops_the_last_message(tmp_path, database):
    said: list[dict[str, Any]] = []
    async with scene(tmp_path, database, says="hello", template=CHATML_WITH_TOOLS) as stage:
        await remind(stage, stage.gateway, said, *"abcdef", tools=TOOLS)
        rows, calls = await stored(stage), await full(stage)
        asked = [[*said[:end], {"role": "system", "content": f"step {end:02}"}] for end in range(1, 12, 2)]
        assert calls == [(messages, TOOLS, encoded(stage, messages)) for messages in asked]
    before = [None, *(row.id for row in rows[:-1])]
    assert [row.parent_call_id for row in rows] == before
    assert [row.shared_turns for row in rows] == [0, 1, 3, 5, 7, 9]
    # The last answer, the question and the reminder, however long the session is.
    assert [row.turns for row in rows[1:]] == [messages[-3:] for messages in asked[1:]]
    assert len({len(row.prompt_ids) for row in rows[3:]}) == 1
    assert [row.prompt_tokens - len(row.prompt_ids) // 4 for row in rows] == [row.shared_tokens for row in rows]


async def test_only_a_recorded_call_is_continued(tmp_path, database):
    said: list[dict[str, Any]] = []
    async with scene(tmp_path, database, says="hello") as stage:
        await remind(stage, stage.gateway, said, "a", "b")
        # At once, and the same as another: the second cannot know that the first will be recorded.
        await asyncio.gather(*(remind(stage, stage.gateway, [*said], *"cd", n=2) for _ in range(3)))
        rows, calls = await stored(stage), await full(stage)
    assert len(calls) == 2 + 3 * 2 * 2
    known = {row.id: row for row in rows}
    for row in rows[1:]:
        assert row.parent_call_id is not None
        assert known[row.parent_call_id].created_at < row.created_at
        assert known[row.parent_call_id].request_id != row.request_id


async def test_a_second_gateway_continues_the_calls_of_the_first(tmp_path, database):
    said: list[dict[str, Any]] = []
    async with scene(tmp_path, database, says="hello") as stage:
        await remind(stage, stage.gateway, said, *"abc")
        async with stage.another_gateway() as other:
            await remind(stage, other, said, *"def")
            # A message that is kept makes the next call one that continues all of this one.
            answer = await kept(other, stage, said, "g")
            said.append(answer)
            await kept(other, stage, said, "h")
        rows, calls = await stored(stage), await full(stage)
    assert [row.parent_call_id for row in rows] == [None, *(row.id for row in rows[:-1])]
    assert [row.shared_turns for row in rows] == [0, 1, 3, 5, 7, 9, 11, 14]
    assert calls[7][2][: len(calls[6][2])] == calls[6][2]


async def kept(gateway: Any, stage: Scene, messages: list[dict[str, Any]], question: str) -> dict[str, Any]:
    """The answer to a request whose last message is kept."""
    messages.append({"role": "user", "content": question})
    async with gateway.client(stage.rollout_id) as client:
        answer = await client.chat.completions.create(model="m", messages=messages)
    found: dict[str, Any] = answer.choices[0].message.model_dump(exclude_none=True)
    return found


@pytest.mark.parametrize("tools", [[None, TOOLS], [TOOLS, None]])
async def test_a_call_with_different_tools_shares_no_turns(tmp_path, database, tools):
    said: list[dict[str, Any]] = []
    async with scene(tmp_path, database, says="hello", template=CHATML_WITH_TOOLS) as stage:
        for given in tools:
            await remind(stage, stage.gateway, said, *"ab", extra_body={"tools": given})
        rows, calls = await stored(stage), await full(stage)
    assert [row.parent_call_id is None for row in rows] == [True, False, True, False]
    assert [sent for _, sent, _ in calls] == [tools[0] or [], tools[0] or [], tools[1] or [], tools[1] or []]


async def test_the_turns_before_a_rewritten_answer_are_shared(tmp_path, database):
    async with scene(tmp_path, database, says="hello") as stage, stage.client() as client:
        said = await converse(stage, "a", "b")
        said[1]["content"] = "never said"
        create: Any = client.chat.completions.create
        await create(model="m", messages=[*said, {"role": "user", "content": "c"}])
        *_, before, last = await stored(stage)
        calls = await full(stage)
    assert (last.parent_call_id, last.shared_turns) == (before.id, 1)
    assert calls[2][0] == [*said, {"role": "user", "content": "c"}]


async def test_tools_that_change_are_stored(tmp_path, database):
    other = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "name": "time"}}]
    async with scene(tmp_path, database, says="hello") as stage, stage.client() as client:
        said = await converse(stage, "a", tools=TOOLS)
        create: Any = client.chat.completions.create
        await create(model="m", messages=[*said, {"role": "user", "content": "c"}], tools=other)
        *_, last = await stored(stage)
    assert (last.parent_call_id, last.tools) == (None, other)


async def test_a_restarted_gateway_continues_the_stored_calls(tmp_path, database):
    async with scene(tmp_path, database, says="hello") as stage:
        said = await converse(stage, "a", "b", "c")
        async with stage.another_gateway() as other, other.client(stage.rollout_id) as client:
            create: Any = client.chat.completions.create
            for question in ("d", "e"):
                said.append({"role": "user", "content": question})
                answer = await create(model="m", messages=said)
                said.append(answer.choices[0].message.model_dump(exclude_none=True))
        rows, calls = await stored(stage), await stage.calls()
    assert [row.parent_call_id for row in rows] == [None, *(row.id for row in rows[:-1])]
    assert begins_with(calls[3], calls[2])
    assert begins_with(calls[4], calls[3])
    assert calls[4].turns == said[:-1]
