"""What an engine answers, cut anywhere and spoilt anywhere: read whole, or taken for an engine that is lost."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.choice import Absorber, Choice, EngineLost, Job, following, refusal
from services.gateway.errors import BadRequest
from services.gateway.request import Sampling
from services.gateway.tokens import Tokens
from services.gateway.told import Told

SAMPLING = cast(Sampling, SimpleNamespace())
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
# What breaks an answer: an error as Python raises them, or a refusal of ours.
BROKEN = (LookupError, TypeError, ValueError, AttributeError, OverflowError, EngineLost, BadRequest)


def answer(tokens: Sequence[int], *, finish: dict[str, Any] | None) -> dict[str, Any]:
    """A cumulative answer of SGLang's."""
    meta = {
        "output_token_logprobs": [[-0.5, token, None] for token in tokens],
        "finish_reason": finish,
        "weight_version": "run-a:3",
        "cached_tokens": 2,
    }
    return {"output_ids": list(tokens), "meta_info": meta}


def absorber(max_tokens: int = 8) -> Absorber:
    job = Job(
        "run-a", "run-a.0.0", Tokens.of(np.array([1], dtype=np.int32)), SAMPLING, 1.0, max_tokens, 100, 0, (), True
    )
    return Absorber(job, Choice("c", 0, None), lambda: None)


def follow(taken: Absorber, pieces: Sequence[bytes]) -> None:
    take = following(taken, 0.0)
    for piece in pieces:
        take(piece)


def cut(data: st.DataObject, body: bytes) -> list[bytes]:
    inner = data.draw(st.lists(st.integers(0, len(body)), max_size=12))
    return [body[start:end] for start, end in pairwise(sorted({0, len(body), *inner}))]


TOKENS = st.lists(st.integers(0, 99), min_size=1, max_size=6)
FRAMES = st.sampled_from(["data: {}\n\n", "data:{}\n\n", ": ping\n\ndata: {}\n\n", "id: 1\ndata: {}\n\n"])


@given(TOKENS, FRAMES, st.data())
def test_a_stream_cut_anywhere_says_the_same(tokens: list[int], frame: str, data: st.DataObject) -> None:
    last = {"type": "stop"}
    documents = [answer(tokens[:end], finish=last if end == len(tokens) else None) for end in range(1, len(tokens) + 1)]
    body = "".join(frame.replace("{}", orjson.dumps(document).decode()) for document in documents).encode()
    taken = absorber()
    follow(taken, cut(data, body + b"data: [DONE]\n\n"))
    choice = taken.choice
    assert (choice.sampled_ids, choice.policy_versions) == (tokens, [3] * len(tokens))
    assert (choice.logprobs, choice.finish) == ([-0.5] * len(tokens), "stop")


@given(st.lists(st.binary(max_size=40), max_size=6), st.data())
def test_noise_is_an_engine_that_is_lost_and_nothing_is_taken(noise: list[bytes], data: st.DataObject) -> None:
    taken = absorber()
    body = b"\n\n".join(data.draw(st.sampled_from([b"data:", b"data: ", b""])) + piece for piece in noise) + b"\n\n"
    with contextlib.suppress(*BROKEN):
        follow(taken, cut(data, body))
    assert (taken.choice.sampled_ids, taken.choice.finish) == ([], None)


@given(TOKENS, st.data())
def test_an_answer_spoilt_anywhere_is_taken_whole_or_not_at_all(tokens: list[int], data: st.DataObject) -> None:
    def spoilt(value: Any) -> Any:
        if data.draw(st.integers(0, 9)) == 0:
            return data.draw(JSON_VALUES)
        if isinstance(value, dict):
            return {name: spoilt(inner) for name, inner in value.items()}
        return [spoilt(inner) for inner in value] if isinstance(value, list) else value

    taken = absorber()
    try:
        taken.absorb(spoilt(answer(tokens, finish={"type": "length"})), 0.0)
    except BROKEN:
        assert taken.choice.finish is None
    choice = taken.choice
    assert len(choice.sampled_ids) == len(choice.logprobs) == len(choice.policy_versions)
    assert all(type(token) is int and 0 <= token < 100 for token in choice.sampled_ids)
    assert all(type(logprob) is float and logprob <= 0.01 for logprob in choice.logprobs)
    assert all(type(version) is int and version >= 0 for version in choice.policy_versions)


@given(st.integers(100, 599), st.text(max_size=50) | JSON_VALUES.map(lambda value: orjson.dumps(value).decode()))
def test_a_refusal_of_any_words_is_one_of_ours(status: int, text: str) -> None:
    assert isinstance(refusal(status, text), EngineLost | BadRequest)


@given(st.lists(st.integers(0, 99), min_size=1, max_size=8), st.booleans(), st.booleans(), st.data())
def test_a_stream_that_tells_all_so_far_or_each_token_once_says_the_same(
    tokens: list[int], is_incremental: bool, is_spaced: bool, data: st.DataObject
) -> None:
    ends = sorted({*data.draw(st.lists(st.integers(1, len(tokens)))), len(tokens)})
    frames = []
    for start, end in pairwise([0, *ends]):
        first = start if is_incremental else 0
        document = answer(tokens[first:end], finish={"type": "stop"} if end == len(tokens) else None)
        document["meta_info"] |= {
            "completion_tokens": end,
            "weight_versions": [{"version": "run-a:3", "start": 0, "end": end}],
        }
        document = {"text": '"output_ids":[[9]]' * end} | document
        text = json.dumps(document) if is_spaced else orjson.dumps(document).decode()
        frames.append(f"data: {text}\n\n")
    taken = absorber()
    follow(taken, cut(data, "".join(frames).encode() + b"data: [DONE]\n\n"))
    choice = taken.choice
    assert (choice.sampled_ids, choice.logprobs) == (tokens, [-0.5] * len(tokens))
    assert (choice.policy_versions, choice.finish) == ([3] * len(tokens), "stop")


def test_of_a_cumulative_stream_known_tokens_are_cut_out_and_texts_that_hold_brackets_are_read_whole() -> None:
    def event(tokens: list[int], text: str | None = None) -> bytes:
        document = answer(tokens, finish=None)
        document["meta_info"]["completion_tokens"] = len(tokens)
        document["meta_info"]["output_token_logprobs"] = [[-0.5, token, text] for token in tokens]
        return orjson.dumps(document)

    def told(texts: str | None) -> list[tuple[list[int], int]]:
        stream = Told(cuts=True)
        events = [event([5, 6, 7, 8][:end], texts) for end in range(1, 5)]
        read = [entry for one in events for entry in stream.documents([one])]
        return [(document["output_ids"], first) for document, first in read]

    assert told(None) == [([5], 0), ([5, 6], 0), ([7], 2), ([8], 3)]
    assert told("]]") == [([5], 0), ([5, 6], 0), ([5, 6, 7], 0), ([5, 6, 7, 8], 0)]


def test_an_event_without_tokens_does_not_make_a_stream_one_that_tells_each_token_once() -> None:
    taken = absorber()
    for tokens, count in (([1, 2], 2), ([], 2), ([1, 2, 3], 3), ([1, 2, 3, 4], 4)):
        document = answer(tokens, finish={"type": "stop"} if count == 4 else None)
        document["meta_info"]["completion_tokens"] = count
        follow(taken, [b"data: " + orjson.dumps(document) + b"\n\n"])
    assert taken.choice.sampled_ids == [1, 2, 3, 4]


@pytest.mark.parametrize("spans", [[(2, 4, 2), (0, 2, 1)], [(0, 1, 1), (2, 4, 2)], [(0, 3, 1), (2, 4, 2)]])
def test_weight_versions_that_do_not_follow_one_another_are_no_answer(spans: list[tuple[int, int, int]]) -> None:
    document = answer([1, 2, 3, 4], finish={"type": "stop"})
    document["meta_info"]["weight_versions"] = [
        {"version": f"run-a:{version}", "start": start, "end": end} for start, end, version in spans
    ]
    taken = absorber()
    with pytest.raises(ValueError, match="follow one another"):
        taken.absorb(document, 0.0)
    assert taken.choice.sampled_ids == []
