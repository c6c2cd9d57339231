"""The Responses API leaves out what a vendor's server would run, and the record of the call names it."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from leyden.libs.contracts.conversation import Turn
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
