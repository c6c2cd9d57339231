"""The Responses API leaves out what a vendor's server would run, and the record of the call names it."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from leyden.libs.contracts.conversation import ToolCall, Turn
from leyden.services.gateway.calls.context import Answer, Completion
from leyden.services.gateway.dialects.hosted import refuse_hosted
from leyden.services.gateway.dialects.responses.dialect import Responses, ResponsesRequest
from leyden.services.gateway.dialects.responses.items import HOSTED_ITEMS, turns_of
from leyden.services.gateway.errors import BadRequest

OWN = {"type": "function", "name": "own", "parameters": {"type": "object"}}
HOSTED = [
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "q"}},
    {"type": "mcp_list_tools", "id": "l", "server_label": "s", "tools": [{"name": "t", "input_schema": {}}]},
    {"type": "mcp_call", "id": "m", "server_label": "s", "name": "t", "arguments": "{}", "output": "x", "error": None},
    {"type": "tool_search_call", "call_id": "t", "execution": "client", "arguments": {"query": "q"}},
    {"type": "tool_search_output", "call_id": "t", "tools": [{"type": "function", "name": "own"}]},
    {"type": "compaction", "id": "c", "encrypted_content": "gAAA"},
    {"type": "local_shell_call", "id": "s", "call_id": "s", "action": {"type": "exec", "command": ["ls"]}},
    {"type": "local_shell_call_output", "id": "s", "output": "a"},
    {"type": "shell_call", "call_id": "h", "action": {"commands": ["ls"]}},
    {"type": "shell_call_output", "call_id": "h", "output": [{"stdout": "a", "stderr": "", "outcome": {}}]},
    {"type": "apply_patch_call", "call_id": "p", "operation": {"type": "delete_file", "path": "a"}},
    {"type": "apply_patch_call_output", "call_id": "p", "status": "completed", "output": "done"},
]


def parsed(**fields: Any) -> ResponsesRequest:
    body = json.dumps({"model": "m", "input": "hi", **fields}).encode()
    # Parsing reads no store.
    return Responses(cast(Any, None), cast(Any, None)).parse(body, max_choices=1)


def test_items_of_hosted_tools_are_not_shown_and_recorded() -> None:
    question = {"role": "user", "content": "hi"}
    request = parsed(input=[question, *HOSTED, {"role": "user", "content": "and?"}])
    assert turns_of(request.items) == (Turn("user", "hi"), Turn("user", "and?"))
    assert request.parameters["hosted_items"] == [item["type"] for item in HOSTED]
    assert {item["type"] for item in HOSTED} <= HOSTED_ITEMS
    with pytest.raises(BadRequest, match=r"the run refuses hosted tools \(web_search_call, "):
        refuse_hosted(request.parameters)
    refuse_hosted(parsed().parameters)


def test_tools_of_openais_own_are_not_offered_and_recorded() -> None:
    kinds = ["local_shell", "shell", "apply_patch"]
    request = parsed(tools=[*({"type": kind} for kind in kinds), OWN])
    assert [tool.name for tool in request.tools] == ["own"]
    assert request.parameters["hosted_tools"] == kinds


ALLOWED = {"type": "allowed_tools", "mode": "required"}


@pytest.mark.parametrize(
    ("choice", "required"),
    [
        ({"type": "web_search"}, ()),
        ({"type": "mcp", "server_label": "s", "name": "t"}, ()),
        ({**ALLOWED, "tools": [{"type": "web_search"}]}, ()),
        ({**ALLOWED, "tools": [{"type": "web_search"}, {"type": "function", "name": "own"}]}, ("own",)),
        ({"type": "function", "name": "own"}, ("own",)),
    ],
)
def test_a_choice_of_a_hosted_tool_requires_none(choice: Any, required: tuple[str, ...]) -> None:
    request = parsed(tools=[{"type": "web_search"}, OWN], tool_choice=choice)
    assert (request.required_tools, request.parameters["tool_choice"]) == (required, choice)


@pytest.mark.parametrize(
    ("pieces", "in_order"),
    [
        (["r:Hm.", "t:Yes."], ["reasoning", "message", "function_call"]),
        (["t:I look.", "r:Hm.", "r: Ha.", "t:Yes."], ["message", "reasoning", "function_call"]),
        (["r:Hm.", "t:I look.", "r:Ha.", "t:Yes."], ["reasoning", "message", "function_call"]),
        # The text comes with the end of the answer, as it does in a replay.
        (["r:Hm."], ["reasoning", "message", "function_call"]),
        ([], ["message", "function_call"]),
    ],
)
def test_each_item_of_a_stream_has_a_place_of_its_own_and_ends_once(pieces: list[str], in_order: list[str]) -> None:
    request = parsed(stream=True)
    writer = Responses(cast(Any, None), cast(Any, None)).stream(request, "c1", 1, 5)
    said = {kind: "".join(piece[2:] for piece in pieces if piece[0] == kind) for kind in "rt"}
    events = b"".join(
        writer.reasoning(0, piece[2:]) if piece[0] == "r" else writer.text(0, piece[2:], None) for piece in pieces
    )
    turn = Turn(
        "assistant", said["t"] or "Yes.", tool_calls=(ToolCall("call_1", "own", "{}"),), reasoning=said["r"] or None
    )
    answer = Answer(0, turn, "tool_calls", None)
    events += writer.rest(answer, "" if said["t"] else "Yes.", None)
    events += writer.end(Completion("c1", "m", 1, None, (answer,), 5, 9, 0))
    found = [json.loads(line[6:]) for line in events.splitlines() if line.startswith(b"data: ")]
    for kind in ("added", "done"):
        items = [
            (event["output_index"], event["item"]["type"])
            for event in found
            if event["type"] == f"response.output_item.{kind}"
        ]
        assert items == list(enumerate(in_order))
    response = found[-1]["response"]
    assert [item["type"] for item in response["output"]] == in_order
    texts = {item["type"]: item["content"][0]["text"] for item in response["output"] if "content" in item}
    assert texts == {"message": turn.content} | ({"reasoning": said["r"]} if said["r"] else {})
    of_items = {event["item_id"][:2]: event["output_index"] for event in found if "item_id" in event}
    assert of_items == {item["id"][:2]: index for index, item in enumerate(response["output"])}
