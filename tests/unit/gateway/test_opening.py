"""Bodies that begin as an earlier one did: read in part, with the same outcome as read whole."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leyden.services.gateway.errors import BadRequest
from leyden.services.gateway.opening import Opening
from leyden.services.gateway.request import MAX_VALUES, ChatRequest, parse_request
from leyden.services.gateway.sent import is_plain

CONTENTS = ["", "hello", 'quo"te\\', "[{,", "é 日本 😀", "\x7f\u2028", "a\x00b", "<|im_end|>", None, 7]
ROLES = ["system", "user", "assistant", "tool", "developer", "nobody"]
CALLS = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, 2e99]}'}}]
PART = {"type": "text", "text": "part"}


def outcome(body: bytes, opening: Opening | None = None) -> tuple[Any, ChatRequest | None]:
    """What is known of the request, or what is wrong with it, in plain values; and the request."""
    try:
        request = parse_request(body, max_choices=2, opening=opening)
    except BadRequest as error:
        return (error.message, error.param, error.code), None
    # Which opening it continues is the only difference.
    named = {field.name: getattr(request, field.name) for field in fields(request)}
    named |= {"opening": None, "continues": None, "sent": json.loads(request.sent.whole())}
    return named, request


def sent(document: Any, style: random.Random) -> bytes:
    """The document as some client spells it."""
    separators = style.choice([(",", ":"), (", ", ": "), (" ,\n", "\t: ")])
    text = json.dumps(document, ensure_ascii=style.random() < 0.5, separators=separators)
    return text.encode()


messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(ROLES[:4]) | st.sampled_from(ROLES)},
        optional={
            "content": st.sampled_from(CONTENTS[:8]) | st.sampled_from(CONTENTS) | st.just([PART, PART]),
            "tool_calls": st.just(CALLS),
            "name": st.just("n"),
            "extra": st.sampled_from([1e300, 0.5, [[]], {"messages": [1]}]),
        },
    ),
    min_size=1,
    max_size=6,
)
fields_after = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.5, 3]),
        "tools": st.just([{"type": "function", "function": {"name": "f"}}]),
        "n": st.sampled_from([1, 2, 3]),
        "unknown": st.just(1),
    },
)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(messages, fields_after, st.booleans()), min_size=2, max_size=4), st.randoms(), st.data())
def test_a_body_is_read_the_same_whatever_was_read_before(rounds, style, data):
    known: list[Opening] = []
    history: list[Any] = []
    for new, after, goes_on in rounds:
        history = [*history, *new] if goes_on else [*history[: data.draw(st.integers(0, len(history)))], *new]
        document = {"messages": history, "model": "m", **after}
        if data.draw(st.booleans()):
            document = dict(reversed(document.items()))
        body = sent(document, style)
        cut = data.draw(st.integers(0, 200))
        if cut < 10:
            body = body[: len(body) - cut]
        whole, request = outcome(body)
        for opening in known:
            if body.startswith(opening.raw):
                assert outcome(body, opening)[0] == whole
        if request is not None:
            turns = [(turn.role, turn.content) for turn in request.turns]
            texts = [message.get("content") or "" for message in history]
            assert [text if isinstance(text, str) else "part\npart" for text in texts] == [text for _, text in turns]
            assert request.body_sha256 == hashlib.sha256(body).digest()
            if request.opening is not None:
                known.append(request.opening)


def body(*turns: dict[str, Any], **after: Any) -> bytes:
    return json.dumps({"messages": turns, "model": "m", **after}).encode()


def say(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def opened(data: bytes, opening: Opening | None = None) -> Opening:
    found = parse_request(data, max_choices=1, opening=opening).opening
    assert found is not None
    return found


BEGIN = [say("system", "s"), say("user", "a")]


def test_an_opening_ends_before_the_last_answer_and_before_the_last_message_without_one():
    first = opened(body(*BEGIN))
    assert first.raw == b'{"messages": [{"role": "system", "content": "s"}'
    longer = body(*BEGIN, say("assistant", "b"), say("tool", "c"), say("tool", "d"))
    second = opened(longer, first)
    assert second.raw == body(*BEGIN)[: len(second.raw)]
    assert [turn.content for turn in second.turns] == ["s", "a"]
    # The same body again, and another way to go on after the same answer.
    assert parse_request(longer, max_choices=1, opening=second).opening is second


def test_results_of_one_round_are_not_divided():
    results = [say("tool", "1"), say("tool", "2")]
    assert [turn.content for turn in opened(body(*BEGIN, *results)).turns] == ["s", "a"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            b'{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": 1}], "model": "m"}',
            "1.content",
        ),
        (b'{"messages": [{"role": "system", "content": "s"},], "model": "m"}', "not valid JSON"),
        (b'{"messages": [{"role": "system", "content": "s"}, {"role": "user"}], "model": "m"}', "1.content"),
        (b'{"messages": [{"role": "system", "content": "s"}', "not valid JSON"),
        (b'{"messages": [{"role": "system", "content": "s"}, NaN], "model": "m"}', "not valid JSON"),
    ],
)
def test_what_is_wrong_after_an_opening_is_told_with_its_place_in_the_body(data, message):
    with pytest.raises(BadRequest, match=message):
        parse_request(data, max_choices=1, opening=opened(body(*BEGIN)))


@pytest.mark.parametrize("more", [b"", b', {"role": "user", "content": "y"}'])
def test_a_second_array_of_messages_counts_as_it_does_in_a_whole_body(more):
    first = opened(body(*BEGIN))
    data = first.raw + more + b'], "messages": [{"role": "user", "content": "z"}], "model": "m"}'
    request = parse_request(data, max_choices=1, opening=first)
    assert [turn.content for turn in request.turns] == ["z"]
    assert json.loads(request.sent.whole()) == {"messages": [{"role": "user", "content": "z"}], "tools": None}
    assert request.opening is None


def test_values_of_all_parts_are_counted_together():
    half = [{"role": "user", "content": "x", "extra": [0] * (MAX_VALUES * 2 // 3)}, say("user", "y")]
    first = opened(body(*half))
    with pytest.raises(BadRequest, match="more than 100000 values"):
        parse_request(body(*half, half[0]), max_choices=1, opening=first)


@pytest.mark.parametrize(("content", "kept"), [("a\x00b", "a\ufffdb"), ("1e-99", "1e-99"), ("\\u0000", "\\u0000")])
def test_what_postgres_cannot_store_is_replaced_wherever_it_stands(content, kept):
    first = body(say("system", content), say("user", "a"))
    second = body(say("system", content), say("user", "a"), say("assistant", "b"), say("user", content))
    opening = opened(first)
    request = parse_request(second, max_choices=1, opening=opening)
    texts = [message["content"] for message in json.loads(request.sent.whole())["messages"]]
    assert texts == [kept, "a", "b", kept]


def test_numbers_that_postgres_would_refuse_are_recorded_as_they_were_read():
    data = b'{"messages": [{"role": "user", "content": "a", "x": 1e-100000}], "model": "m"}'
    request = parse_request(data, max_choices=1)
    assert b"1e-100000" not in request.sent.whole()
    assert json.loads(request.sent.whole())["messages"][0]["x"] == 0.0


@pytest.mark.parametrize(
    ("raw", "plain"),
    [
        (b'{"id": "call_c1e10", "text": "1e99"}', True),
        (b'{"text": "\\"", "id": "3e10\\\\"}', True),
        (b'{"a": "x", "n": 1e10}', False),
        (b'{"a": "\\\\", "n": 1E-10}', False),
        (b'{"a": "1e10", "n": 1' + b"0" * 99 + b"}", False),
        (b'{"n": 1e9, "m": 0.5}', True),
        (b'{"a": "\\u0000"}', False),
    ],
)
def test_what_postgres_would_write_in_another_way_is_told_from_texts_that_look_like_it(raw: bytes, plain: bool) -> None:
    assert is_plain(raw) is plain
