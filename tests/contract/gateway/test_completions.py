"""OpenAI's text completions: a raw prompt without the chat template."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.contract.gateway.test_calls import floats, ids
from tests.fakes.chat_model import EOS
from tests.fakes.gateway import scene


@pytest.mark.parametrize("stream", [False, True])
async def test_a_raw_prompt_is_continued_without_the_template(tmp_path, database, stream):
    async with scene(tmp_path, database, says="Héllo.") as stage, stage.client() as client:
        create: Any = client.completions.create
        options = {"stream_options": {"include_usage": True}} if stream else {}
        answer = await create(model="any", prompt="Once <|im_start|>", logprobs=2, stream=stream, **options)
        chunks = [chunk async for chunk in answer] if stream else [answer]
        (call,) = await stage.calls()
        (asked,) = stage.engine.requests
        prompt = stage.model.tokenizer.encode("Once <|im_start|>").tolist()
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.text for choice in choices) == "Héllo."
    assert (choices[-1].finish_reason, {chunk.id for chunk in chunks}) == ("stop", {f"cmpl-{call.id}"})
    spelled = [value for choice in choices if choice.logprobs for value in choice.logprobs.token_logprobs]
    assert spelled == floats(call.generator_logprobs)
    assert chunks[-1].usage.completion_tokens == call.completion_tokens
    assert (asked["input_ids"], asked["sampling_params"]["max_new_tokens"]) == (prompt, 16)
    assert (ids(call.prompt_ids), ids(call.sampled_ids)[-1]) == (prompt, EOS)
    assert (call.dialect, call.turns, call.trainable) == (
        "completions", [{"role": "user", "content": "Once <|im_start|>"}], True
    )  # fmt: skip


async def test_a_prompt_of_token_ids_is_sent_as_it_is_and_a_repeat_is_answered(tmp_path, database):
    async with scene(tmp_path, database, says="ok") as stage, stage.client() as client:
        create: Any = client.completions.create
        headers = {"x-stainless-retry-count": "1"}
        first = await create(model="m", prompt=[[40, 41]], n=2, seed=1)
        again = await create(model="m", prompt=[[40, 41]], n=2, seed=1, extra_headers=headers)
        chat = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": ""}])
        calls = await stage.calls()
        assert [asked["input_ids"] for asked in stage.engine.requests[:2]] == [[40, 41]] * 2
        assert len(stage.engine.requests) == 3
    assert [choice.text for choice in first.choices] == ["ok", "ok"]
    assert again == first
    assert (chat.choices[0].message.content, calls[-1].parent_call_id) == ("ok", None)


async def test_null_means_the_default_number_of_tokens(tmp_path, database):
    async with scene(tmp_path, database, says="ok") as stage, stage.client() as client:
        create: Any = client.completions.create
        await create(model="m", prompt="a", max_tokens=None, extra_body={"max_tokens": None})
        [asked] = stage.engine.requests
    assert asked["sampling_params"]["max_new_tokens"] == 16


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": ""}, {"prompt": []}, {"prompt": ["a", "b"]}, {"prompt": [-1]}, {"echo": True},
        {"suffix": "x"}, {"best_of": 3}, {"messages": [1]}, {"logprobs": 6}, {"temperature": 3},
    ],
)  # fmt: skip
async def test_a_wrong_body_is_refused(tmp_path, database, change):
    async with scene(tmp_path, database) as stage, stage.client() as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.completions.create(model="m", prompt="hi", extra_body=change)
        assert stage.engine.requests == []
    assert next(iter(change)) in refused.value.message
