"""Parsing SGLang's answers: complete, cumulative, incremental, and with an invalid value anywhere."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.services.engine.request import SamplingParams
from leyden.services.gateway.calls.context import SampledTokens, Sampling, seed_of_call, seed_of_rollout
from leyden.services.gateway.engine.sglang import (
    EngineLost,
    EngineRequest,
    SampleBuilder,
    read_event,
    refusal,
    request_body,
)
from leyden.services.gateway.errors import BadRequest, Unavailable

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
REFUSED = (EngineLost, BadRequest, Unavailable)
STOP = {"type": "stop"}
TOKENS = st.lists(st.integers(0, 99), min_size=1, max_size=8)


def request(**fields: Any) -> EngineRequest:
    values: dict[str, Any] = {
        "run_id": "run-a",
        "rollout_id": "run-a.0.0",
        "pool": "default",
        "prompt_ids": np.array([1, 2], dtype=np.int32),
        "sampling": Sampling(),
        "temperature": 1.0,
        "max_tokens": 8,
        "vocab_size": 100,
        "top_logprobs": 0,
        "eos_ids": (2,),
        "stream": True,
    }
    return EngineRequest(**{**values, **fields})


def builder(tokens: SampledTokens | None = None, **fields: Any) -> tuple[SampleBuilder, SampledTokens]:
    tokens = tokens or SampledTokens("c", 0, None)
    return SampleBuilder(request(**fields), tokens, lambda: None), tokens


def event(
    tokens: Sequence[int], *, total: int | None = None, finish: Any = None, label: str = "run-a:3", **meta: Any
) -> bytes:
    """An event that lists these tokens and says how many there are in all."""
    document = {
        "text": "",
        "output_ids": list(tokens),
        "meta_info": {
            "finish_reason": finish,
            "weight_version": label,
            "completion_tokens": len(tokens) if total is None else total,
            "cached_tokens": 2,
            "output_token_logprobs": [[-0.5, token, None] for token in tokens],
            **meta,
        },
    }
    return orjson.dumps(document)


def spans(*ends: int, run: str = "run-a") -> list[dict[str, Any]]:
    """Spans of versions 3, 4 and so on that end at these tokens."""
    return [
        {"version": f"{run}:{version}", "start": start, "end": end}
        for version, (start, end) in enumerate(pairwise([0, *ends]), 3)
    ]


def is_even(tokens: SampledTokens) -> bool:
    return len(tokens.ids) == len(tokens.logprobs) == len(tokens.policy_versions)


@dataclass(frozen=True)
class Stream:
    """A stream as an engine sends it: `ends` says how many tokens have been sent with each event."""

    tokens: list[int]
    ends: list[int]
    versions: list[tuple[str, int]]
    is_incremental: bool
    spans_everywhere: bool

    def events(self) -> list[bytes]:
        return [self._event(start, end) for start, end in pairwise([0, *self.ends])]

    def _event(self, start: int, end: int) -> bytes:
        first = start if self.is_incremental else 0
        is_last = end == len(self.tokens)
        run, version = self.versions[end - 1]
        named = self._spans(end) if is_last or self.spans_everywhere else []
        told = {"weight_versions": named} if named else {}
        return event(
            self.tokens[first:end],
            total=end,
            label=f"{run}:{version}",
            finish=STOP if is_last else None,
            **told,
        )

    def _spans(self, end: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for place, (run, version) in enumerate(self.versions[:end]):
            named = f"{run}:{version}"
            if not found or found[-1]["version"] != named:
                found.append({"version": named, "start": place, "end": place})
            found[-1]["end"] = place + 1
        return found


@st.composite
def streams(draw: st.DrawFn, *, runs: Sequence[str] = ("run-a",)) -> Stream:
    tokens = draw(TOKENS)
    ends = sorted({*draw(st.lists(st.integers(1, len(tokens)))), len(tokens)})
    versions = sorted(draw(st.tuples(st.sampled_from(runs), st.integers(0, 11))) for _ in tokens)
    return Stream(tokens, ends, versions, draw(st.booleans()), draw(st.booleans()))


@given(streams())
def test_cumulative_and_incremental_streams_give_the_same_tokens_and_versions(stream: Stream) -> None:
    build, tokens = builder()
    for number, data in enumerate(stream.events()):
        build.add_event(read_event(data))
        assert tokens.ids == stream.tokens[: stream.ends[number]]
        assert is_even(tokens)
    assert tokens.logprobs == [-0.5] * len(stream.tokens)
    assert tokens.policy_versions == [version for _, version in stream.versions]
    assert (tokens.finish, tokens.cached_tokens) == ("stop", 2)


@given(TOKENS, st.booleans())
def test_an_answer_may_be_one_event(tokens: list[int], counts: bool) -> None:
    build, sampled = builder(stream=False)
    build.add_event(read_event(event(tokens, finish={"type": "length", "length": 8}, **({} if counts else COUNTLESS))))
    assert (sampled.ids, sampled.policy_versions) == (tokens, [3] * len(tokens))
    assert sampled.finish == "length"
    assert sampled.accepted_at is not None and sampled.first_token_at is not None


COUNTLESS = {"completion_tokens": None}


def test_versions_are_provisional_until_the_last_event_corrects_them() -> None:
    """As SGLang 0.5.23 sends an incremental stream: spans come with the last event, labels before are late."""
    build, tokens = builder()
    build.add_event(read_event(event([11, 12], total=2, label="run-a:3")))
    build.add_event(read_event(event([13, 14], total=4, label="run-a:4")))
    assert tokens.policy_versions == [3, 3, 3, 3]
    build.add_event(read_event(event([15], total=5, label="run-a:4", finish=STOP, weight_versions=spans(3, 5))))
    assert tokens.policy_versions == [3, 3, 3, 4, 4]


def test_an_answer_without_a_last_event_never_looks_newer_than_it_is() -> None:
    """The weights changed somewhere within a piece of an answer that is not streamed; then the engine was lost."""
    build, tokens = builder(stream=False)
    build.add_event(read_event(event([11], total=1, label="run-a:3")))
    build.add_event(read_event(event([11, 12, 13, 14], total=4, label="run-a:4")))
    build.add_event(read_event(event([11, 12, 13, 14, 15, 16], total=6, label="run-a:4")))
    assert tokens.policy_versions == [3, 3, 3, 3, 4, 4]


def test_the_last_event_of_an_aborted_request_corrects_versions_too() -> None:
    build, tokens = builder()
    build.add_event(read_event(event([11, 12], total=2, label="run-a:4")))
    build.add_event(
        read_event(event([], total=2, finish={"type": "abort", "message": "Aborted"}, weight_versions=spans(1, 2)))
    )
    assert (tokens.policy_versions, build.was_aborted, tokens.finish) == ([3, 4], True, None)


def test_spans_that_do_not_start_at_the_first_token_are_ignored() -> None:
    build, tokens = builder()
    build.add_event(read_event(event([11, 12], total=2)))
    later = [{"version": "run-a:5", "start": 2, "end": 3}]
    build.add_event(read_event(event([13], total=3, finish=STOP, weight_versions=later)))
    assert tokens.policy_versions == [3, 3, 5]


def test_versions_of_an_earlier_request_are_not_touched() -> None:
    tokens = SampledTokens("c", 0, None, ids=[7, 8], logprobs=[-1.0, -1.0], policy_versions=[1, 2])
    build, _ = builder(tokens)
    build.add_event(read_event(event([11], total=1)))
    build.add_event(read_event(event([12], total=2, finish=STOP, weight_versions=spans(1, 2))))
    assert (tokens.ids, tokens.policy_versions) == ([7, 8, 11, 12], [1, 2, 3, 4])


def test_tokens_beyond_the_requested_number_are_refused() -> None:
    tokens = SampledTokens("c", 0, None, ids=[7, 8], logprobs=[-1.0, -1.0], policy_versions=[1, 2])
    build, _ = builder(tokens, max_tokens=4)
    with pytest.raises(EngineLost, match="3 tokens where 2 were asked for"):
        build.add_event(read_event(event([1, 2, 3])))
    assert tokens.ids == [7, 8]


@given(streams(runs=("run-a", "run-b")))
def test_another_runs_weights_cut_the_answer(stream: Stream) -> None:
    build, tokens = builder()
    own = sum(run == "run-a" for run, _ in stream.versions)
    for number, data in enumerate(stream.events()):
        if stream.ends[number] <= own:
            build.add_event(read_event(data))
            continue
        with pytest.raises(EngineLost) as lost:
            build.add_event(read_event(data))
        assert lost.value.cause == "wrong_run"
        break
    # An event without spans names one version for all its tokens.
    assert tokens.ids == stream.tokens[: len(tokens.ids)]
    assert len(tokens.ids) <= own and is_even(tokens)


def test_an_answer_whose_accepted_tokens_turn_out_to_be_another_runs_fails() -> None:
    build, tokens = builder()
    build.add_event(read_event(event([11, 12], total=2)))
    foreign = [*spans(1), {"version": "run-b:0", "start": 1, "end": 3}]
    with pytest.raises(Unavailable):
        build.add_event(read_event(event([13], total=3, finish=STOP, weight_versions=foreign)))
    assert (tokens.ids, tokens.finish) == ([11, 12], None)


@pytest.mark.parametrize("label", ["default", "run-a", "run-a:x", None])
def test_an_engine_that_names_no_policy_is_lost(label: Any) -> None:
    build, tokens = builder()
    with pytest.raises(EngineLost) as lost:
        build.add_event(read_event(event([11], label=label)))
    assert (lost.value.cause, tokens.ids) == ("wrong_run", [])


@given(TOKENS, st.data())
def test_an_answer_spoilt_anywhere_is_added_or_refused_as_one(tokens: list[int], data: st.DataObject) -> None:
    def spoilt(value: Any) -> Any:
        if data.draw(st.integers(0, 9)) == 0:
            return data.draw(JSON_VALUES)
        if isinstance(value, dict):
            return {name: spoilt(inner) for name, inner in value.items()}
        return [spoilt(inner) for inner in value] if isinstance(value, list) else value

    build, sampled = builder(top_logprobs=0)
    try:
        build.add_event(read_event(orjson.dumps(spoilt(orjson.loads(event(tokens, finish={"type": "length"}))))))
    except REFUSED:
        assert sampled.finish is None
    assert is_even(sampled)
    assert all(type(token) is int and 0 <= token < 100 for token in sampled.ids)
    assert all(type(logprob) is float and logprob <= 0.01 for logprob in sampled.logprobs)
    assert all(type(version) is int and version >= 0 for version in sampled.policy_versions)


@given(streams(), st.data())
def test_an_event_with_any_invalid_value_changes_no_received_tokens(stream: Stream, data: st.DataObject) -> None:
    events = stream.events()
    number = data.draw(st.integers(0, len(events) - 1))
    whole = events[number]
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, min(len(whole), start + 12)))
    put = data.draw(st.sampled_from([b"", b"]", b"]]", b",", b"5", b'"', b"[", b"}", b"-", b"null"]))
    events[number] = whole[:start] + put + whole[end:]
    build, tokens = builder()
    for data_of_event in events:
        before = list(tokens.ids)
        with contextlib.suppress(*REFUSED):
            build.add_event(read_event(data_of_event))
        assert tokens.ids[: len(before)] == before and is_even(tokens)
        assert all(type(token) is int and 0 <= token < 100 for token in tokens.ids)
        assert all(type(logprob) is float and -1e30 <= logprob <= 0.01 for logprob in tokens.logprobs)


@given(st.binary(max_size=60))
def test_noise_is_malformed(noise: bytes) -> None:
    build, tokens = builder()
    with pytest.raises(EngineLost) as lost:
        build.add_event(read_event(noise))
    assert (lost.value.cause, tokens.ids, tokens.finish) == ("malformed", [], None)


@pytest.mark.parametrize(
    ("data", "detail"),
    [
        (event([100]), "is no token"),
        (event([True]), "is no token"),
        (event([-1]), "is no token"),
        (event([5], output_token_logprobs=[[-0.5, 6, None]]), "is no token"),
        (event([5], output_token_logprobs=[[0.5, 5, None]]), "is no log-probability"),
        (event([5], output_token_logprobs=[[None, 5, None]]), "is no log-probability"),
        (event([5], output_token_logprobs=[[-1e31, 5, None]]), "is no log-probability"),
        (event([5], finish=STOP, output_token_logprobs=[]), "1 tokens with 0 log-probabilities"),
        (event([], finish=STOP), "an answer of 0 tokens"),
        (event(range(9)), "9 tokens where 8 were asked for"),
        (event([5], total=3), "tokens from number 2 on after 0 tokens"),
        (event([5, 6], total=1), "tokens from number -1 on"),
        (event([5, 6, 7, 8], weight_versions=list(reversed(spans(2, 4)))), "do not follow one another"),
        (event([5, 6, 7, 8], weight_versions=[*spans(1), *spans(2, 4)[1:]]), "do not follow one another"),
        (event([5, 6, 7, 8], weight_versions=spans(2, 3)), "end before the tokens"),
        (event([5], cached_tokens=3), "3 cached tokens of a prompt of 2"),
        (event([5], cached_tokens=-1), "-1 cached tokens"),
        (event([5], output_token_logprobs=[[-1e29, 5, None]]), "is no log-probability"),
        (b"[]", "TypeError"),
        (b"{}", "KeyError"),
        (b'{"meta_info": 1}', "AttributeError"),
    ],
)
def test_a_malformed_answer_is_an_engine_that_is_lost(data: bytes, detail: str) -> None:
    build, tokens = builder()
    with pytest.raises(EngineLost, match=detail) as lost:
        build.add_event(read_event(data))
    assert (lost.value.cause, tokens.ids, tokens.policy_versions, tokens.finish) == ("malformed", [], [], None)


def test_a_last_event_with_fewer_tokens_than_received_is_malformed() -> None:
    build, tokens = builder()
    build.add_event(read_event(event([5, 6])))
    with pytest.raises(EngineLost, match="an answer of 1 tokens after 2 tokens"):
        build.add_event(read_event(event([5], finish=STOP)))
    assert (tokens.ids, tokens.finish) == ([5, 6], None)


@pytest.mark.parametrize(("ids", "count"), [([6], 2), ([7, 8, 8], 4)])
def test_the_abort_of_a_waiting_request_in_an_incremental_stream_repeats_no_token(ids: list[int], count: int) -> None:
    """SGLang lists the last token once more, and the log-probabilities of all."""
    build, tokens = builder()
    build.add_event(read_event(event([5, 6], total=2)))
    entries = [[-0.5, token, None] for token in ids[:-1] + [5, 6, 7, 8][:count]]
    abort = {"type": "abort", "message": "Abort in waiting queue"}
    build.add_event(
        read_event(event(ids, total=count, finish=abort, output_token_logprobs=entries, weight_versions=spans(count)))
    )
    assert (tokens.ids, build.was_aborted) == ([5, 6], True)


@pytest.mark.parametrize("streamed", [[], [5], [5, 6]], ids=len)
@pytest.mark.parametrize("is_incremental", [True, False])
def test_an_engine_that_strips_the_stop_token_is_refused(streamed: list[int], is_incremental: bool) -> None:
    build, tokens = builder()
    if streamed:
        build.add_event(read_event(event(streamed)))
    rest = [5, 6][len(streamed) if is_incremental else 0 :]
    with pytest.raises(Unavailable) as caught:
        build.add_event(read_event(event(rest, total=2, finish={"type": "stop", "matched": 2})))
    assert (caught.value.code, tokens.finish) == ("engine_stop_stripped", None)


def test_an_abort_in_the_queue_names_no_tokens() -> None:
    build, tokens = builder()
    meta = {"finish_reason": {"type": "abort", "message": "Abort in waiting queue"}, "weight_version": "run-a:3"}
    build.add_event(read_event(orjson.dumps({"text": "", "output_ids": [], "meta_info": meta})))
    assert (tokens.ids, build.was_aborted, tokens.finish) == ([], True, None)


@pytest.mark.parametrize(("status", "error"), [(400, BadRequest), (500, EngineLost)])
def test_an_abort_with_a_status_is_an_error_of_the_engine(status: int, error: type[Exception]) -> None:
    build, _ = builder()
    with pytest.raises(error, match="out of luck"):
        build.add_event(
            read_event(event([], finish={"type": "abort", "message": "out of luck", "status_code": status}))
        )


def test_alternatives_are_stored_per_token() -> None:
    build, tokens = builder(top_logprobs=2)
    # An engine may mask an alternative.
    tops = [[[-0.5, 5, None], [-1e9, 9, None]], [[-0.25, 6, None], [-2.0, 3, None]]]
    build.add_event(read_event(event([5], output_top_logprobs=tops[:1])))
    build.add_event(read_event(event([5, 6], output_top_logprobs=tops)))
    assert tokens.top_logprobs == [[(-0.5, 5), (-1e9, 9)], [(-0.25, 6), (-2.0, 3)]]
    with pytest.raises(EngineLost, match="1 tokens with 0 lists"):
        build.add_event(read_event(event([7], total=3)))


@given(st.integers(100, 599), st.text(max_size=50) | JSON_VALUES.map(lambda value: orjson.dumps(value).decode()))
def test_a_refusal_of_any_words_is_one_of_ours(status: int, text: str) -> None:
    assert isinstance(refusal(status, text), EngineLost | BadRequest)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ('{"error":{"message":"The input is longer than the model\'s context length"}}', "context_length_exceeded"),
        ('{"object":"error","message":"no such parameter"}', "engine_refused"),
        ("plain words", "engine_refused"),
    ],
)
def test_a_refused_request_raises_the_engines_reason(text: str, code: str) -> None:
    refused = refusal(400, text)
    assert isinstance(refused, BadRequest)
    assert refused.code == code


def test_the_error_event_of_a_stream_is_a_refusal() -> None:
    build, _ = builder()
    with pytest.raises(BadRequest, match="too long"):
        build.add_event(read_event(b'{"error":{"message":"too long","code":400}}'))
    with pytest.raises(EngineLost):
        build.add_event(read_event(b'{"error":{"message":"out of memory"}}'))


def test_the_body_requests_the_rest_of_an_answer() -> None:
    tokens = SampledTokens("c", 0, 7, ids=[11, 12])
    sampling = Sampling(min_tokens=3, logit_bias={"5": 1}, repetition_penalty=1.5, stop=("x",))
    body = orjson.loads(request_body(request(sampling=sampling, top_logprobs=2), tokens, "c-1", "run-a:3"))
    assert body == {
        "input_ids": [1, 2, 11, 12],
        "rid": "c-1",
        "sampling_params": {
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "max_new_tokens": 6,
            "stop": ["x"],
            "stop_token_ids": [2],
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "no_stop_trim": True,
            "min_p": 0.0,
            "min_new_tokens": 1,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.5,
            "logit_bias": {"5": 1},
            "sampling_seed": 7,
        },
        "return_logprob": True,
        "top_logprobs_num": 2,
        "stream": True,
        "extra_key": "run-a:3",
    }


def test_a_call_without_a_seed_gets_one_that_its_id_gives() -> None:
    seeds = [seed_of_call(f"c{number:024x}") for number in range(16)]
    assert seeds == [seed_of_call(f"c{number:024x}") for number in range(16)]
    assert len(set(seeds)) == 16
    assert all(0 <= seed < 2**62 for seed in seeds)


def test_a_seed_is_one_rollouts_and_siblings_with_the_same_one_differ() -> None:
    seeds = [seed_of_rollout(seed, f"run-a.0.{sibling}") for seed in (42, -3) for sibling in range(8)]
    assert seeds == [seed_of_rollout(seed, f"run-a.0.{sibling}") for seed in (42, -3) for sibling in range(8)]
    assert len(set(seeds)) == 16
    assert all(0 <= seed < 2**62 for seed in seeds)


def test_what_an_agent_leaves_out_is_neutral_whatever_the_engine_prefers() -> None:
    """SGLang fills parameters that a request lacks from its `--preferred-sampling-params`."""
    body = orjson.loads(request_body(request(), SampledTokens("c", 0, None), "c", None))
    preferred = {"top_k": 20, "top_p": 0.8, "min_p": 0.1, "min_new_tokens": 9}
    penalties = {"frequency_penalty": 0.1, "presence_penalty": 1.5, "repetition_penalty": 1.05}
    merged = SamplingParams.model_validate({**preferred, **penalties, **body["sampling_params"]})
    assert not (merged.truncates or merged.reshapes)


def test_an_answer_in_one_piece_comes_in_large_ones() -> None:
    streamed, whole = (
        orjson.loads(request_body(request(stream=stream), SampledTokens("c", 0, None), "c", None))
        for stream in (True, False)
    )
    assert whole["sampling_params"].pop("stream_interval") == 1024
    assert whole == streamed


def test_tokens_of_a_shared_engine_have_the_version_of_the_adapter_that_was_asked_for() -> None:
    tokens = SampledTokens("c", 0, None)
    adding = SampleBuilder(request(), tokens, lambda: None, weight_version="run-a:5")
    adding.add_event(read_event(event([7, 8], label="default")))
    adding.add_event(
        read_event(event([7, 8, 2], label="default", finish=STOP, weight_versions=spans(3, run="default")))
    )
    assert (tokens.ids, tokens.policy_versions, tokens.finish) == ([7, 8, 2], [5, 5, 5], "stop")


def test_a_request_names_its_adapter_and_an_engine_without_it_is_lost() -> None:
    tokens = SampledTokens("c", 0, None)
    body = orjson.loads(request_body(request(), tokens, "r", "run-a:5", "run-a:5"))
    assert (body["lora_path"], body["extra_key"]) == ("run-a:5", "run-a:5")
    assert "lora_path" not in orjson.loads(request_body(request(), tokens, "r", "run-a:0"))
    refused = refusal(400, '{"error": {"message": "Got LoRA adapter that has never been loaded: run-a:5"}}')
    assert isinstance(refused, EngineLost) and refused.cause == "adapter"


@pytest.mark.parametrize("reported", [1, 3, 0])
def test_an_engine_that_saw_another_prompt_fails_the_call(reported: int) -> None:
    build, tokens = builder()
    with pytest.raises(Unavailable, match=rf"was sent 2 prompt tokens and reports {reported}") as caught:
        build.add_event(read_event(event([5], prompt_tokens=reported)))
    assert (caught.value.code, tokens.ids) == ("engine_prompt_mismatch", [])


def test_a_request_aborted_in_the_queue_has_seen_no_prompt() -> None:
    build, _ = builder()
    build.add_event(read_event(event([], prompt_tokens=0, finish={"type": "abort", "message": "Abort before prefill"})))
    assert build.was_aborted


def test_a_request_that_goes_on_elsewhere_has_the_sampled_tokens_in_its_prompt() -> None:
    first, tokens = builder()
    first.add_event(read_event(event([5], prompt_tokens=2)))
    second, _ = builder(tokens)
    second.add_event(read_event(event([6], prompt_tokens=3)))
    assert tokens.ids == [5, 6]
