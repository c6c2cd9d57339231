"""The gateway records nothing of an engine's garbage answers and requests the tokens again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from leyden.libs.store.database import Database
from tests.fakes.gateway import Scene, scene
from tests.fakes.scripted_engine import logprob_of

HI: list[Any] = [{"role": "user", "content": "hi"}]
EOS_ID = 259
Damage = Callable[[dict[str, Any]], Any]


def meta(**changes: Any) -> Damage:
    return lambda document: document | {"meta_info": document["meta_info"] | changes}


def entries(change: Callable[[list[Any]], Any]) -> Damage:
    return lambda document: meta(
        output_token_logprobs=[change(entry) for entry in document["meta_info"]["output_token_logprobs"]]
    )(document)


def tokens(change: Callable[[int], Any]) -> Damage:
    """Wrong tokens of which the log-probabilities speak too."""
    return lambda document: entries(lambda entry: [entry[0], change(entry[1]), None])(
        document | {"output_ids": [change(token) for token in document["output_ids"]]}
    )


GARBAGE: dict[str, Damage] = {
    "a list": lambda document: [document],
    "null": lambda _: None,
    "a text": lambda _: "Internal Server Error",
    "an empty object": lambda _: {},
    "an error in words": lambda _: {"error": "out of memory"},
    "an error with a code in words": lambda _: {"error": {"code": "oom", "message": "out of memory"}},
    "no tokens": lambda document: meta(output_token_logprobs=[])(document | {"output_ids": []}),
    "tokens in words": tokens(str),
    "tokens beyond the vocabulary": tokens(lambda token: token + 10**6),
    "negative tokens": tokens(lambda token: -1 - token),
    "fractions of tokens": tokens(lambda token: token + 0.5),
    "tokens that are true": tokens(lambda _: True),
    "more tokens than were asked for": lambda document: entries(lambda entry: entry)(
        meta(output_token_logprobs=document["meta_info"]["output_token_logprobs"] * 50)(
            document | {"output_ids": document["output_ids"] * 50}
        )
    ),
    "no log-probabilities": meta(output_token_logprobs=None),
    "log-probabilities of other tokens": entries(lambda entry: [entry[0], entry[1] + 1, None]),
    "log-probabilities that are null": entries(lambda entry: [None, *entry[1:]]),
    "log-probabilities in words": entries(lambda entry: ["NaN", *entry[1:]]),
    "probabilities above one": entries(lambda entry: [3.5, *entry[1:]]),
    "log-probabilities beyond float32": entries(lambda entry: [-1e300, *entry[1:]]),
    "empty entries": entries(lambda _: []),
    "a finish reason in words": meta(finish_reason="stop"),
    "no weight version": meta(weight_version=None, weight_versions=None),
    "weight versions that overlap": lambda document: meta(weight_versions=document["meta_info"]["weight_versions"] * 2)(
        document
    ),
    "weight versions in words": meta(weight_versions="run-test:0"),
}


async def ask(stage: Scene, *, stream: bool) -> str:
    async with stage.client() as client:
        create: Any = client.chat.completions.create
        answer = await create(model="m", messages=HI, stream=stream, max_tokens=20)
        if not stream:
            return str(answer.choices[0].message.content)
        chunks = [chunk async for chunk in answer]
        return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", GARBAGE)
async def test_garbage_answers_are_requested_again_and_never_recorded(
    tmp_path: Path, database: Database, name: str, stream: bool
) -> None:
    engine = {"damage": GARBAGE[name], "damaged": 2, "tokens_per_chunk": 20}
    async with scene(tmp_path, database, engine=engine) as stage:
        assert await ask(stage, stream=stream) == "Hello."
        (call,) = await stage.calls()
        expected = [*stage.model.tokenizer.encode("Hello.").tolist(), EOS_ID]
    assert len(stage.engine.requests) == 3
    assert (call.status, call.trainable, call.min_policy_version) == ("completed", True, 0)
    assert np.frombuffer(call.sampled_ids, "<i4").tolist() == expected
    assert np.frombuffer(call.generator_logprobs, "<f4").tolist() == [logprob_of(k) for k in range(len(expected))]


async def test_a_call_to_an_engine_that_only_answers_garbage_fails_with_retry_after(
    tmp_path: Path, database: Database
) -> None:
    engine = {"damage": GARBAGE["log-probabilities that are null"], "damaged": 10**6}
    async with scene(tmp_path, database, engine=engine, hold_seconds=0.5) as stage:
        with pytest.raises(openai.InternalServerError) as refused:
            await ask(stage, stream=False)
        (call,) = await stage.calls()
    assert (refused.value.status_code, refused.value.response.headers["retry-after"]) == (503, "10")
    assert (call.status, call.trainable, call.completion_tokens) == ("failed", False, 0)
    cause = f"The last one, {stage.engine.url}, lost the request: ValueError: None is no log-probability"
    assert call.untrainable_reason.endswith(cause)
    assert stage.engine.url not in refused.value.message
