"""What an engine answers, cut anywhere and spoilt anywhere: read whole, or taken for an engine that is lost."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.services.gateway.choice import Absorber, Choice, EngineLost, Job, following, refusal
from leyden.services.gateway.errors import BadRequest
from leyden.services.gateway.request import Sampling
from leyden.services.gateway.tokens import Tokens
from leyden.services.gateway.told import Told

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


Taken = tuple[list[Any], list[Any], list[Any]]
"""Tokens, and of each its log-probability and its policy version."""


@dataclass(frozen=True)
class Growing:
    """A cumulative stream as an engine tells it.

    Args: ends: how many tokens each event tells; versions: whose weights sampled each token, and of which policy
        version; counts_first: whether other fields stand before the log-probabilities, too; is_timed: whether each
        event tells a time; text: of each token, beside its log-probability
    """

    tokens: list[int]
    ends: list[int]
    versions: list[tuple[str, int]]
    counts_first: bool
    is_timed: bool
    is_spaced: bool
    text: str | None

    def event(self, number: int) -> bytes:
        end = self.ends[number]
        spans: list[dict[str, Any]] = []
        for place, (run, version) in enumerate(self.versions[:end]):
            named = f"{run}:{version}"
            if not spans or spans[-1]["version"] != named:
                spans.append({"version": named, "start": place, "end": place})
            spans[-1]["end"] = place + 1
        is_last = number + 1 == len(self.ends)
        counts: dict[str, Any] = {"completion_tokens": end, "weight_versions": spans}
        if self.is_timed:
            counts["e2e_latency"] = 0.25 * end
        logprobs = [[self.logprob(place), token, self.text] for place, token in enumerate(self.tokens[:end])]
        meta = {"finish_reason": {"type": "stop"} if is_last else None, **(counts if self.counts_first else {})}
        meta |= {"output_token_logprobs": logprobs} | counts
        document = {"text": ' "output_ids":[[9]' * end, "output_ids": self.tokens[:end], "meta_info": meta}
        written = json.dumps(document).encode() if self.is_spaced else orjson.dumps(document)
        return b"data: " + written + b"\n\n"

    @staticmethod
    def logprob(place: int) -> float:
        return -0.1 * place

    @property
    def events(self) -> list[bytes]:
        return [self.event(number) for number in range(len(self.ends))]

    def told_until(self, events: int) -> Taken:
        """What these many events tell of tokens that the choice's own run sampled."""
        end = self.ends[events - 1] if events else 0
        own = next((place for place, (run, _) in enumerate(self.versions) if run != "run-a"), end)
        kept = min(end, own)
        logprobs = [self.logprob(place) for place in range(kept)]
        return self.tokens[:kept], logprobs, [version for _, version in self.versions[:kept]]


TEXTS = st.sampled_from([None, "a", "]]", "]],", ',["', "\\"])


@st.composite
def growing(draw: st.DrawFn, *, runs: Sequence[str] = ("run-a",)) -> Growing:
    # The same token again and again is told from itself by its place alone.
    tokens = draw(st.lists(st.integers(0, 99) | st.just(7), min_size=1, max_size=8))
    ends = sorted({*draw(st.lists(st.integers(1, len(tokens)))), len(tokens)})
    versions = sorted(draw(st.tuples(st.sampled_from(runs), st.integers(0, 11))) for _ in tokens)
    return Growing(tokens, ends, versions, *draw(st.tuples(st.booleans(), st.booleans(), st.booleans(), TEXTS)))


def taken_of(choice: Choice) -> Taken:
    return choice.sampled_ids, choice.logprobs, choice.policy_versions


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
FRAMES = st.sampled_from(
    ["data: {}\n\n", "data:{}\n\n", ": ping\n\ndata: {}\n\n", "id: 1\ndata: {}\n\n", "data: {}\r\n\r\n"]
)


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


@given(growing(), st.data())
def test_of_a_stream_that_breaks_off_anywhere_every_token_is_kept_that_came_whole(
    stream: Growing, data: st.DataObject
) -> None:
    body = b"".join(stream.events)
    length = data.draw(st.integers(0, len(body)))
    taken = absorber()
    follow(taken, cut(data, body[:length]))
    whole = body[:length].count(b"\n\n")
    assert taken_of(taken.choice) == stream.told_until(whole)
    assert taken.choice.finish == ("stop" if whole == len(stream.ends) else None)


@given(growing(runs=("run-a", "run-b")))
def test_of_a_stream_that_goes_over_to_another_run_anywhere_its_own_tokens_are_kept(stream: Growing) -> None:
    taken = absorber()
    take = following(taken, 0.0)
    for number, event in enumerate(stream.events, 1):
        is_own = all(run == "run-a" for run, _ in stream.versions[: stream.ends[number - 1]])
        with contextlib.nullcontext() if is_own else pytest.raises(EngineLost):
            take(event)
        assert taken_of(taken.choice) == stream.told_until(number)
        if not is_own:
            return


@given(growing(), st.data())
def test_an_event_spoilt_anywhere_takes_nothing_back_and_adds_no_token_that_is_none(
    stream: Growing, data: st.DataObject
) -> None:
    events = stream.events
    number = data.draw(st.integers(0, len(events) - 1))
    event = events[number]
    start = data.draw(st.integers(0, len(event)))
    end = data.draw(st.integers(start, min(len(event), start + 12)))
    put = data.draw(st.sampled_from([b"", b"]", b"]]", b",", b"5", b'"', b"[", b"}", b"-", b"null", b"\n\n"]))
    events[number] = event[:start] + put + event[end:]
    before = stream.told_until(number)
    taken = absorber()
    take = following(taken, 0.0)
    for place, event in enumerate(events):
        try:
            take(event)
        except BROKEN:
            assert place >= number
            break
    ids, logprobs, versions = taken_of(taken.choice)
    assert all(now[: len(once)] == once for now, once in zip((ids, logprobs, versions), before, strict=True))
    assert len(ids) == len(logprobs) == len(versions)
    assert all(type(token) is int and 0 <= token < 100 for token in ids)
    assert all(type(logprob) is float and -1e30 <= logprob <= 0.01 for logprob in logprobs)


def cumulative(tokens: Sequence[int], *, logprobs: int | None = None, text: str | None = None) -> bytes:
    """An event that lists these tokens, and log-probabilities of the first so many."""
    document = answer(tokens, finish=None)
    entries = [[-0.5, token, text] for token in tokens]
    document["meta_info"] |= {"completion_tokens": len(tokens), "output_token_logprobs": entries[:logprobs]}
    return b"data: " + orjson.dumps(document)


def read_of(events: Sequence[bytes]) -> list[tuple[list[int], int]]:
    """The tokens that are read of each event, and how many were told before them."""
    stream = Told(cuts=True)
    read = [entry for event in events for entry in stream.documents([event])]
    return [(document["output_ids"], first) for document, first in read]


def test_of_a_cumulative_stream_known_tokens_are_cut_out_and_texts_that_hold_brackets_are_read_whole() -> None:
    def told(text: str | None) -> list[tuple[list[int], int]]:
        return read_of([cumulative([5, 6, 7, 8][:end], text=text) for end in range(1, 5)])

    assert told(None) == told("a") == [([5], 0), ([5, 6], 0), ([7], 2), ([8], 3)]
    assert told("]]") == told("]],") == [([5], 0), ([5, 6], 0), ([5, 6, 7], 0), ([5, 6, 7, 8], 0)]


@pytest.mark.parametrize(
    "event",
    [
        cumulative([15, 16, 17, 18]),
        cumulative([5, 7, 6, 8]),
        cumulative([5, 6]),
        cumulative([5]),
        cumulative([5, 6, 7], logprobs=2),
        cumulative([5, 6, 7], logprobs=1),
        cumulative([5, 6, 7]).replace(b'"output_token_logprobs":[[-0.5', b'"output_token_logprobs":[[-0.125'),
    ],
)
def test_an_event_that_does_not_go_on_where_the_last_one_ended_is_read_whole(event: bytes) -> None:
    whole = orjson.loads(event[5:])["output_ids"]
    assert read_of([cumulative([5]), cumulative([5, 6]), event])[2:] == [(whole, 0)]


def counted(end: int, version: int = 3, *, is_first: bool = False, **meta: Any) -> bytes:
    """A cumulative event of so many tokens that tells nothing else but whose they are.

    Args: is_first: whether that stands before the log-probabilities
    """
    document = answer(range(end), finish=None)
    told = {"weight_version": f"run-a:{version}", **meta}
    document["meta_info"] = (told if is_first else {}) | document["meta_info"] | told | {"completion_tokens": end}
    return b"data: " + orjson.dumps(document) + b"\n\n"


def spans(*ends: int) -> list[dict[str, Any]]:
    """Of tokens up to each of these ends, sampled by versions 3, 4 and so on."""
    return [
        {"version": f"run-a:{version}", "start": start, "end": end}
        for version, (start, end) in enumerate(pairwise([0, *ends]), 3)
    ]


def test_of_events_in_which_tokens_and_their_count_alone_are_new_no_document_is_read() -> None:
    stream = Told(cuts=True)
    for end in (1, 2, 3):
        event = counted(end, weight_versions=spans(end))
        assert stream.more(event) is None
        list(stream.documents([event]))
    for start, end in pairwise([3, 4, 6, 10, 11]):
        new = list(range(start, end)), [[-0.5, token, None] for token in range(start, end)]
        assert stream.more(counted(end, weight_versions=spans(end))) == new


def test_events_that_come_together_and_alone_are_alike() -> None:
    stream = Told(cuts=True)
    for end in range(1, 30):
        # Taken apart, an event comes without the lines after it.
        event = counted(end) if end % 3 else counted(end)[:-2]
        told = stream.more(event)
        assert (told is None) == (end <= 3)
        if told is None:
            list(stream.documents([event]))


@pytest.mark.parametrize(
    ("events", "versions"),
    [
        ([counted(4, 4), counted(5, 5)], [4, 5]),
        ([counted(4, 4, is_first=True), counted(5, 5, is_first=True)], [4, 5]),
        ([counted(4, weight_versions=spans(3, 4)), counted(5, weight_versions=spans(3, 5))], [4, 4]),
        ([counted(4, weight_versions=spans(4, 4)), counted(5, weight_versions=spans(4, 5))], [3, 4]),
        ([counted(end, weight_versions=spans(5, 9)) for end in (4, 5, 6)], [3, 3, 4]),
        ([counted(end, is_first=True, weight_versions=spans(5, 9)) for end in (4, 5, 6)], [3, 3, 4]),
    ],
)
@pytest.mark.parametrize("is_first", [False, True])
def test_a_token_has_the_version_that_its_event_tells_whatever_the_last_one_told(
    events: list[bytes], versions: list[int], is_first: bool
) -> None:
    taken = absorber()
    follow(taken, [*(counted(end, is_first=is_first) for end in (1, 2, 3)), *events])
    tokens = list(range(3 + len(events)))
    assert taken_of(taken.choice) == (tokens, [-0.5] * len(tokens), [3, 3, 3, *versions])


@pytest.mark.parametrize("is_first", [False, True])
def test_the_end_is_seen_where_all_events_before_it_were_alike(is_first: bool) -> None:
    taken = absorber()
    events = [
        counted(end, is_first=is_first, finish_reason={"type": "stop"} if end == 6 else None) for end in range(1, 7)
    ]
    follow(taken, events)
    assert (taken.choice.sampled_ids, taken.choice.finish) == ([0, 1, 2, 3, 4, 5], "stop")


@pytest.mark.parametrize("spoilt", [b"100", b"-1", b"true", b"1.0", b'"3"'])
def test_what_is_no_token_is_refused_where_nothing_else_is_new(spoilt: bytes) -> None:
    taken = absorber()
    event = counted(4).replace(b"2,3]", b"2,%b]" % spoilt).replace(b"[-0.5,3,null]", b"[-0.5,%b,null]" % spoilt)
    take = following(taken, 0.0)
    for end in (1, 2, 3):
        take(counted(end))
    with pytest.raises(ValueError, match="is no token"):
        take(event)
    assert taken_of(taken.choice) == ([0, 1, 2], [-0.5] * 3, [3] * 3)


def test_more_tokens_than_were_asked_for_are_refused_where_nothing_else_is_new() -> None:
    taken = absorber(max_tokens=4)
    with pytest.raises(ValueError, match="5 tokens where 4 were asked for"):
        follow(taken, [counted(end) for end in (1, 2, 3, 4, 5)])
    assert taken.choice.sampled_ids == [0, 1, 2, 3]


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
