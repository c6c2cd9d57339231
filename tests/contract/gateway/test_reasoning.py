"""Reasoning reaches the agent apart from the content, and prompts keep its sampled tokens where the template does."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from openai.types.responses import Response

from tests.contract.gateway.test_gemini import ask as ask_gemini
from tests.contract.gateway.test_turns import SAMPLED_CALL, TOOLS, begins_with, tokens_of
from tests.fakes.gateway import Scene, scene
from tests.fakes.model_families import FAMILIES, ModelFamily, published_template

SAYS = [
    f"<think>\nWhere?\n</think>\n\n{SAMPLED_CALL}",
    "<think>\nSo.\n</think>\n\nRain.",
    "<think>\nBye?\n</think>\n\nBye.",
]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_round_of_tool_calls_extends_without_echoed_reasoning_and_a_new_question_forks(
    tmp_path, database, stream
):
    async with (
        scene(tmp_path, database, says=SAYS, template=published_template("qwen3")) as stage,
        stage.client() as client,
    ):
        create: Any = client.chat.completions.create

        async def ask(messages: list[Any]) -> tuple[str, str, list[Any]]:
            asked = {"model": "m", "messages": messages, "tools": TOOLS}
            if not stream:
                message = (await create(**asked)).choices[0].message
                return message.reasoning_content, message.content or "", message.tool_calls or []
            deltas = [chunk.choices[0].delta async for chunk in await create(**asked, stream=True) if chunk.choices]
            reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
            return (
                reasoning,
                "".join(delta.content or "" for delta in deltas),
                [call for delta in deltas for call in delta.tool_calls or []],
            )

        messages: list[Any] = [{"role": "user", "content": "weather?"}]
        reasoning, content, [call] = await ask(messages)
        assert (reasoning, content) == ("Where?", "")
        function = {"name": "weather", "arguments": '{"city":"Paris"}'}
        messages += [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": call.id, "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": call.id, "content": "rain"},
        ]
        assert await ask(messages) == ("So.", "Rain.", [])
        messages += [{"role": "assistant", "content": "Rain."}, {"role": "user", "content": "bye"}]
        assert await ask(messages) == ("Bye?", "Bye.", [])
        first, second, third = await stage.calls()
    assert begins_with(second, first)
    assert [call.continuation for call in (first, second, third)] == ["fresh", "extend", "fork"]
    assert tokens_of(third)[: len(tokens_of(second))] != tokens_of(second)
    assert [(call.answer or {}).get("reasoning") for call in (first, second, third)] == ["Where?", "So.", "Bye?"]
    assert second.turns[1]["reasoning"] == "Where?"


async def test_responses_have_a_reasoning_item_and_its_events(tmp_path, database):
    async with (
        scene(tmp_path, database, says=SAYS[1], template=published_template("qwen3")) as stage,
        stage.client() as client,
    ):
        async with client.responses.stream(model="m", input="weather?") as stream:
            kinds = [event.type async for event in stream]
            response = await stream.get_final_response()
        Response.model_validate(
            response.model_dump(exclude={"output": {"__all__": {"content": {"__all__": {"parsed"}}}}})
        )
        again = await client.responses.create(model="m", input="and now?", previous_response_id=response.id)
        calls = await stage.calls()
    reasoning, message = response.output
    assert reasoning.type == "reasoning" and reasoning.content is not None and message.type == "message"
    assert ([part.text for part in reasoning.content], response.output_text) == (["So."], "Rain.")
    assert list(dict.fromkeys(kinds)) == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.reasoning_text.delta", "response.reasoning_text.done", "response.content_part.done",
        "response.output_item.done", "response.output_text.delta", "response.output_text.done", "response.completed",
    ]  # fmt: skip
    assert again.output_text == "Rain."
    assert [call.continuation for call in calls] == ["fresh", "fork"]


async def test_a_pool_without_a_parser_has_reasoning_in_its_content(tmp_path, database):
    async with (
        scene(
            tmp_path,
            database,
            says=SAYS[1],
            template=published_template("qwen3"),
            reasoning_parsers={"default": "none"},
        ) as stage,
        stage.client() as client,
    ):
        create: Any = client.chat.completions.create
        answer = await create(model="m", messages=[{"role": "user", "content": "weather?"}])
    assert answer.choices[0].message.content == SAYS[1]


GPT_OSS = [
    "<|channel|>analysis<|message|>Where?<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
    '<|constrain|>json<|message|>{"city": "Paris"}<|call|>',
    "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>Rain.<|return|>",
]
Answer = tuple[str | None, str, str]
"""Reasoning, text, and the city of a call."""


async def in_chat_completions(stage: Scene) -> list[Answer]:
    async with stage.client() as client:
        create: Any = client.chat.completions.create
        messages: list[Any] = [{"role": "user", "content": "weather?"}]
        first = (await create(model="m", messages=messages, tools=TOOLS)).choices[0].message
        [call] = first.tool_calls
        echo = {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]}
        messages += [echo, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
        second = (await create(model="m", messages=messages, tools=TOOLS)).choices[0].message
    return [
        (first.reasoning_content, first.content or "", json.loads(call.function.arguments)["city"]),
        (second.reasoning_content, second.content, ""),
    ]


async def in_responses(stage: Scene) -> list[Answer]:
    tools: Any = [{"type": "function", **TOOLS[0]["function"], "strict": False}]
    async with stage.client() as client:
        create: Any = client.responses.create
        items: list[Any] = [{"role": "user", "content": "weather?"}]
        first = await create(model="m", input=items, tools=tools)
        reasoning, call = first.output
        items += [item.model_dump(exclude_none=True) for item in first.output]
        items += [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"}]
        second = await create(model="m", input=items, tools=tools)
    return [
        (reasoning.content[0].text, first.output_text, json.loads(call.arguments)["city"]),
        (second.output[0].content[0].text, second.output_text, ""),
    ]


async def in_messages(stage: Scene) -> list[Answer]:
    function = TOOLS[0]["function"]
    tools: Any = [{"name": "weather", "description": "Weather", "input_schema": function["parameters"]}]
    async with stage.anthropic() as client:
        thinks: Any = {"max_tokens": 2000, "thinking": {"type": "enabled", "budget_tokens": 1024}}
        create: Any = functools.partial(client.messages.create, model="m", tools=tools, **thinks)
        messages: list[Any] = [{"role": "user", "content": "weather?"}]
        first = await create(messages=messages)
        thinking, call = first.content
        messages += [
            {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "rain"}]},
        ]
        second = await create(messages=messages)
    return [(thinking.thinking, "", call.input["city"]), (second.content[0].thinking, second.content[1].text, "")]


@pytest.mark.parametrize("converse", [in_chat_completions, in_responses, in_messages])
async def test_gpt_oss_calls_a_tool_and_answers_in_every_dialect(tmp_path, database, converse):
    async with scene(tmp_path, database, says=list(GPT_OSS), family=FAMILIES["gpt_oss"]) as stage:
        assert await converse(stage) == [("Where?", "", "Paris"), ("So.", "Rain.", "")]
        first, second = await stage.calls()
    assert begins_with(second, first)
    assert [call.continuation for call in (first, second)] == ["fresh", "extend"]


THINKING = ModelFamily("qwen3", "hermes", ["<|im_end|>"], plain_marks=("<think>", "</think>"))
LATER = (
    "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary<|message|>b<|end|>"
    "<|start|>assistant<|channel|>analysis<|message|>cd<|end|><|start|>assistant<|channel|>final<|message|>e<|return|>"
)


@pytest.mark.parametrize(
    ("family", "says", "reasoning"),
    [
        (THINKING, "<think>\nSo.\n</think>\n\nRain.", ["<think>\nSo.\n</think>"]),
        (THINKING, "<think>\nSo.", ["<think>\nSo."]),
        (THINKING, "Rain.", []),
        (FAMILIES["qwen3"], "Rain.", []),
        (FAMILIES["gpt_oss"], GPT_OSS[1], ["<|channel|>analysis<|message|>So.<|end|>"]),
        (
            FAMILIES["gpt_oss"],
            LATER,
            [
                "<|channel|>analysis<|message|>a<|end|>",
                "<|start|>assistant<|channel|>analysis<|message|>cd<|end|>",
            ],
        ),
    ],
)
async def test_the_tokens_of_reasoning_are_counted_in_every_dialect(tmp_path, database, family, says, reasoning):
    async with scene(tmp_path, database, says=says, family=family) as stage, stage.client() as client:
        asked: Any = {"model": "m", "messages": [{"role": "user", "content": "weather?"}]}
        chat = await client.chat.completions.create(**asked)
        stream = [chunk async for chunk in await client.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        )]  # fmt: skip
        response = await client.responses.create(model="m", input="weather?")
        again = await client.responses.retrieve(response.id)
        gemini = (await ask_gemini(stage)).json()
        encode = stage.model.tokenizer.encode
        [first, *_] = await stage.calls()
    count = sum(len(encode(text)) for text in reasoning)
    assert chat.usage.completion_tokens_details.reasoning_tokens == count
    assert stream[-1].usage.completion_tokens_details.reasoning_tokens == count
    assert response.usage.output_tokens_details.reasoning_tokens == count
    assert again.usage.output_tokens_details.reasoning_tokens == count
    usage = gemini["usageMetadata"]
    assert usage["thoughtsTokenCount"] == count
    assert usage["candidatesTokenCount"] + count == first.completion_tokens == chat.usage.completion_tokens


async def test_no_number_of_reasoning_is_told_where_letters_end_it(tmp_path, database):
    template = published_template("qwen3")
    async with scene(tmp_path, database, says=SAYS[1], template=template) as stage, stage.client() as client:
        answer = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "weather?"}])
    assert answer.usage.completion_tokens_details is None
