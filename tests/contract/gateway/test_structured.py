"""Structured output and tool choice: a random model behind the gateway answers as the agent's SDK asks."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import anthropic
import openai
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from pydantic import BaseModel, ConfigDict

from leyden.libs.store.database import Database
from leyden.services.gateway.dialects.body import answer_schema
from tests.fakes.chat_model import CHATML_WITH_TOOLS
from tests.fakes.gateway import all_calls, running_gateway, scene
from tests.fakes.tiny_engine import served_engine
from tests.support import builders
from tests.support.tiny_model import make_tiny_model

ASK: list[Any] = [{"role": "user", "content": "Book a trip."}]


class Trip(BaseModel):
    """The object that the agent requests."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Oslo", "Rome"]
    nights: Literal[1, 2, 3]
    is_paid: bool


class Arguments(BaseModel):
    """The arguments of a tool."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Oslo", "Rome"]


BOOK = {"name": "book", "parameters": Arguments.model_json_schema(), "strict": True}
CANCEL = {"name": "cancel", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
TOOLS: list[Any] = [
    {"type": "function", "function": {**CANCEL, "strict": True}},
    {"type": "function", "function": BOOK},
]
STRICT_AND_WRONG = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "objec"}}}
RESPONSES_TOOLS: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]
MESSAGES_TOOLS: list[Any] = [
    {"name": tool["name"], "input_schema": tool["parameters"], "strict": True} for tool in (BOOK, CANCEL)
]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "trip", "schema": Trip.model_json_schema(), "strict": True}}


@asynccontextmanager
async def random_model(folder: Path, database: Database) -> AsyncIterator[tuple[AsyncOpenAI, AsyncAnthropic]]:
    """Clients of a gateway in front of the CPU engine with random weights."""
    created = await builders.add_run(database)
    _, [rollout] = await builders.add_group(database, created, size=1)
    await builders.add_attempt(database, rollout)
    model = make_tiny_model(folder / "model")
    async with served_engine(model, weight_version=f"{created.id}:0") as engine:
        url = str(engine.http.base_url)
        values = {"model_path": model, "database_url": database.dsn, "engine_urls": [url]}
        async with (
            running_gateway(folder, run_id=created.id, **values) as gateway,
            gateway.client(rollout.id) as client,
            gateway.anthropic(rollout.id) as claude,
        ):
            yield client, claude


async def test_every_dialect_answers_in_the_schema(tmp_path: Path, database: Database) -> None:
    async with random_model(tmp_path, database) as (client, claude):
        for seed in (0, 1):
            parsed = await client.chat.completions.parse(
                model="m", messages=ASK, response_format=Trip, seed=seed, max_tokens=300, logprobs=True, top_logprobs=3
            )
            assert isinstance(parsed.choices[0].message.parsed, Trip)
            assert parsed.choices[0].finish_reason == "stop"
        anything = await client.chat.completions.create(
            model="m", messages=ASK, response_format={"type": "json_object"}, seed=1, max_tokens=30
        )
        assert anything.choices[0].message.content.startswith("{")
        response = await client.responses.parse(
            model="m", input="Book a trip.", text_format=Trip, max_output_tokens=300
        )
        assert isinstance(response.output_parsed, Trip)
        message = await claude.messages.parse(model="m", max_tokens=300, messages=ASK, output_format=Trip)
        assert isinstance(message.parsed_output, Trip)
        calls = await all_calls(database)
        assert [call.untrainable_reason for call in calls] == ["sampled with json_schema"] * len(calls)


async def test_streams_answer_in_the_schema(tmp_path: Path, database: Database) -> None:
    async with random_model(tmp_path, database) as (client, claude):
        async with client.chat.completions.stream(
            model="m", messages=ASK, response_format=Trip, max_tokens=300
        ) as stream:
            completion = await stream.get_final_completion()
        assert isinstance(completion.choices[0].message.parsed, Trip)
        async with client.responses.stream(
            model="m", input="Book a trip.", text_format=Trip, max_output_tokens=300
        ) as events:
            response = await events.get_final_response()
        assert isinstance(response.output_parsed, Trip)
        async with claude.messages.stream(model="m", max_tokens=300, messages=ASK, output_format=Trip) as blocks:
            message = await blocks.get_final_message()
        assert isinstance(message.parsed_output, Trip)


async def test_a_required_tool_is_called(tmp_path: Path, database: Database) -> None:
    async with random_model(tmp_path, database) as (client, _):
        create = client.chat.completions.create
        common: dict[str, Any] = {"model": "m", "messages": ASK, "tools": TOOLS, "max_tokens": 400}
        only_book = {"type": "function", "function": {"name": "book"}}
        allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [only_book]}}
        for choice, names in (
            ("required", {"book", "cancel"}),
            ("any", {"book", "cancel"}),
            (only_book, {"book"}),
            (allowed, {"book"}),
        ):
            answer = await create(**common, tool_choice=choice, n=4, parallel_tool_calls=False)
            for one in answer.choices:
                [call] = one.message.tool_calls
                assert one.finish_reason == "tool_calls"
                assert call.function.name in names
                if call.function.name == "book":
                    Arguments.model_validate_json(call.function.arguments)
        several = await create(**common, tool_choice="required", n=8)
        assert max(len(one.message.tool_calls) for one in several.choices) > 1
        assert {call.untrainable_reason for call in await all_calls(database)} == {"sampled with tool_choice"}


async def test_a_required_tool_is_called_in_the_other_dialects(tmp_path: Path, database: Database) -> None:
    async with random_model(tmp_path, database) as (client, claude):
        responses, messages = client.responses, claude.messages
        allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "book"}]}
        for choice in ({"type": "function", "name": "book"}, allowed, "required"):
            response = await responses.create(
                model="m", input="Go.", tools=RESPONSES_TOOLS, tool_choice=choice, max_output_tokens=2000
            )
            names = {item.name for item in response.output}
            assert names == {"book"} if choice != "required" else names <= {"book", "cancel"}
        for chosen in ({"type": "tool", "name": "book"}, {"type": "any"}):
            message = await messages.create(
                model="m", max_tokens=2000, messages=ASK, tools=MESSAGES_TOOLS, tool_choice=chosen
            )
            assert message.stop_reason == "tool_use"
            assert {block.type for block in message.content} == {"tool_use"}
            async with messages.stream(
                model="m", max_tokens=2000, messages=ASK, tools=MESSAGES_TOOLS, tool_choice=chosen
            ) as stream:
                assert (await stream.get_final_message()).stop_reason == "tool_use"


async def test_tools_and_a_schema_give_calls_or_an_answer(tmp_path: Path, database: Database) -> None:
    async with random_model(tmp_path, database) as (client, _):
        answer = await client.chat.completions.create(
            model="m", messages=ASK, tools=TOOLS, response_format=SCHEMA, n=8, max_tokens=2000, seed=0
        )
        kinds = set()
        for one in answer.choices:
            if not one.message.tool_calls:
                Trip.model_validate_json(one.message.content)
            kinds.add(bool(one.message.tool_calls))
        assert kinds == {True, False}


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "unsupported_parameter"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema.schema",
            "missing_required_parameter",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "objec"}}}},
            "response_format.json_schema.schema",
            "invalid_value",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "http://localhost/x"}}}},
            "response_format.json_schema.schema",
            "invalid_value",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 200_000]}}}},
            "response_format.json_schema.schema",
            "invalid_value",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$schema": "http://localhost/x"}}}},
            "response_format.json_schema.schema",
            "invalid_value",
        ),
        (
            {"tool_choice": "required", "tools": [STRICT_AND_WRONG]},
            "tools[0].parameters",
            "invalid_value",
        ),
        (
            {"response_format": SCHEMA, "tools": [STRICT_AND_WRONG]},
            "tools[0].parameters",
            "invalid_value",
        ),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "fly"}}, "tools": TOOLS},
            "tool_choice",
            "invalid_value",
        ),
    ],
)
async def test_a_wrong_format_or_choice_is_a_400_that_names_it(
    tmp_path: Path, database: Database, fields: dict[str, Any], param: str, code: str
) -> None:
    async with scene(tmp_path, database) as stage, stage.client() as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="m", messages=ASK, **fields)
        assert (refused.value.param, refused.value.code) == (param, code)
        assert not await stage.calls()


async def test_a_schema_of_patterns_that_compile_for_minutes_is_checked_at_once() -> None:
    patterns = {f"p{number}": {"type": "string", "pattern": f"\\p{{L}}{{100}}{number}"} for number in range(2000)}
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", "properties": patterns}
    assert answer_schema("json_schema", schema, param="text.format", place="text.format.schema") == schema


async def test_the_other_dialects_name_a_wrong_schema(tmp_path: Path, database: Database) -> None:
    async with scene(tmp_path, database) as stage, stage.client() as client, stage.anthropic() as claude:
        wrong = {"type": "json_schema", "name": "a", "schema": {"type": "objec"}}
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model="m", input="Go.", text={"format": wrong})
        assert refused.value.param == "text.format.schema"
        with pytest.raises(
            anthropic.BadRequestError, match=r"output_config\.format\.schema is not a valid JSON Schema"
        ):
            await claude.messages.create(model="m", max_tokens=9, messages=ASK, output_config={"format": wrong})


async def test_sglang_gets_the_schema_or_a_structural_tag(tmp_path: Path, database: Database) -> None:
    call = '<tool_call>\n{"name": "book", "arguments": {"city": "Oslo"}}\n</tool_call>'
    async with scene(tmp_path, database, says=["{}", call]) as stage, stage.client() as client:
        create = client.chat.completions.create
        await create(model="m", messages=ASK, response_format=SCHEMA)
        named = {"type": "function", "function": {"name": "book"}}
        await create(model="m", messages=ASK, tools=TOOLS, tool_choice=named)
        with_schema, with_tag = (body["sampling_params"] for body in stage.engine.requests)
        assert json.loads(with_schema["json_schema"]) == Trip.model_json_schema()
        form = json.loads(with_tag["structural_tag"])["format"]
        [tag] = form["tags"]
        assert call.startswith(tag["begin"]) and call.endswith(tag["end"])
        assert tag["content"] == {"type": "json_schema", "json_schema": BOOK["parameters"]}


@pytest.mark.parametrize(
    ("choice", "recorded"),
    [
        ("leave_out", (False, "sampled with json_schema", False)),
        ("mask", (True, None, True)),
        ("train", (True, None, False)),
    ],
)
async def test_the_run_chooses_whether_constrained_calls_train(
    tmp_path: Path, database: Database, choice: str, recorded: tuple[bool, str | None, bool]
) -> None:
    document = builders.run_document(training={"constrained_calls": choice})
    async with scene(tmp_path, database, run=document) as stage, stage.client() as client:
        await client.chat.completions.create(model="m", messages=ASK, response_format={"type": "json_object"})
        await client.chat.completions.create(model="m", messages=ASK)
        constrained, free = await stage.calls()
    assert (constrained.trainable, constrained.untrainable_reason, constrained.masks_forced) == recorded
    assert (free.trainable, free.untrainable_reason, free.masks_forced) == (True, None, False)


async def test_a_family_whose_calls_have_no_grammar_refuses_a_required_call(tmp_path: Path, database: Database) -> None:
    template = CHATML_WITH_TOOLS.replace("<tool_call>", "<|tool_call|>")
    async with scene(tmp_path, database, says="{}", template=template) as stage, stage.client() as client:
        create = client.chat.completions.create
        for fields, param in (({"tool_choice": "required"}, "tool_choice"), ({"response_format": SCHEMA}, "tools")):
            with pytest.raises(openai.BadRequestError, match="phi4") as refused:
                await create(model="m", messages=ASK, tools=TOOLS, **fields)
            assert refused.value.param == param
        await create(model="m", messages=ASK, tools=TOOLS)
        await create(model="m", messages=ASK, response_format=SCHEMA)
        assert ["json_schema" in body["sampling_params"] for body in stage.engine.requests] == [False, True]
        assert len(await stage.calls()) == 2
