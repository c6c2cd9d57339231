"""OpenAI's Responses API with the official client: typed bodies and events, tool calls, state, retries, refusals."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import httpx
import openai
import orjson
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from sqlalchemy import text

from leyden.libs.store.records.agent_objects import AttemptOfRun, add_objects, owned_objects
from tests.contract.gateway.test_turns import SAMPLED_CALL, begins_with, forks, ids
from tests.fakes.chat_model import CHATML_WITH_TOOLS
from tests.fakes.gateway import Scene, scene
from tests.support.waiting import eventually

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: Any = [{"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}]
TWO_CALLS = f"Let me see.\n{SAMPLED_CALL}\n{SAMPLED_CALL.replace('Paris', 'Rome')}"
EVENTS: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)


def strictly(response: Response) -> Response:
    """The body as the client's types have it, each field of the declared type."""
    document = response.model_dump_json(by_alias=True)
    return Response.model_validate_json(document, strict=True)


@asynccontextmanager
async def http_of(stage: Scene, sibling: int = 0) -> AsyncIterator[httpx.AsyncClient]:
    rollout = stage.rollout_id.removesuffix(".0") + f".{sibling}"
    headers = {"authorization": f"Bearer {stage.gateway.key(rollout)}"}
    url = stage.gateway.base_url(rollout)
    async with httpx.AsyncClient(base_url=url, headers=headers, trust_env=False, timeout=20) as http:
        yield http


def parsed(stream: str) -> list[Any]:
    """The events of a stream, each as the client's type for its name, in strict mode."""
    found = []
    for block in stream.split("\n\n"):
        if block and not block.startswith(":"):
            name, data = block.split("\n")
            event: Any = EVENTS.validate_json(data.removeprefix("data: "), strict=True)
            assert name == f"event: {event.type}" and type(event).__name__ != "BaseModel"
            found.append(event)
    assert [event.sequence_number for event in found] == list(range(len(found)))
    return found


PATCH = "*** Begin Patch\n*** End Patch"
CODEX_TOOLS: Any = [
    {"type": "function", "name": "shell", "strict": False, "parameters": PARAMETERS},
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Edits files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: begin end"},
    },
    {
        "type": "namespace",
        "name": "mcp__crm__",
        "description": "Customers.",
        "tools": [
            {"type": "function", "name": "lookup", "strict": False, "parameters": PARAMETERS},
            {"type": "custom", "name": "note"},
        ],
    },
    {"type": "tool_search", "execution": "client", "description": "Finds tools.", "parameters": PARAMETERS},
    {"type": "web_search", "external_web_access": False},
]
"""Tools as the Codex CLI sends them."""


def codex_calls(*calls: tuple[str, dict[str, str]]) -> str:
    documents = (orjson.dumps({"name": name, "arguments": arguments}).decode() for name, arguments in calls)
    return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in documents)


async def test_tools_among_the_items_are_tools_of_the_request(tmp_path, database):
    """The Codex CLI sends its tools so, to models whose names it knows."""
    items: Any = [
        {"type": "additional_tools", "role": "developer", "tools": CODEX_TOOLS},
        {"type": "message", "role": "user", "content": "Patch it."},
    ]
    said = codex_calls(("apply_patch", {"input": PATCH}))
    async with scene(tmp_path, database, says=said, template=CHATML_WITH_TOOLS) as stage, stage.client() as client:
        answer = await client.responses.create(model="m", input=items)
        [call] = await stage.calls()
    assert (answer.output[0].type, len(call.turns), len(call.tools or ())) == ("custom_tool_call", 1, 4)


@pytest.mark.parametrize("streams", [True, False])
async def test_custom_tools_and_namespaces_are_functions_of_the_model(tmp_path, database, streams):
    said = codex_calls(
        ("apply_patch", {"input": PATCH}), ("mcp__crm__lookup", {"city": "Rome"}), ("mcp__crm__note", {"input": "hi"})
    )
    codex: Any = {
        **{"model": "m", "instructions": "You code.", "tools": CODEX_TOOLS, "tool_choice": "auto", "store": False},
        **{"include": ["reasoning.encrypted_content"], "prompt_cache_key": "t", "parallel_tool_calls": True},
        **{"reasoning": {"effort": "medium", "summary": "auto"}, "text": {"verbosity": "low"}, "stream": streams},
        "client_metadata": {"x-codex-installation-id": "i"},
    }
    asked: Any = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Patch it."}]}]
    async with scene(tmp_path, database, says=[said, "Done."], template=CHATML_WITH_TOOLS) as stage:
        async with http_of(stage) as http:
            body = (await http.post("/responses", json=codex | {"input": asked})).text
            items = [one.item for one in parsed(body) if one.type == "response.output_item.done"] if streams else []
            patch, lookup, note = items or strictly(Response.model_validate_json(body)).output
            echoed = [one.model_dump(exclude_none=True) for one in (patch, lookup, note)]
            results = [
                {"type": "custom_tool_call_output", "call_id": patch.call_id, "output": "Patched."},
                {"type": "function_call_output", "call_id": lookup.call_id, "output": "Found."},
                {"type": "custom_tool_call_output", "call_id": note.call_id, "output": "Noted."},
            ]
            second = await http.post("/responses", json=codex | {"input": [*asked, *echoed, *results]})
            assert second.status_code == 200, second.text
        calls = await stage.calls()
    assert (patch.type, patch.name, patch.input) == ("custom_tool_call", "apply_patch", PATCH)
    assert (lookup.type, lookup.namespace, lookup.name) == ("function_call", "mcp__crm__", "lookup")
    assert (note.type, note.namespace, note.name, note.input) == ("custom_tool_call", "mcp__crm__", "note", "hi")
    if streams:
        inputs = [one.input for one in parsed(body) if one.type == "response.custom_tool_call_input.done"]
        assert inputs == [PATCH, "hi"]
    offered = [tool["function"]["name"] for tool in calls[0].tools or ()]
    assert offered == ["shell", "apply_patch", "mcp__crm__lookup", "mcp__crm__note"]
    assert calls[0].request["hosted_tools"] == ["tool_search", "web_search"]
    assert begins_with(calls[1], calls[0])
    assert [call.trainable for call in calls] == [True, True]


async def test_the_tokens_of_a_prompt_are_counted_without_a_call(tmp_path, database):
    async with scene(tmp_path, database, template=CHATML_WITH_TOOLS) as stage, stage.client() as client:
        first = await client.responses.create(model="m", input="weather?", tools=TOOLS)
        more: Any = {"model": "m", "input": "and?", "tools": TOOLS, "previous_response_id": first.id}
        counted = await client.responses.input_tokens.count(**more)
        second = await client.responses.create(**more)
        assert len(await stage.calls()) == 2
    assert second.usage is not None
    assert counted.input_tokens == second.usage.input_tokens


async def test_a_text_is_answered_with_a_typed_response_and_recorded(tmp_path, database):
    async with scene(tmp_path, database) as stage, stage.client() as client:
        answer = await client.responses.create(
            model="any-name",
            input="hi",
            instructions="Be brief.",
            metadata={"a": "b"},
            max_output_tokens=50,
            reasoning={"effort": "none"},
            text={"verbosity": "low"},
            include=[],
        )
        [call] = await stage.calls()
    assert strictly(answer).output_text == answer.output_text == "Hello."
    assert (answer.model, answer.metadata, answer.status) == ("any-name", {"a": "b"}, "completed")
    assert (answer.id, answer.output[0].id) == (f"resp_{call.request_id}", f"msg_{call.id}")
    assert answer.usage and answer.usage.output_tokens == call.completion_tokens
    assert (call.dialect, call.trainable) == ("responses", True)
    assert call.turns == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert stage.engine.requests[0]["sampling_params"]["max_new_tokens"] == 50


async def test_a_cut_answer_is_incomplete(tmp_path, database):
    async with scene(tmp_path, database) as stage, stage.client() as client:
        answer = await client.responses.create(model="m", input="hi", max_output_tokens=1)
        stream = await client.responses.create(model="m", input="hi", max_output_tokens=1, stream=True)
        *_, last = [event async for event in stream]
    assert strictly(answer).status == "incomplete"
    assert answer.incomplete_details and answer.incomplete_details.reason == "max_output_tokens"
    assert last.type == "response.incomplete"


async def test_log_probabilities_come_where_the_agent_includes_them(tmp_path, database):
    async with scene(tmp_path, database) as stage, stage.client() as client:
        include: Any = ["message.output_text.logprobs"]
        answer = await client.responses.create(model="m", input="hi", include=include, top_logprobs=1)
        message: Any = strictly(answer).output[0]
        assert (await client.responses.create(model="m", input="hi")).output[0].content[0].logprobs == []  # type: ignore[union-attr, index]
    assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 1 for entry in message.content[0].logprobs)


@pytest.mark.parametrize("stateful", [True, False])
async def test_parallel_tool_calls_and_three_turns_extend_the_sampled_tokens(tmp_path, database, stateful):
    says = [TWO_CALLS, "Rain.", "Bye."]
    before = forks()
    async with scene(tmp_path, database, says=says, template=CHATML_WITH_TOOLS) as stage, stage.client() as client:
        history: list[Any] = []
        new: list[Any] = [{"role": "user", "content": "weather?"}]
        previous: Any = openai.omit
        for _ in range(3):
            history += new
            answer = await client.responses.create(
                model="m",
                input=new if stateful else history,
                previous_response_id=previous,
                tools=TOOLS,
                instructions="Help.",
                store=stateful,
            )
            strictly(answer)
            calls = [item for item in answer.output if item.type == "function_call"]
            history += [item.model_dump(exclude_none=True) for item in answer.output]
            new = [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"} for call in calls]
            new = new or [{"role": "user", "content": [{"type": "input_text", "text": "and?"}]}]
            if stateful:
                previous = answer.id
            if calls:
                assert [item.type for item in answer.output] == ["message", "function_call", "function_call"]
                assert calls[0].arguments == '{"city":  "Paris"}' and calls[0].call_id != calls[1].call_id
        rows = await stage.calls()
    assert len(rows) == 3 and all(begins_with(later, earlier) for earlier, later in pairwise(rows))
    assert [row.parent_call_id for row in rows] == [None, rows[0].id, rows[1].id]
    assert [turn["role"] for turn in rows[2].turns] == [
        "system", "user", "assistant", "tool", "tool", "assistant", "user"
    ]  # fmt: skip
    assert forks() == before


async def test_results_between_parallel_calls_are_read_as_one_answer(tmp_path, database):
    async with (
        scene(tmp_path, database, says=[TWO_CALLS, "Rain."], template=CHATML_WITH_TOOLS) as stage,
        stage.client() as client,
    ):
        answer = await client.responses.create(model="m", input="weather?", tools=TOOLS)
        message, first, second = (item.model_dump(exclude_none=True) for item in answer.output)
        results = [
            {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"} for call in (first, second)
        ]
        again: Any = [{"role": "user", "content": "weather?"}, message, first, results[0], second, results[1]]
        await client.responses.create(model="m", input=again, tools=TOOLS)
        earlier, later = await stage.calls()
    assert begins_with(later, earlier)


async def test_an_item_reference_stands_for_the_stored_text(tmp_path, database):
    async with scene(tmp_path, database, says=["Hello.", "Bye."]) as stage, stage.client() as client:
        answer = await client.responses.create(model="m", input="hi")
        reference: Any = {"type": "item_reference", "id": answer.output[0].id}
        question: Any = {"role": "user", "content": "hi"}
        await client.responses.create(model="m", input=[question, reference, question])
        earlier, later = await stage.calls()
    assert begins_with(later, earlier) and later.turns[1]["content"] == "Hello."


async def test_a_stream_has_every_event_in_order_and_the_text_of_the_body(tmp_path, database):
    async with (
        scene(tmp_path, database, says=TWO_CALLS, template=CHATML_WITH_TOOLS, engine={"pace_seconds": 0.002}) as stage,
        http_of(stage) as http,
    ):
        body = {"model": "m", "input": "hi", "tools": TOOLS, "stream": True}
        events = parsed((await http.post("/responses", json=body)).text)
    kinds = [event.type.removeprefix("response.") for event in events]
    text = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(text) == "Let me see." and len(text) > 1
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert [kind for kind in kinds if kind != "output_text.delta"] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.done", "content_part.done",
        "output_item.done", *call, *call, "completed",
    ]  # fmt: skip
    items = [event.item for event in events if event.type == "response.output_item.done"]
    assert events[-1].response.output == items
    assert [event.output_index for event in events if event.type == "response.output_item.added"] == [0, 1, 2]


async def test_the_clients_own_stream_reader_builds_the_response(tmp_path, database):
    async with (
        scene(tmp_path, database) as stage,
        stage.client() as client,
        client.responses.stream(model="m", input="hi") as stream,
    ):
        assert [event async for event in stream][-1].type == "response.completed"
        final = await stream.get_final_response()
    assert final.output_text == "Hello."


async def test_a_stream_that_fails_later_ends_with_a_failed_response(tmp_path, database):
    says = "a long answer that is cut"

    def pace(tokens: int) -> None:
        if tokens == 3:
            stage.engine.refuses = (503, {"error": {"message": "gone"}})

    async with (
        scene(tmp_path, database, says=says, engine={"dies_after": 3, "pace": pace}, hold_seconds=0.5) as stage,
        http_of(stage) as http,
        http.stream("POST", "/responses", json={"model": "m", "input": "hi", "stream": True}) as answer,
    ):
        text = "".join([piece async for piece in answer.aiter_text()])
        events = parsed(text)
        [call] = await stage.calls()
    assert "output_text.delta" in text
    assert (events[-1].type, events[-1].response.status) == ("response.failed", "failed")
    assert events[-1].response.error.code == "server_error"
    assert not [event for event in events if event.type in {"response.completed", "response.output_item.done"}]
    assert call.status == "failed"


async def test_a_stream_whose_client_hangs_up_is_aborted_at_the_engine(tmp_path, database):
    says = "a long answer that nobody waits for"

    async def pace(tokens: int) -> None:
        while tokens >= 3 and not stage.engine.aborted:
            await asyncio.sleep(0.01)

    async with scene(
        tmp_path, database, says=says, engine={"pace": pace}, abandoned_seconds=0
    ) as stage, stage.client() as client:  # fmt: skip
        async with await client.responses.create(model="m", input="hi", stream=True) as stream:
            async for event in stream:
                if event.type == "response.output_text.delta":
                    break
        while not (calls := await stage.calls()):
            await asyncio.sleep(0.02)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(f"resp_{calls[0].id}")
    assert calls[0].status == "aborted" and len(stage.engine.aborted) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_retry_after_a_lost_answer_gets_the_same_one(tmp_path, database, stream):
    body = {"model": "m", "input": "hi", "stream": stream}

    async def pace(tokens: int) -> None:
        # The first answer goes on until it is given up, and the next one for a while.
        if tokens == 0 and stage.engine.aborted:
            await asyncio.sleep(0.3)
        while not stage.engine.aborted:
            await asyncio.sleep(0.01)

    async with scene(tmp_path, database, engine={"pace": pace}, abandoned_seconds=0) as stage, http_of(stage) as http:
        lost = asyncio.create_task(http.post("/responses", json=body))
        await eventually(lambda: len(stage.engine.requests) == 1)
        lost.cancel()
        await eventually(lambda: stage.engine.aborted)
        first = asyncio.create_task(http.post("/responses", json=body))
        await eventually(lambda: len(stage.engine.requests) == 2)
        again = [await http.post("/responses", json=body, headers={"x-stainless-retry-count": n}) for n in ("1", "2")]
        answers = [(await first).text, *(answer.text for answer in again)]
        completed = [call for call in await stage.calls() if call.status == "completed"]
    assert len(completed) == 1
    assert len({parsed(text)[-1].response.model_dump_json() if stream else text for text in answers}) == 1


async def test_a_stored_response_and_its_input_are_read_back(tmp_path, database):
    says = [TWO_CALLS, "Rain."]
    async with scene(tmp_path, database, says=says, template=CHATML_WITH_TOOLS) as stage, stage.client() as client:
        first = await client.responses.create(model="m", input="weather?", tools=TOOLS, instructions="Help.")
        results: Any = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "rain"}
            for item in first.output
            if item.type == "function_call"
        ]
        second = await client.responses.create(model="m", input=results, previous_response_id=first.id, tools=TOOLS)
        for answer in (first, second):
            assert (await client.responses.retrieve(answer.id)).model_dump() == answer.model_dump()
        items = [item async for item in client.responses.input_items.list(second.id, order="asc", limit=2)]
        with pytest.raises(openai.BadRequestError, match="Only background"):
            await client.responses.cancel(second.id)
    assert [item.type for item in items] == [
        "message", "message", "function_call", "function_call", "function_call_output", "function_call_output"
    ]  # fmt: skip
    assert len({item.id for item in items}) == 6


async def test_another_attempts_response_and_one_not_stored_are_unknown(tmp_path, database):
    async with scene(tmp_path, database) as stage, stage.client() as client, http_of(stage, 1) as other:
        answer = await client.responses.create(model="m", input="hi")
        unstored = await client.responses.create(model="m", input="hi", store=False)
        path = f"/responses/{answer.id}"
        body = {"model": "m", "input": "hi"}
        reference = [{"type": "item_reference", "id": answer.output[0].id}]
        for refused in (
            await other.get(path),
            await other.get(f"{path}/input_items"),
            await other.post("/responses", json=body | {"previous_response_id": answer.id}),
            await other.post("/responses", json=body | {"input": reference}),
        ):
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_found"), refused.text
        async with http_of(stage) as http:
            for name in (unstored.id, "resp_x", "chatcmpl-1", "resp_c" + 24 * "0"):
                refused = await http.post("/responses", json=body | {"previous_response_id": name})
                assert (refused.status_code, refused.json()["error"]["param"]) == (404, "previous_response_id")
        assert len(await stage.calls()) == 2


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"tools": [{"type": "computer_use_preview"}]}, "tools.0.type", "unsupported_tool"),
        ({"tools": [{"type": "function"}]}, "tools.0.name", "missing_required_parameter"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format", "unsupported_parameter"),
        ({"background": True}, "background", "unsupported_parameter"),
        ({"previous_response_id": "a", "conversation": "b"}, "previous_response_id", "invalid_value"),
        ({"messages": []}, "messages", "unsupported_parameter"),
        ({"input": None}, "input", "missing_required_parameter"),
        ({"input": 5}, "input", "invalid_value"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input.0.role", "invalid_value"),
        ({"input": [{"role": "user"}]}, "input.0.content", "missing_required_parameter"),
        ({"input": [{"type": "computer_call"}]}, "input.0.type", "unsupported_item"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input.0.content",
            "unsupported_content",
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "x", "output": ""}]},
            "input.0.call_id",
            "invalid_value",
        ),
        ({"metadata": {"a": 1}}, "metadata.a", "invalid_value"),
        ({"conversation": "a\0"}, "conversation", "invalid_value"),
        ({"input": [{"role": "user", "content": "hi", "id": "\0"}]}, "input", "invalid_value"),
        ({"input": [{"role": "user", "content": "hi", "id": "i" * 257}]}, "input", "invalid_value"),
    ],
)
async def test_what_cannot_be_served_is_refused_by_name_and_not_recorded(tmp_path, database, change, param, code):
    async with scene(tmp_path, database) as stage, http_of(stage) as http:
        answer = await http.post("/responses", json={"model": "m", "input": "hi"} | change)
        assert answer.status_code == 400, answer.text
        assert (answer.json()["error"]["param"], answer.json()["error"]["code"]) == (param, code)
        assert not await stage.calls()


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"model": "m", "input": "\\ud800"}', b'{"a":' * 70 + b"1" + b"}" * 70])
async def test_a_body_that_is_no_request_is_refused(tmp_path, database, body):
    async with scene(tmp_path, database) as stage, http_of(stage) as http:
        answer = await http.post("/responses", content=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
        assert not await stage.calls()


async def test_explicit_nulls_and_fields_without_effect_are_accepted_and_recorded(tmp_path, database):
    nulls = dict.fromkeys(("instructions", "previous_response_id", "tools", "text", "reasoning", "max_output_tokens"))
    sent = {"service_tier": "auto", "prompt_cache_key": "k", "truncation": "auto", "max_tool_calls": 3}
    async with scene(tmp_path, database) as stage, http_of(stage) as http:
        answer = await http.post("/responses/", json={"model": "m", "input": "hi"} | nulls | sent)
        Response.model_validate_json(orjson.dumps(answer.json()), strict=True)
        [call] = await stage.calls()
    assert call.request == {"model": "m"} | {name: value for name, value in nulls.items() if name != "tools"} | sent
    assert ids(call.sampled_ids)


async def test_a_deleted_response_is_unknown_and_its_call_stays(tmp_path, database):
    async with scene(tmp_path, database) as stage, stage.client() as client:
        answer = await client.responses.create(model="m", input="hi")
        await client.responses.delete(answer.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(answer.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(model="m", input="hi", previous_response_id=answer.id)
        assert [call.status for call in await stage.calls()] == ["completed"]


async def test_a_conversation_gathers_the_items_and_its_prompts_extend_the_tokens(tmp_path, database):
    says = [TWO_CALLS, "Rain.", "Bye."]
    async with scene(tmp_path, database, says=says, template=CHATML_WITH_TOOLS) as stage, stage.client() as client:
        opening: Any = [{"type": "message", "role": "developer", "content": "Help."}]
        talk = await client.conversations.create(items=opening, metadata={"a": "b"})
        first = await client.responses.create(model="m", input="weather?", tools=TOOLS, conversation=talk.id)
        results: Any = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "rain"}
            for item in first.output
            if item.type == "function_call"
        ]
        await client.responses.create(model="m", input=results, tools=TOOLS, conversation=talk.id)
        last = await client.responses.create(model="m", input="and?", tools=TOOLS, conversation={"id": talk.id})
        items = [item async for item in client.conversations.items.list(talk.id, order="asc", limit=3)]
        rows = await stage.calls()
        assert (await client.conversations.retrieve(talk.id)).metadata == {"a": "b"}
        again = await client.conversations.items.retrieve(items[2].id or "", conversation_id=talk.id)
    assert strictly(last).conversation and last.conversation.id == talk.id
    assert [item.type for item in items] == [
        *("message", "message", "message", "function_call", "function_call"),
        *("function_call_output", "function_call_output", "message", "message", "message"),
    ]
    assert [item.id for item in items[2:5]] == [item.id for item in first.output] and again == items[2]
    assert all(begins_with(later, earlier) for earlier, later in pairwise(rows))


async def test_a_repeated_turn_is_once_in_its_conversation(tmp_path, database):
    async with scene(tmp_path, database) as stage, stage.client() as client, http_of(stage) as http:
        talk = await client.conversations.create()
        headers = {"idempotency-key": "k"}
        body = {"model": "m", "input": "hi", "conversation": talk.id}
        first, again = [await http.post("/responses", json=body, headers=headers) for _ in range(2)]
        assert first.json() == again.json()
        more = {"items": [{"role": "user", "content": "?"}]}
        for count in ("0", "1", "0"):
            added = await http.post(
                f"/conversations/{talk.id}/items", json=more, headers={"x-stainless-retry-count": count}
            )
            assert added.status_code == 200
        items = [item async for item in client.conversations.items.list(talk.id, order="asc")]
        assert len(await stage.calls()) == 1
    assert len(items) == 4


async def test_items_of_a_gateway_whose_clock_is_behind_come_after_those_before_them(database, monkeypatch):
    attempt = AttemptOfRun("run-a", "run-a.0.0", 1)
    clocks = {"turn 1": 10**18 + 5 * 10**9, "turn 2": 10**18}
    for turn, now in clocks.items():
        monkeypatch.setattr(time, "time_ns", lambda now=now: now)
        documents: Any = {f"{turn}, {role}": {"role": role} for role in ("user", "assistant")}
        async with database.session() as session:
            await add_objects(session, attempt, "talk", documents)
    monkeypatch.undo()
    async with database.read() as session:
        found = await owned_objects(session, attempt, "talk")
    assert list(found) == ["turn 1, user", "turn 1, assistant", "turn 2, user", "turn 2, assistant"]


async def test_items_of_two_requests_that_end_at_once_stay_together(database):
    attempt = AttemptOfRun("run-a", "run-a.0.0", 1)
    async with database.session() as session:
        await add_objects(session, attempt, "talk", {"talk": {}})

    async def add(turn: str) -> None:
        async with database.session() as session:
            await add_objects(session, attempt, "talk", {f"{turn}, {role}": {} for role in ("user", "assistant")})

    async def is_blocked() -> bool:
        waiting = (
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        )
        async with database.read() as reader:
            return bool(await reader.scalar(text(waiting)))

    async with database.session() as session:
        await add_objects(session, attempt, "talk", {f"1, {role}": {} for role in ("user", "assistant")})
        second = asyncio.create_task(add("2"))
        await eventually(is_blocked)
    await second
    async with database.read() as session:
        found = await owned_objects(session, attempt, "talk")
    assert list(found) == ["talk", "1, user", "1, assistant", "2, user", "2, assistant"]


async def test_items_with_an_id_of_the_agents_own_are_all_stored(tmp_path, database):
    async with scene(tmp_path, database) as stage, stage.client() as client:
        talk = await client.conversations.create()
        for text in ("one", "two"):
            said: Any = [{"type": "message", "role": "user", "content": text, "id": "user"}]
            await client.responses.create(model="m", input=said, conversation=talk.id)
        calls = await stage.calls()
        assert [turn["content"] for turn in calls[1].turns] == ["one", "Hello.", "two"]
        assert begins_with(calls[1], calls[0])


async def test_ids_and_limits_that_nothing_has_are_refused(tmp_path, database):
    async with scene(tmp_path, database) as stage, http_of(stage) as http:
        for path in ("/conversations/%00", f"/conversations/{'c' * 3000}", "/responses/%00"):
            assert (await http.get(path)).status_code == 404
        talk = (await http.post("/conversations", json={})).json()["id"]
        for limit in ("0", "101", "0000000019999", "1" + "9" * 4400):
            answer = await http.get(f"/conversations/{talk}/items", params={"limit": limit})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "limit")


async def test_items_and_conversations_are_deleted(tmp_path, database):
    async with scene(tmp_path, database) as stage, stage.client() as client:
        opening: Any = [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]
        talk = await client.conversations.create(items=opening)
        await client.conversations.update(talk.id, metadata={"c": "d"})
        items = [item async for item in client.conversations.items.list(talk.id)]
        after = await client.conversations.items.delete(items[0].id or "", conversation_id=talk.id)
        assert after.metadata == {"c": "d"}
        await client.responses.create(model="m", input="three", conversation=talk.id)
        [call] = await stage.calls()
        assert [turn["content"] for turn in call.turns] == ["one", "three"]
        assert (await client.conversations.delete(talk.id)).deleted
        for refused in (
            client.conversations.retrieve(talk.id),
            client.responses.create(model="m", input="hi", conversation=talk.id),
            client.conversations.items.create(talk.id, items=opening),
        ):
            with pytest.raises(openai.NotFoundError):
                await refused


async def test_another_attempts_conversation_is_unknown(tmp_path, database):
    async with scene(tmp_path, database) as stage, stage.client() as client, http_of(stage, 1) as other:
        talk = await client.conversations.create(items=[{"role": "user", "content": "secret"}])
        path = f"/conversations/{talk.id}"
        [item] = (await client.conversations.items.list(talk.id)).data
        for refused in (
            await other.get(path),
            await other.get(f"{path}/items"),
            await other.get(f"{path}/items/{item.id}"),
            await other.delete(path),
            await other.post("/responses", json={"model": "m", "input": "hi", "conversation": talk.id}),
            await other.post("/responses", json={"model": "m", "input": [{"id": item.id}]}),
        ):
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_found"), refused.text
        assert not await stage.calls()
