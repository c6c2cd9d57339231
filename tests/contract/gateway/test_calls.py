"""The OpenAI client against the gateway: answers, streams, and the record behind each of them."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from openai.types.chat import ChatCompletionChunk
from sqlalchemy import text

from leyden.libs.contracts import ids as ids_of
from leyden.libs.contracts.capability import Scope
from leyden.libs.queue import attempt_liveness
from leyden.libs.queue.notifications import Notifications
from leyden.libs.store import tables
from leyden.libs.store.attempts import AttemptKey
from leyden.libs.store.database import ReadSession
from leyden.libs.store.records.calls import answered_requests
from leyden.services.gateway.calls.context import seed_of_call, seed_of_rollout
from leyden.services.gateway.samplers.engine import EngineSampler
from tests.contract.gateway.test_deliveries import ended
from tests.fakes.chat_model import EOS
from tests.fakes.gateway import scene
from tests.fakes.scripted_engine import logprob_of
from tests.support import builders
from tests.support.waiting import eventually

HI: list[Any] = [{"role": "user", "content": "hi"}]


def ids(data: bytes) -> list[int]:
    return np.frombuffer(data, "<i4").tolist()


def floats(data: bytes) -> list[float]:
    return np.frombuffer(data, "<f4").tolist()


async def collect(stream: Any) -> list[ChatCompletionChunk]:
    return [chunk async for chunk in stream]


def text_of(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    deltas = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in deltas)


async def test_an_answer_has_the_sampled_text_and_its_record_every_token(tmp_path, database):
    async with scene(tmp_path, database, says="Hello.") as stage, stage.client() as client:
        answer = await client.chat.completions.create(model="any-name", messages=HI, seed=7, temperature=0.5)
        (call,) = await stage.calls()
        (asked,) = stage.engine.requests
        prompt = stage.model.tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n").tolist()
        sampled = [*stage.model.tokenizer.encode("Hello.").tolist(), EOS]
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("Hello.", "stop")
    assert (answer.id, answer.model) == (f"chatcmpl-{call.id}", "any-name")
    assert answer.system_fingerprint == f"{stage.run_id}:0"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), len(sampled))
    assert (asked["input_ids"], asked["rid"], asked["return_logprob"]) == (prompt, call.id, True)
    assert asked["sampling_params"] == {
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": 4095 - len(prompt),
        "stop": [],
        "stop_token_ids": [EOS],
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
        "stream_interval": 1024,
        "min_p": 0.0,
        "min_new_tokens": 0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "sampling_seed": seed_of_rollout(7, stage.rollout_id),
    }
    assert (call.rollout_id, call.attempt, call.request_id, call.choice) == (stage.rollout_id, 1, call.id, 0)
    assert (call.status, call.trainable, call.finish_reason) == ("completed", True, "stop")
    assert (ids(call.prompt_ids), ids(call.sampled_ids)) == (prompt, sampled)
    assert floats(call.generator_logprobs) == [logprob_of(position) for position in range(len(sampled))]
    assert ids(call.policy_versions) == [0] * len(sampled)
    assert (call.min_policy_version, call.max_policy_version, call.temperature) == (0, 0, 0.5)
    assert (call.turns, call.tools) == (HI, [])
    assert call.request == {"model": "any-name", "seed": 7, "temperature": 0.5}
    assert call.answer == {"role": "assistant", "content": "Hello."}
    assert 0 <= call.queued_seconds <= call.total_seconds


async def test_a_stream_has_the_same_text_token_by_token_and_usage_if_requested(tmp_path, database):
    async with scene(tmp_path, database, says="Héllo 😀.") as stage, stage.client() as client:
        options: Any = {"include_usage": True}
        stream = await client.chat.completions.create(
            model="m", messages=HI, stream=True, stream_options=options, logprobs=True
        )
        chunks = await collect(stream)
        (call,) = await stage.calls()
    assert text_of(chunks) == "Héllo 😀."
    assert {chunk.id for chunk in chunks} == {f"chatcmpl-{call.id}"}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == call.completion_tokens == len("Héllo 😀.".encode()) + 1
    spelled = [
        entry.logprob for chunk in chunks for c in chunk.choices if c.logprobs for entry in c.logprobs.content or []
    ]
    assert spelled == floats(call.generator_logprobs)
    assert call.first_token_seconds is not None


async def test_a_character_of_several_tokens_is_never_shown_in_halves(tmp_path, database):
    async with scene(tmp_path, database, says="日本語") as stage, stage.client() as client:
        chunks = await collect(await client.chat.completions.create(model="m", messages=HI, stream=True))
    assert text_of(chunks) == "日本語"
    assert not any("\ufffd" in (choice.delta.content or "") for chunk in chunks for choice in chunk.choices)


@pytest.mark.parametrize("stream", [False, True])
async def test_n_answers_are_n_records_of_one_request_with_seeds_of_their_own(tmp_path, database, stream):
    texts, first = ["one", "two", "three"], list[int]()
    async with (
        scene(
            tmp_path, database, says=lambda body: _by_seed(body, texts, first), engine={"tokens_per_chunk": 2}
        ) as stage,
        stage.client() as client,
    ):
        first.append(seed_of_rollout(40, stage.rollout_id))
        answer: Any = await client.chat.completions.create(model="m", messages=HI, n=3, seed=40, stream=stream)
        chunks = await collect(answer) if stream else []
        calls = await stage.calls()
    shown = [text_of(chunks, i) for i in range(3)] if stream else [c.message.content for c in answer.choices]
    assert shown == texts
    assert [call.choice for call in calls] == [0, 1, 2]
    assert {call.request_id for call in calls} == {calls[0].id}
    assert len({call.id for call in calls}) == 3


async def test_without_a_seed_each_answer_has_the_seed_of_its_call(tmp_path, database):
    async with scene(tmp_path, database) as stage, stage.client() as client:
        await client.chat.completions.create(model="m", messages=HI, n=3)
        calls = await stage.calls()
        seeds = {asked["rid"]: asked["sampling_params"]["sampling_seed"] for asked in stage.engine.requests}
    assert seeds == {call.id: seed_of_call(call.id) for call in calls}
    assert len(set(seeds.values())) == 3


def _by_seed(body: dict[str, Any], texts: list[str], first: list[int]) -> list[int]:
    # A letter's token is its place in the byte alphabet, which begins with "!".
    return [*(ord(letter) - ord("!") for letter in texts[body["sampling_params"]["sampling_seed"] - first[0]]), EOS]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_answer_and_nothing_of_it_is_shown(tmp_path, database, stream):
    async with scene(tmp_path, database, says="Thought: x\nObservation: y") as stage, stage.client() as client:
        answer: Any = await client.chat.completions.create(
            model="m", messages=HI, stop=["Observation:", "never"], stream=stream
        )
        chunks = await collect(answer) if stream else []
        (call,) = await stage.calls()
        sampled = stage.model.tokenizer.decode(ids(call.sampled_ids))
    shown = text_of(chunks) if stream else answer.choices[0].message.content
    assert shown == "Thought: x\n"
    assert sampled == "Thought: x\nObservation:"
    assert call.finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_after_a_stop_string_that_the_engine_missed_are_neither_shown_nor_trained(
    tmp_path, database, stream
):
    async with scene(tmp_path, database, says="Thought: x\nObservation: 42, says nobody.") as stage:
        # As one that continues the answer of another engine, which had the beginning of the stop string.
        stage.engine.decode = lambda _: ""
        async with stage.client() as client:
            create: Any = client.chat.completions.create
            answer = await create(model="m", messages=HI, stop=["Observation:"], stream=stream)
            chunks = await collect(answer) if stream else []
        (call,) = await stage.calls()
        sampled = stage.model.tokenizer.decode(ids(call.sampled_ids))
    assert (text_of(chunks) if stream else answer.choices[0].message.content) == "Thought: x\n"
    assert (sampled, call.status, call.finish_reason) == ("Thought: x\nObservation:", "completed", "stop")
    assert (call.completion_tokens, call.trainable) == (len(sampled), True)
    assert len(call.generator_logprobs) == len(call.policy_versions) == len(call.sampled_ids)


async def test_max_tokens_ends_the_answer_by_length(tmp_path, database):
    async with scene(tmp_path, database, says="Hello.") as stage, stage.client() as client:
        answer = await client.chat.completions.create(model="m", messages=HI, max_completion_tokens=3)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("Hel", "length")


async def test_log_probabilities_include_alternatives(tmp_path, database):
    async with scene(tmp_path, database, says="ab") as stage, stage.client() as client:
        answer = await client.chat.completions.create(model="m", messages=HI, logprobs=True, top_logprobs=2)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content or []
    assert [(entry.token, entry.logprob, entry.bytes) for entry in content[:2]] == [
        ("a", logprob_of(0), [97]),
        ("b", logprob_of(1), [98]),
    ]
    assert [len(entry.top_logprobs) for entry in content] == [2, 2, 2]


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"temperature": 0}, "sampled with temperature"),
        ({"top_p": 0.9, "presence_penalty": 1}, "sampled with top_p, presence_penalty"),
        ({"logit_bias": {"5": 10}}, "sampled with logit_bias"),
        ({"extra_body": {"top_k": 20, "min_p": 0.1}}, "sampled with top_k, min_p"),
        ({"temperature": 1.3, "stop": "x", "top_p": 1}, None),
    ],
)
async def test_the_record_names_parameters_that_a_trainer_cannot_reproduce(tmp_path, database, parameters, reason):
    async with scene(tmp_path, database) as stage, stage.client() as client:
        await client.chat.completions.create(model="m", messages=HI, **parameters)
        (call,) = await stage.calls()
    assert (call.trainable, call.untrainable_reason) == (reason is None, reason)


async def test_a_call_without_temperature_gets_its_runs(tmp_path, database):
    document = builders.run_document(sampling={"group_size": 2, "groups_per_step": 1, "temperature": 0.8})
    async with scene(tmp_path, database, run=document) as stage, stage.client() as client:
        await client.chat.completions.create(model="m", messages=HI)
        await client.chat.completions.create(model="m", messages=HI, temperature=1)
    assert [asked["sampling_params"]["temperature"] for asked in stage.engine.requests] == [0.8, 1.0]


OVERRIDDEN = builders.run_document(sampling={"group_size": 2, "groups_per_step": 1, "override": {"temperature": 1.0}})


@pytest.mark.parametrize(
    ("parameters", "asked"),
    [
        # Like ChatOpenAI(temperature=0), which sends the temperature with every request.
        ({"temperature": 0.0, "stream": False}, {"temperature": 0.0}),
        ({"temperature": 1, "top_p": 0.9, "extra_body": {"top_k": 20}}, {"top_p": 0.9, "top_k": 20}),
        ({"presence_penalty": 1, "logit_bias": {"5": 10}}, {"presence_penalty": 1.0, "logit_bias": {"5": 10}}),
        ({}, None),
    ],
)
async def test_a_run_that_overrides_trains_calls_whatever_their_agent_asks(tmp_path, database, parameters, asked):
    async with scene(tmp_path, database, run=OVERRIDDEN) as stage, stage.client() as client:
        await client.chat.completions.create(model="m", messages=HI, **parameters)
        (call,), (sent,) = await stage.calls(), stage.engine.requests
    assert (call.trainable, call.untrainable_reason, call.temperature, call.asked) == (True, None, 1.0, asked)
    sampled = {name: sent["sampling_params"].get(name) for name in ("temperature", "top_p", "top_k", "logit_bias")}
    assert sampled == {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logit_bias": None}


async def test_an_evaluation_samples_as_its_agent_asks_although_the_run_overrides(tmp_path, database):
    async with scene(tmp_path, database, run=OVERRIDDEN) as stage:
        evaluation = ids_of.evaluation_id(stage.run_id, 1)
        async with database.session() as session:
            run = await session.get_one(tables.Run, stage.run_id)
            session.add(
                tables.Evaluation(
                    id=evaluation, run_id=run.id, number=1, dataset_id=run.dataset_id, rollouts_per_task=1
                )
            )
        _, (rollout, *_) = await builders.add_group(database, run, evaluation_id=evaluation)
        await builders.add_attempt(database, rollout)
        async with stage.gateway.client(rollout.id) as client:
            await client.chat.completions.create(model="m", messages=HI, temperature=0, top_p=0.9)
        (call,) = await stage.calls()
    assert (call.temperature, call.asked, call.untrainable_reason) == (0.0, None, "sampled with temperature, top_p")


async def test_a_greedy_rollout_is_decoded_greedily_whatever_its_agent_asks_for(tmp_path, database):
    async with scene(tmp_path, database) as stage:
        async with stage.client(api_key=stage.gateway.key(stage.rollout.id, greedy=True)) as client:
            await client.chat.completions.create(model="m", messages=HI, temperature=0.9)
        (call,) = await stage.calls()
    assert [asked["sampling_params"]["temperature"] for asked in stage.engine.requests] == [0.0]
    assert (call.temperature, call.untrainable_reason) == (0.0, "greedy rollout: the baseline of its siblings")
    assert call.request["temperature"] == 0.9


async def test_calls_are_in_order_across_gateways_whose_machines_have_other_clocks(tmp_path, database, monkeypatch):
    async with scene(tmp_path, database, says=["first", "second"]) as stage, stage.another_gateway() as other:
        with monkeypatch.context() as machine:
            an_hour_ahead = time.time_ns() + 3600 * 10**9
            machine.setattr(time, "time_ns", lambda: an_hour_ahead)
            machine.setattr(time, "time", lambda: an_hour_ahead / 1e9)
            async with stage.client() as client:
                await client.chat.completions.create(model="m", messages=HI)
        async with other.client(stage.rollout_id) as client:
            await client.chat.completions.create(model="m", messages=HI)
        assert [call.answer["content"] for call in await stage.calls()] == ["first", "second"]


async def test_fields_that_change_nothing_are_accepted_and_recorded(tmp_path, database):
    async with scene(tmp_path, database) as stage, stage.client() as client:
        await client.chat.completions.create(
            model="m", messages=HI, user="u", metadata={"a": "b"}, store=False, service_tier="auto", verbosity="low"
        )
        (call,) = await stage.calls()
    assert call.request["metadata"] == {"a": "b"}
    assert call.trainable


async def ask_with_hosted_tools(client: Any, claude: Any) -> None:
    own = {"type": "function", "function": {"name": "own", "parameters": {"type": "object"}}}
    await client.chat.completions.create(model="m", messages=HI, tools=[{"type": "web_search"}, own])
    flat: Any = [{"type": "web_search"}, {"type": "mcp", "server_label": "x"}, {"type": "function", "name": "own"}]
    await client.responses.create(model="m", input="a", tools=flat)
    tools: Any = [{"type": "web_search_20250305", "name": "web_search"}, {"name": "own", "input_schema": {}}]
    await claude.messages.create(model="m", messages=HI, max_tokens=9, tools=tools)


async def test_hosted_tools_are_not_offered_and_the_record_names_them(tmp_path, database):
    async with scene(tmp_path, database) as stage, stage.client() as client, stage.anthropic() as claude:
        await ask_with_hosted_tools(client, claude)
        calls = await stage.calls()
    hosted = [["web_search"], ["web_search", "mcp"], ["web_search_20250305"]]
    assert [call.request["hosted_tools"] for call in calls] == hosted
    assert [[tool["function"]["name"] for tool in call.tools or ()] for call in calls] == [["own"]] * 3
    assert all(call.trainable for call in calls)


async def test_a_run_may_refuse_hosted_tools(tmp_path, database):
    document = builders.run_document(agent={"command": ["a"], "hosted_tools": "refuse"})
    async with scene(tmp_path, database, run=document) as stage, stage.client() as client, stage.anthropic() as claude:
        with pytest.raises(openai.BadRequestError, match=r"the run refuses hosted tools \(web_search\)"):
            await ask_with_hosted_tools(client, claude)
        assert not await stage.calls()


async def test_unknown_fields_of_every_dialect_are_recorded(tmp_path, database):
    new: Any = {"extra_body": {"some_new_field": {"of": ["next", "year"]}}}
    async with scene(tmp_path, database) as stage, stage.client() as client, stage.anthropic() as claude:
        await client.chat.completions.create(model="m", messages=HI, stop=["1", "2", "3", "4", "5"], **new)
        await client.completions.create(model="m", prompt="a", **new)
        await client.responses.create(model="m", input="a", **new)
        await claude.messages.create(model="m", messages=HI, max_tokens=9, **new)
        conversation = await client.conversations.create(**new)
        calls = await stage.calls()
    assert [call.request["some_new_field"] for call in calls] == [{"of": ["next", "year"]}] * 4
    assert all(call.trainable for call in calls)
    assert conversation.id.startswith("conv_")


async def test_the_trace_of_the_caller_is_recorded(tmp_path, database):
    trace, span = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    async with scene(tmp_path, database) as stage, stage.client() as client:
        headers = {"traceparent": f"00-{trace}-{span}-01"}
        await client.chat.completions.create(model="m", messages=HI, extra_headers=headers)
        (call,) = await stage.calls()
    assert (call.trace_id, call.parent_span_id) == (trace, span)


async def test_text_that_postgres_cannot_hold_is_answered_and_recorded(tmp_path, database):
    async with scene(tmp_path, database, says="\x00!") as stage, stage.client() as client:
        answer = await client.chat.completions.create(
            model="m",
            messages=[
                {
                    "role": "user",
                    "content": "a\x00b \\u0000 \ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"),
                }
            ],
        )
        (call,) = await stage.calls()
    assert answer.choices[0].message.content == "\x00!"
    assert call.answer is not None
    assert call.answer["content"] == "\ufffd!"
    assert call.turns[0]["content"] == "a\ufffdb \\u0000 😀"


async def test_the_models_list_names_one_and_any_is_served(tmp_path, database):
    async with scene(tmp_path, database) as stage, stage.client() as client:
        assert [model.id async for model in client.models.list()] == ["model"]
        assert (await client.models.retrieve("gpt-9/x")).id == "gpt-9/x"


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"functions": [{}]}, "functions.0.name", "missing_required_parameter"),
        ({"temperature": 3}, "temperature", "invalid_value"),
        ({"temperature": "hot"}, "temperature", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 65}, "n", "invalid_value"),
        ({"stop": ["a"] * 17}, None, "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role", "invalid_value"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content", "invalid_value"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content",
            "unsupported_content",
        ),
        ({"messages": None}, "messages", "missing_required_parameter"),
        ({"response_format": {"type": "grammar"}}, "response_format", "unsupported_parameter"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"logit_bias": {"999999": 1}}, "logit_bias", "invalid_value"),
    ],
)
async def test_a_wrong_body_is_refused_as_openai_does(tmp_path, database, change, param, code):
    async with scene(tmp_path, database) as stage, stage.client() as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="m", messages=HI, extra_body=change)
        assert await stage.calls() == []
    assert refused.value.code == code
    assert param is None or refused.value.param == param
    assert refused.value.type == "invalid_request_error"


async def test_a_prompt_beyond_the_context_is_refused_as_openai_does(tmp_path, database):
    async with scene(tmp_path, database, context_length=64) as stage, stage.client() as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x" * 64}])
        assert stage.engine.requests == []
        (call,) = await stage.calls()
    assert refused.value.code == call.finish_reason == "context_length_exceeded"
    assert (call.status, call.trainable, call.completion_tokens, call.answer) == ("refused", False, 0, None)
    assert call.untrainable_reason in refused.value.message and str(call.prompt_tokens) in refused.value.message


@pytest.mark.parametrize("streams", [False, True])
async def test_an_agent_reads_on_after_a_call_beyond_the_context(tmp_path, database, streams):
    """The refused call has a row of what it adds, in place and delivered; the next one continues the call before it."""
    async with scene(tmp_path, database, context_length=128, says="Yes.") as stage, stage.client() as client:
        first = await client.chat.completions.create(model="m", messages=HI)
        so_far: Any = [*HI, {"role": "assistant", "content": first.choices[0].message.content}]
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(
                model="m", messages=[*so_far, {"role": "user", "content": "x" * 128}], stream=streams
            )
        await client.chat.completions.create(model="m", messages=[*so_far, {"role": "user", "content": "go on"}])
        before, refused, after = await stage.calls()
        rows = await ended(database, 3)
    assert [one.status for one in (before, refused, after)] == ["completed", "refused", "completed"]
    assert refused.parent_call_id == after.parent_call_id == before.id
    assert (refused.shared_turns, refused.turns[-1]["content"]) == (2, "x" * 128)
    assert [row.delivered for row in rows] == [True] * 3


async def test_a_prompt_with_a_token_that_the_model_does_not_have_reaches_no_engine(tmp_path, database, monkeypatch):
    monkeypatch.setattr("tests.fakes.chat_model.VOCAB_SIZE", EOS)
    async with scene(tmp_path, database) as stage, stage.client() as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="m", messages=HI)
        assert stage.engine.requests == []
    assert refused.value.param == "messages"


async def test_what_the_engine_refuses_is_a_bad_request_with_its_reason(tmp_path, database):
    refuses = (
        400,
        {"error": {"message": "The input (70 tokens) is longer than the model's context length (64 tokens)."}},
    )
    async with scene(tmp_path, database, engine={"refuses": refuses}) as stage, stage.client() as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="m", messages=HI)
        (call,) = await stage.calls()
    assert refused.value.code == call.finish_reason == "context_length_exceeded"
    assert (call.status, call.trainable, call.completion_tokens) == ("refused", False, 0)


async def test_a_body_that_is_no_json_or_too_large_is_refused(tmp_path, database):
    async with scene(tmp_path, database, max_body_bytes=2000) as stage, httpx.AsyncClient() as http:
        url = f"{stage.gateway.base_url(stage.rollout_id)}/chat/completions"
        headers = {"authorization": f"Bearer {stage.gateway.key(stage.rollout_id)}"}
        broken = await http.post(url, content=b'{"model": ', headers=headers)
        large = await http.post(url, content=b" " * 3000, headers=headers)
        unknown = await http.get(f"{stage.gateway.base_url(stage.rollout_id)}/audio", headers=headers)
    assert (broken.status_code, broken.json()["error"]["code"]) == (400, "invalid_json")
    assert (large.status_code, large.json()["error"]["code"]) == (413, "body_too_large")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")


async def test_a_key_is_valid_only_for_its_own_address(tmp_path, database):
    async with scene(tmp_path, database) as stage:
        door = stage.gateway
        cases = {
            "none": ("", 401),
            "garbage": ("sk-123", 401),
            "expired": (door.key(stage.rollout_id, lasts_seconds=-60), 401),
            "another rollout's": (door.key(f"{stage.run_id}.0.1"), 403),
            "another attempt's": (door.key(stage.rollout_id, 2), 403),
            "another scope's": (door.key(stage.rollout_id, scope=Scope.TELEMETRY), 403),
        }
        statuses = {}
        for name, (key, _) in cases.items():
            async with stage.client() as client:
                with pytest.raises(openai.APIStatusError) as refused:
                    await client.with_options(api_key=key or "-").chat.completions.create(model="m", messages=HI)
                statuses[name] = refused.value.status_code
        assert stage.engine.requests == []
    assert statuses == {name: status for name, (_, status) in cases.items()}


async def test_the_key_of_an_ended_attempt_is_refused(tmp_path, database, redis_url):
    async with scene(tmp_path, database, redis_url=redis_url) as stage, stage.client() as client:
        await client.chat.completions.create(model="m", messages=HI)
        await builders.end_attempt(database, stage.rollout_id, state="settled")
        async with stage.another_gateway() as other, other.client(stage.rollout_id) as late:
            for ask in (late.chat.completions.create(model="m", messages=HI), late.models.retrieve("m")):
                with pytest.raises(openai.PermissionDeniedError) as refused:
                    await ask
                assert refused.value.code == "ended"
        assert len(stage.engine.requests) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_in_hand_ends_with_its_attempt_and_is_recorded(tmp_path, database, redis_url, stream):
    begun, notifications = asyncio.Event(), Notifications(redis_url)

    def pace(tokens: int) -> Any:
        if tokens == 3:
            begun.set()
            return asyncio.Event().wait()
        return None

    async with (
        scene(tmp_path, database, engine={"pace": pace}, redis_url=redis_url, keepalive_after_seconds=600) as stage,
        stage.client() as client,
    ):
        asked = asyncio.create_task(_whole(client, stream=stream))
        async with asyncio.timeout(60):
            await begun.wait()
        await builders.end_attempt(database, stage.rollout_id)
        await notifications.publish_ended([AttemptKey(stage.rollout_id, 1)])
        with pytest.raises(openai.APIError) as refused:
            await asked
        (call,) = await stage.calls()
    await notifications.close()
    assert refused.value.code == "ended"
    assert (call.status, call.trainable, call.untrainable_reason) == ("aborted", False, "its attempt ended")


async def test_a_call_that_runs_for_longer_than_an_idle_attempt_is_known_ends_with_its_attempt(
    tmp_path, database, monkeypatch
):
    monkeypatch.setattr(attempt_liveness, "CACHE_TTL_SECONDS", 0.2)
    monkeypatch.setattr(attempt_liveness, "IDLE_SECONDS", 0.4)
    async with (
        scene(tmp_path, database, engine={"pace": lambda _: asyncio.Event().wait()}) as stage,
        stage.client() as client,
    ):
        asked = asyncio.create_task(_whole(client, stream=False))
        await eventually(lambda: stage.engine.requests)
        await asyncio.wait({asked}, timeout=1.0)
        await builders.end_attempt(database, stage.rollout_id)
        with pytest.raises(openai.PermissionDeniedError) as refused:
            await asyncio.wait_for(asked, 60)
    assert refused.value.code == "ended"


async def test_a_request_whose_attempt_ends_before_its_call_begins_gets_no_call(
    tmp_path, database, redis_url, monkeypatch
):
    preparing, go, notifications = asyncio.Event(), asyncio.Event(), Notifications(redis_url)
    prepare = EngineSampler.prepare

    async def slow(*args: Any) -> EngineSampler:
        preparing.set()
        await go.wait()
        return await prepare(*args)

    monkeypatch.setattr(EngineSampler, "prepare", slow)
    async with scene(tmp_path, database, redis_url=redis_url) as stage, stage.client(timeout=60) as client:
        asked = asyncio.create_task(_whole(client, stream=False))
        async with asyncio.timeout(60):
            await preparing.wait()
            await builders.end_attempt(database, stage.rollout_id)
            while await _may_ask(client):
                await notifications.publish_ended([AttemptKey(stage.rollout_id, 1)])
        go.set()
        with pytest.raises(openai.PermissionDeniedError) as refused:
            await asked
        assert (refused.value.code, stage.engine.requests) == ("ended", [])
    await notifications.close()


async def _may_ask(client: openai.AsyncOpenAI) -> bool:
    try:
        await client.models.retrieve("m")
    except openai.PermissionDeniedError:
        return False
    return True


async def _whole(client: openai.AsyncOpenAI, *, stream: bool) -> None:
    answer: Any = await client.chat.completions.create(model="m", messages=HI, stream=stream)
    if stream:
        await collect(answer)


@pytest.mark.parametrize(("age_seconds", "reads"), [(0, 0), (60, 1)])
async def test_a_young_gateway_looks_for_lost_answers_in_older_attempts_alone(
    tmp_path, database, monkeypatch, age_seconds, reads
):
    read: list[bytes] = []

    async def noted(session: ReadSession, *attempt: Any, request_sha256: bytes, **arrived: Any) -> Any:
        read.append(request_sha256)
        return await answered_requests(session, *attempt, request_sha256=request_sha256, **arrived)

    monkeypatch.setattr("leyden.services.gateway.records.reader.answered_requests", noted)
    async with scene(tmp_path, database) as stage, stage.client() as client:
        async with database.session() as session:
            began = {"began": datetime.now(tz=UTC) - timedelta(seconds=age_seconds)}
            await session.execute(text("UPDATE attempts SET created_at = :began"), began)
        await client.chat.completions.create(model="m", messages=HI)
    assert len(read) == reads
