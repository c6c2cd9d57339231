"""Reasoning reaches the agent apart from the content, and prompts keep its sampled tokens where the template does."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.responses import Response

from tests.contract.gateway.test_turns import SAMPLED_CALL, TOOLS, begins_with, tokens_of
from tests.fakes.gateway import scene
from tests.fakes.model_families import published_template

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
