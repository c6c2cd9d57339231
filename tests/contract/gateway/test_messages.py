"""The Anthropic client against the gateway: answers, streams, tools, thinking, errors, retries, and the record."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message, RawMessageStreamEvent

from leyden.libs.contracts.capability import Scope
from tests.contract.gateway.test_turns import begins_with, forks, ids
from tests.fakes.chat_model import CHATML_WITH_TOOLS
from tests.fakes.gateway import Scene, scene
from tests.support.waiting import eventually

HI: list[Any] = [{"role": "user", "content": "hi"}]
TOOLS: Any = [
    {
        "name": "weather",
        "description": "Weather in a city",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
        "cache_control": {"type": "ephemeral"},
    }
]
THINKING: Any = {"type": "enabled", "budget_tokens": 1024}


def call_text(*cities: str) -> str:
    calls = [f'<tool_call>\n{{"name": "weather", "arguments": {{"city":  "{city}"}}}}\n</tool_call>' for city in cities]
    return "\n".join(calls)


async def create(client: anthropic.AsyncAnthropic, **parameters: Any) -> Message:
    """One message, from a body and, where `stream` is true, from the SDK's own accumulated events."""
    asked: Any = {"model": "claude-any", "max_tokens": 200, "messages": HI, **parameters}
    if not asked.pop("stream", False):
        message = await client.messages.create(**asked)
    else:
        async with client.messages.stream(**asked) as stream:
            message = await stream.get_final_message()
    # Strict: the official types, with nothing coerced.
    Message.model_validate(message.model_dump(), strict=True)
    return message


async def raw_events(client: anthropic.AsyncAnthropic, **parameters: Any) -> list[RawMessageStreamEvent]:
    asked: Any = {"model": "claude-any", "max_tokens": 200, "messages": HI, **parameters}
    return [event async for event in await client.messages.create(**asked, stream=True)]


def kinds(events: list[RawMessageStreamEvent]) -> list[str]:
    """The sequence of events, equal neighbours once."""
    named = [
        f"{event.type}:{event.delta.type}" if event.type == "content_block_delta" else event.type for event in events
    ]
    return [kind for place, kind in enumerate(named) if place == 0 or kind != named[place - 1]]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_has_the_sampled_text_and_its_record_every_token(tmp_path, database, stream):
    async with scene(tmp_path, database, says="Héllo 😀.") as stage, stage.anthropic() as client:
        message = await create(client, system="Be brief.", metadata={"user_id": "u"}, stream=stream)
        (call,) = await stage.calls()
        (asked,) = stage.engine.requests
        prompt = stage.model.tokenizer.encode(
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        ).tolist()
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "Héllo 😀."}]
    assert (message.id, message.model, message.role) == (f"msg_{call.id}", "claude-any", "assistant")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert (message.usage.input_tokens, message.usage.output_tokens) == (len(prompt), call.completion_tokens)
    assert asked["input_ids"] == prompt
    assert (call.dialect, call.status, call.trainable) == ("messages", "completed", True)
    assert call.turns == [{"role": "system", "content": "Be brief."}, *HI]
    assert call.request["metadata"] == {"user_id": "u"}
    assert "messages" not in call.request


async def test_a_stream_has_anthropics_events_in_order_with_usage(tmp_path, database):
    says = f"<think>\nHm.\n</think>\n\nLet me see.\n{call_text('Paris', 'Rome')}"
    async with scene(
        tmp_path, database, says=says, template=CHATML_WITH_TOOLS, engine={"pace_seconds": 0.001}
    ) as stage, stage.anthropic() as client:  # fmt: skip
        events = await raw_events(client, tools=TOOLS, thinking=THINKING, max_tokens=2000)
        (call,) = await stage.calls()
    block = ["content_block_start", "content_block_delta:{}", "content_block_stop"]
    assert kinds(events) == [
        "message_start",
        "content_block_start", "content_block_delta:thinking_delta", "content_block_delta:signature_delta",
        "content_block_stop",
        *(kind.format("text_delta") for kind in block),
        *(kind.format("input_json_delta") for kind in block),
        *(kind.format("input_json_delta") for kind in block),
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert [event.index for event in events if event.type == "content_block_start"] == [0, 1, 2, 3]
    start, delta = events[0], events[-2]
    assert start.type == "message_start" and delta.type == "message_delta"
    assert start.message.usage.input_tokens == delta.usage.input_tokens == call.prompt_tokens
    assert (delta.delta.stop_reason, delta.usage.output_tokens) == ("tool_use", call.completion_tokens)
    # Text leaves as it is sampled.
    assert len([event for event in events if event.type == "content_block_delta"]) > 10


@pytest.mark.parametrize("stream", [False, True])
async def test_three_turns_with_parallel_tools_an_error_and_thinking_continue_the_sampled_tokens(
    tmp_path, database, stream
):
    says = [
        f"<think>\nWhich cities?  \n</think>\n\nLet me see.\n{call_text('Paris', 'Atlantis')}",
        f"<think></think>{call_text('Rome')}",
        "<think>Done</think> It rains.",
    ]
    before = forks()
    async with scene(tmp_path, database, says=says, template=CHATML_WITH_TOOLS) as stage, stage.anthropic() as client:
        asked: Any = {"tools": TOOLS, "thinking": THINKING, "stream": stream, "max_tokens": 2000}
        messages: list[Any] = [{"role": "user", "content": "weather?"}]
        first = await create(client, messages=messages, **asked)
        thinking, text, *uses = first.content
        assert (thinking.type, text.type, [use.type for use in uses]) == ("thinking", "text", ["tool_use"] * 2)
        assert (thinking.to_dict()["thinking"], text.to_dict()["text"]) == ("Which cities?", "Let me see.")
        assert [use.to_dict()["input"] for use in uses] == [{"city": "Paris"}, {"city": "Atlantis"}]
        assert first.stop_reason == "tool_use"
        paris, atlantis = [use.to_dict()["id"] for use in uses]
        messages += [
            {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": paris, "content": [{"type": "text", "text": "rain"}]},
                    {"type": "tool_result", "tool_use_id": atlantis, "content": "no such city", "is_error": True},
                    {"type": "text", "text": "Go on.", "cache_control": {"type": "ephemeral"}},
                ],
            },
        ]
        second = await create(client, messages=messages, **asked)
        (use,) = [block.to_dict() for block in second.content if block.type == "tool_use"]
        messages += [
            {"role": "assistant", "content": second.content},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use["id"]}]},
        ]
        counted = await client.messages.count_tokens(
            model="claude-any", messages=messages, tools=TOOLS, thinking=THINKING
        )
        third = await create(client, messages=messages, **asked)
        calls = await stage.calls()
        logged = [request["input_ids"] for request in stage.engine.requests]
    assert [ids(call.prompt_ids) for call in calls] == logged
    assert begins_with(calls[1], calls[0]) and begins_with(calls[2], calls[1])
    assert [call.parent_call_id for call in calls] == [None, calls[0].id, calls[1].id]
    assert forks() == before
    assert counted.input_tokens == calls[2].prompt_tokens == third.usage.input_tokens
    assert [turn for turn in calls[1].turns if turn["role"] == "tool"] == [
        {"role": "tool", "content": "rain", "tool_call_id": paris},
        {"role": "tool", "content": "no such city", "tool_call_id": atlantis, "is_error": True},
    ]
    assert third.stop_reason == "end_turn"


async def test_text_stays_text_where_no_thinking_was_asked_for(tmp_path, database):
    async with scene(tmp_path, database, says="<think>Hm.</think>Yes.") as stage, stage.anthropic() as client:
        message = await create(client)
        (call,) = await stage.calls()
    assert message.content[0].to_dict() == {"type": "text", "text": "<think>Hm.</think>Yes."}
    assert call.answer is not None and call.answer["content"] == "<think>Hm.</think>Yes."


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("says", "parameters", "reason", "stop", "text"),
    [
        ("one two", {"stop_sequences": ["never", " two"]}, "stop_sequence", " two", "one"),
        ("one two", {"max_tokens": 3}, "max_tokens", None, "one"),
        ("", {}, "end_turn", None, ""),
    ],
)
async def test_the_stop_reason_says_how_the_answer_ended(
    tmp_path, database, stream, says, parameters, reason, stop, text
):
    async with scene(tmp_path, database, says=says) as stage, stage.anthropic() as client:
        message = await create(client, stream=stream, **parameters)
        headers = {"x-stainless-retry-count": "1"}
        repeated = await create(client, stream=stream, extra_headers=headers, **parameters)
        assert len(stage.engine.requests) == 1
    assert (message.stop_reason, message.stop_sequence) == (reason, stop)
    assert message.content[0].to_dict() == {"type": "text", "text": text}
    assert repeated.to_dict() == message.to_dict()


@pytest.mark.parametrize("stream", [False, True])
async def test_arguments_that_are_no_json_are_a_tool_call_that_continues_its_tokens(tmp_path, database, stream):
    broken = '<tool_call>\n{"name": "weather", "arguments": {"city": Paris}}\n</tool_call>'
    big = '<tool_call>\n{"name": "weather", "arguments": {"city": 99999999999999999999}}\n</tool_call>'
    async with scene(tmp_path, database, says=[broken, big, "ok"]) as stage, stage.anthropic() as client:
        messages = [*HI]
        for _ in range(2):
            message = await create(client, messages=messages, tools=TOOLS, stream=stream)
            (use,) = [block.to_dict() for block in message.content]
            assert list(use["input"]) == ["INVALID_JSON"]
            messages += [
                {"role": "assistant", "content": message.content},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use["id"], "is_error": True}]},
            ]
        await create(client, messages=messages, tools=TOOLS, stream=stream)
        calls = await stage.calls()
    assert begins_with(calls[1], calls[0]) and begins_with(calls[2], calls[1])


async def test_one_tool_at_most_where_the_request_says_so_and_none_where_it_forbids_them(tmp_path, database):
    async with scene(tmp_path, database, says=call_text("Paris", "Rome")) as stage, stage.anthropic() as client:
        single = await create(client, tools=TOOLS, tool_choice={"type": "any", "disable_parallel_tool_use": True})
        forbidden = await create(client, tools=TOOLS, tool_choice={"type": "none"})
        named = await create(client, tools=TOOLS, tool_choice={"type": "tool", "name": "weather"})
        assert stage.engine.requests[0]["input_ids"] == stage.engine.requests[1]["input_ids"]
    assert [block.type for block in single.content] == ["tool_use"]
    assert [block.type for block in forbidden.content] == ["text"]
    assert [block.type for block in named.content] == ["tool_use", "tool_use"]


async def test_what_claude_code_sends_is_served(tmp_path, database):
    """Beta fields, system blocks, a system message in the middle, and a history that changes its form."""
    extra = {
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "a_field_of_tomorrow": [1],
    }
    async with scene(tmp_path, database, says="ok") as stage, stage.anthropic() as client:
        ask: Any = client.beta.messages.create
        asked: Any = {"model": "claude-any", "max_tokens": 20_000, "betas": ["x-2026-01-01"], "extra_body": extra}
        marked = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
        system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
        await ask(**asked, system=system, messages=[{"role": "user", "content": [marked]}])
        messages = [*HI, {"role": "assistant", "content": [{"type": "text", "text": "ok"}]}]
        messages += [{"role": "system", "content": "Hurry."}, {"role": "user", "content": "?"}]
        await ask(**asked, system="Be brief.", messages=messages)
        first, second = await stage.calls()
    assert begins_with(second, first)
    assert second.turns[-2] == {"role": "system", "content": "Hurry."}
    assert second.request["a_field_of_tomorrow"] == [1]
    assert second.trainable


async def test_sampling_parameters_reach_the_engine_and_mark_the_record(tmp_path, database):
    async with scene(tmp_path, database) as stage, stage.anthropic() as client:
        await create(client, extra_body={"temperature": 0.5, "top_k": 0, "top_p": 1})
        await create(client, extra_body={"top_p": 0.9, "top_k": 5})
        plain, changed = await stage.calls()
        asked = [request["sampling_params"] for request in stage.engine.requests]
    assert [(one["temperature"], one["top_p"], one["top_k"]) for one in asked] == [(0.5, 1.0, -1), (1.0, 0.9, 5)]
    assert (plain.trainable, changed.untrainable_reason) == (True, "sampled with top_p, top_k")


async def test_the_tools_that_a_search_found_are_named_to_the_model(tmp_path, database):
    found = [{"type": "tool_reference", "tool_name": "weather"}, {"type": "tool_reference", "tool_name": "clock"}]
    async with scene(tmp_path, database) as stage, stage.anthropic() as client:
        search = {"type": "tool_use", "id": "toolu_1", "name": "ToolSearch", "input": {"query": "weather"}}
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": found}
        said: Any = [*HI, {"role": "assistant", "content": [search]}, {"role": "user", "content": [result]}]
        await client.messages.create(model="m", max_tokens=9, messages=said)
        (call,) = await stage.calls()
    assert call.turns[-1]["content"] == "Tool found: weather\nTool found: clock"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "block of type 'image'"),
        ({"messages": [*HI, {"role": "assistant", "content": "So"}]}, "prefill"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1"}]}]},
            "'toolu_1' has no tool_use",
        ),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "give the agent one with a name and a schema"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
        ({"mcp_servers": [{"type": "url", "url": "http://x", "name": "x"}]}, "mcp_servers"),
        ({"output_format": {"type": "json_schema"}}, "output_format.schema"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
    ],
)
async def test_a_wrong_body_is_refused_in_anthropics_shape(tmp_path, database, change, message):
    async with scene(tmp_path, database) as stage, stage.anthropic() as client:
        with pytest.raises(anthropic.BadRequestError) as refused:
            await create(client, extra_body=change)
        assert await stage.calls() == []
    body: Any = refused.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert message in body["error"]["message"]
    assert refused.value.request_id == refused.value.response.headers["x-request-id"]


async def test_refusals_have_anthropics_types_and_either_header_holds_the_key(tmp_path, database):
    async with scene(tmp_path, database, max_body_bytes=5000, hold_seconds=1.0) as stage:
        gateway, rollout = stage.gateway, stage.rollout_id
        url = f"{gateway.base_url(rollout)}/messages"
        other, wrong = gateway.key(rollout, 2), gateway.key(rollout, scope=Scope.TELEMETRY)
        body = {"model": "m", "max_tokens": 9, "messages": HI}
        headers = {"x-api-key": gateway.key(rollout), "anthropic-version": "2023-06-01", "anthropic-beta": "a,b"}
        async with httpx.AsyncClient(trust_env=False) as http:
            served = [await http.post(url + query, json=body, headers=headers) for query in ("", "/", "?beta=true")]
            bearer = await http.post(url, json=body, headers={"authorization": f"Bearer {gateway.key(rollout)}"})
            nobody = await http.post(url, json=body)
            others = [await http.post(url, json=body, headers={"x-api-key": key}) for key in (other, wrong)]
            broken = await http.post(url, content=b"{", headers=headers)
            large = await http.post(url, content=b" " * 9000, headers=headers)
            stage.engine.refuses = (503, {})
            away = await http.post(url, json=body, headers=headers)
    assert [answer.status_code for answer in (*served, bearer)] == [200] * 4
    refusals = [nobody, *others, broken, large, away]
    assert [answer.status_code for answer in refusals] == [401, 403, 403, 400, 413, 503]
    assert [answer.json()["error"]["type"] for answer in refusals] == [
        *("authentication_error", "permission_error", "permission_error"),
        *("invalid_request_error", "request_too_large", "overloaded_error"),
    ]
    assert int(away.headers["retry-after"]) >= 1


async def test_a_stream_that_fails_after_its_start_ends_with_an_error_event(tmp_path, database):
    stuck = asyncio.Event()
    pace = lambda count: stuck.wait() if count == 2 else None  # noqa: E731
    async with (
        scene(tmp_path, database, says="Hello.", engine={"pace": pace}) as stage,
        stage.anthropic() as client,
    ):
        events = aiter(await client.messages.create(model="m", max_tokens=99, messages=HI, stream=True))
        got = [await anext(events) for _ in range(3)]
        await stage.gateway.stop()
        with pytest.raises(anthropic.APIStatusError) as failed:
            got += [event async for event in events]
        (call,) = await stage.calls()
    body: Any = failed.value.body
    assert body["error"]["type"] == "overloaded_error"
    assert "message_stop" not in {event.type for event in got}
    assert call.status == "aborted"


async def test_a_stream_that_waits_starts_with_the_message_and_pings(tmp_path, database):
    go = asyncio.Event()
    async with scene(
        tmp_path, database, says="ok", engine={"pace": lambda _: go.wait()}, keepalive_after_seconds=0.05,
        keepalive_seconds=0.05,
    ) as stage, stage.anthropic() as client:  # fmt: skip
        body = {"model": "m", "max_tokens": 9, "messages": HI, "stream": True}
        async with client.messages.with_streaming_response.create(**body) as response:  # type: ignore[call-overload]
            text = ""
            async for piece in response.iter_text():
                text += piece
                if text.count("event: ping") == 3:
                    go.set()
    events = [line.removeprefix("event: ") for line in text.splitlines() if line.startswith("event: ")]
    assert events[:4] == ["message_start", "ping", "ping", "ping"]
    assert events[-1] == "message_stop"
    assert events.count("message_start") == 1


async def test_a_disconnect_aborts_the_call(tmp_path, database):
    async def pace(tokens: int) -> None:
        while tokens >= 3 and not stage.engine.aborted:
            await asyncio.sleep(0.01)

    async with scene(
        tmp_path, database, says="Hello.", engine={"pace": pace}, abandoned_seconds=0
    ) as stage, stage.anthropic() as client:  # fmt: skip
        async with client.messages.stream(model="m", max_tokens=99, messages=HI) as stream:
            async for _ in stream.text_stream:
                break
        calls = await _eventually(stage)
    assert [(call.status, call.trainable) for call in calls] == [("aborted", False)]
    assert 0 < len(ids(calls[0].sampled_ids)) < 7


async def _eventually(stage: Scene) -> Any:
    return await eventually(lambda: stage.calls())


@pytest.mark.parametrize("stream", [False, True])
async def test_the_sdks_repeat_of_a_lost_answer_gets_the_one_that_was_sampled(tmp_path, database, stream):
    async with scene(tmp_path, database, says="Hello.") as stage:
        async with _dropping_proxy(stage) as port:
            base = stage.gateway.base_url(stage.rollout_id).removesuffix("/v1")
            lossy = base.replace(stage.gateway.url, f"http://127.0.0.1:{port}")
            key = stage.gateway.key(stage.rollout_id)
            async with anthropic.AsyncAnthropic(base_url=lossy, api_key=key, max_retries=2) as client:
                message = await create(client, stream=stream)
        calls = await stage.calls()
        assert len(stage.engine.requests) == 1
    assert message.id == f"msg_{calls[0].id}"
    assert len(calls) == 1


@asynccontextmanager
async def _dropping_proxy(stage: Scene) -> AsyncIterator[int]:
    """The port of a TCP proxy that cuts its first connection after the gateway has answered."""
    port = int(stage.gateway.url.rpartition(":")[2])
    is_first = True
    connections: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal is_first
        drops, is_first = is_first, False
        upstream_reader, upstream = await asyncio.open_connection("127.0.0.1", port)
        with closing(upstream):
            upstream.write(await reader.read(2**16))
            if drops:
                await upstream_reader.read(10)
                await _eventually(stage)
            else:
                while data := await upstream_reader.read(2**16):
                    writer.write(data)

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.create_task(serve(reader, writer))
        # A task that is cancelled before it begins closes nothing itself.
        connection.add_done_callback(lambda _: writer.close())
        connections.add(connection)

    async with await asyncio.start_server(connected, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]
        # The gateway leaves its connections open for further requests.
        server.close()
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)


async def test_count_tokens_counts_a_conversation_beyond_the_context_too(tmp_path, database):
    async with scene(tmp_path, database, context_length=64) as stage, stage.anthropic() as client:
        long: Any = [{"role": "user", "content": "x" * 100}]
        counted = await client.messages.count_tokens(model="m", messages=long)
        assert await stage.calls() == []
    assert counted.input_tokens > 100


async def test_text_that_looks_like_an_event_stays_text(tmp_path, database):
    """Line breaks and quotes inside text and arguments stay inside one event's JSON."""
    says = 'a\n\ndata: {"type": "message_stop"}\n\n'
    async with scene(tmp_path, database, says=says) as stage, stage.anthropic() as client:
        message = await create(client, stream=True)
    assert message.content[0].to_dict()["text"] == says
