"""Messages: a stream holds the blocks of the body, however its text is cut; thinking is sent back exactly."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from leyden.libs.contracts.conversation import ToolCall, Turn
from leyden.services.gateway.calls.context import Answer, Completion, ModelRequest
from leyden.services.gateway.dialects.messages import Messages
from leyden.services.gateway.prompt.tools.hermes import parsed_arguments

PIECES = ["<think>", "</think>", "<", "</th", "ink>", " ", "\n", "Hm", "é", "."]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
ARGUMENTS = st.sampled_from(["{}", '{"a":  [1]}', '{"a": 1', "[]", '""', "", '{"n": 99999999999999999999}'])


def request(messages: list[Any], *, thinks: bool) -> ModelRequest:
    body = {"model": "m", "max_tokens": 9, "messages": [*messages, {"role": "user", "content": "?"}]}
    if thinks:
        body["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    return Messages().parse(json.dumps(body).encode(), max_choices=1)


def completion(text: str, calls: list[str], reasoning: str | None = None) -> Completion:
    asked = tuple(ToolCall(f"c{n}", "f", call) for n, call in enumerate(calls))
    turn = Turn("assistant", text, tool_calls=asked, reasoning=reasoning)
    answer = Answer(0, turn, "tool_calls" if calls else "stop", None)
    return Completion("c1", "m", 0, None, (answer,), 3, 2, 1)


def accumulated(events: bytes) -> Any:
    """The message that the events describe."""
    message: Any = None
    for event in events.decode().strip().split("\n\n"):
        name, _, data = event.partition("\ndata: ")
        document = json.loads(data)
        assert name == f"event: {document['type']}"
        match document["type"]:
            case "message_start":
                assert message is None
                message = document["message"]
                arguments = ""
            case "content_block_start":
                assert document["index"] == len(message["content"])
                message["content"].append(document["content_block"])
                arguments = ""
            case "content_block_delta":
                assert document["index"] == len(message["content"]) - 1
                block, delta = message["content"][-1], document["delta"]
                (value,) = (value for key, value in delta.items() if key != "type")
                assert value
                match delta["type"]:
                    case "input_json_delta":
                        arguments += value
                    case kind:
                        field = kind.removesuffix("_delta")
                        block[field] += value
            case "content_block_stop":
                if arguments:
                    message["content"][-1]["input"] = json.loads(arguments)
            case "message_delta":
                message |= document["delta"]
                message["usage"] = document["usage"]
            case kind:
                assert kind in {"ping", "message_stop"}
    return message


@given(TEXTS, st.none() | TEXTS, st.lists(st.integers(0, 60)), st.lists(ARGUMENTS, max_size=2), st.booleans())
def test_a_stream_has_the_blocks_of_the_body_and_they_are_sent_back_as_sampled(text, reasoning, cuts, calls, thinks):
    asked, done = request([], thinks=thinks), completion(text, calls, reasoning)
    body = Messages().body(asked, done)
    writer = Messages().stream(asked, "c1", 0, 3)
    places = [0, *sorted(cut for cut in cuts if cut < len(text))]
    parts = [text[start:end] for start, end in pairwise(places)]
    events = b"".join(writer.reasoning(0, piece) for piece in reasoning or "")
    events += b"".join(writer.text(0, part, None) for part in parts if part)
    events += writer.rest(done.answers[0], text[places[-1] :], None) + writer.end(done)
    assert accumulated(events) == body
    echoed = request(
        [{"role": "user", "content": "?"}, {"role": "assistant", "content": body["content"]}], thinks=thinks
    )
    turn = echoed.turns[1]
    assert (turn.content, turn.reasoning) == (text, (reasoning or None) if thinks else None)
    sampled = done.answers[0].turn.tool_calls
    assert [parsed_arguments(call.arguments) for call in turn.tool_calls] == [
        parsed_arguments(call.arguments) for call in sampled
    ]


def test_thinking_after_a_text_begins_once_that_block_has_ended():
    """gpt-oss thinks, writes a preamble and thinks again."""
    asked, done = request([], thinks=True), completion("Let me look.Yes.", [], "Hm.So.")
    writer = Messages().stream(asked, "c1", 0, 3)
    events = writer.reasoning(0, "Hm.") + writer.text(0, "Let me look.", None) + writer.reasoning(0, "So.")
    events += writer.rest(done.answers[0], "Yes.", None) + writer.end(done)
    names = [json.loads(line[6:])["type"] for line in events.split(b"\n") if line.startswith(b"data: ")]
    blocks = [name for name in names if name in {"content_block_start", "content_block_stop"}]
    assert blocks == ["content_block_start", "content_block_stop"] * 4


def test_thinking_of_another_model_is_reasoning():
    blocks = [
        {"type": "thinking", "thinking": "Hm.", "signature": "of another model"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "Yes."},
    ]
    turns = request([{"role": "assistant", "content": blocks}], thinks=True).turns
    assert (turns[0].content, turns[0].reasoning) == ("Yes.", "Hm.")


def test_tool_results_and_texts_stay_in_the_order_sent():
    uses = [{"type": "tool_use", "id": name, "name": "f", "input": {}} for name in "ab"]
    results = [{"type": "tool_result", "tool_use_id": name, "content": name} for name in "ba"]
    text = {"type": "text", "text": "Go on."}
    messages = [{"role": "assistant", "content": uses}, {"role": "user", "content": [results[0], text, results[1]]}]
    turns = request(messages, thinks=False).turns[1:4]
    assert [(turn.role, turn.content, turn.tool_call_id) for turn in turns] == [
        ("tool", "b", "b"), ("user", "Go on.", None), ("tool", "a", "a")
    ]  # fmt: skip
