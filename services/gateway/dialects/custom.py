"""Custom tools as functions of one text, `input`, and the calls of these functions as calls of custom tools.

Chat completions nest a tool's fields below its type; `wire_tools` in the record of a call names the tools that its
request had in another form than functions of `tools`: the function's name, then `type` and `name`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from leyden.libs.contracts.conversation import Json, Tool, ToolCall
from leyden.services.gateway.errors import BadRequest

WireTools = Mapping[str, Json]
"""The type and name of a tool in the request, and its namespace if it has one, by the name of its function."""
LEGACY = "function_call"
"""The type of the functions of a request that sends `functions` in place of `tools`."""


def custom_function(name: str, description: Any, form: Any) -> Json:
    """Returns the function of a custom tool.

    Args: form: that of its input; a grammar's members are beside its type, or in `grammar`
    Raises: BadRequest: the description is no text, or the form no object
    """
    if not isinstance(description, str | None) or not isinstance(form, dict | None):
        message = f"tools: the description of custom tool {name} is a text, and its format is an object."
        raise BadRequest(message, param="tools", code="invalid_type")
    described = [description]
    if form and form.get("type") == "grammar":
        nested = form.get("grammar")
        grammar = nested if isinstance(nested, dict) else form
        described.append(f"The input has this {grammar.get('syntax')} grammar:\n{grammar.get('definition')}")
    parameters = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    return {"name": name, "description": "\n\n".join(filter(None, described)), "parameters": parameters}


def arguments_of(text: str) -> str:
    """Returns the arguments of a custom tool's function."""
    return json.dumps({"input": text}, ensure_ascii=False)


def input_of(arguments: str) -> str:
    """Returns the text that the model wrote; arguments in another form are the text themselves."""
    try:
        document = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = document.get("input") if isinstance(document, dict) else None
    return text if isinstance(text, str) else arguments


def chat_tools(tools: Sequence[Json], functions: Sequence[Json]) -> tuple[list[Json], Json]:
    """Returns the tools of chat completions with functions in place of custom tools, and the mark of the record.

    Args: functions: those of a request from before there were tools
    """
    offered: list[Json] = []
    wire: dict[str, Json] = {}
    for tool in tools:
        if tool["type"] == "custom":
            own = tool["custom"]
            function = custom_function(own["name"], own.get("description"), own.get("format"))
            offered.append(Tool.of(function).document)
            wire[own["name"]] = {"type": "custom", "name": own["name"]}
        else:
            offered.append(tool)
    for function in functions:
        offered.append(Tool.of(function).document)
        wire[function["name"]] = {"type": LEGACY, "name": function["name"]}
    return offered, {"wire_tools": wire} if wire else {}


def chat_call(call: ToolCall, wire: WireTools) -> Json:
    """Returns a call in `tool_calls` of chat completions, as its request named the tool."""
    if wire.get(call.name, {}).get("type") == "custom":
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": input_of(call.arguments)}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def legacy_call(calls: Sequence[ToolCall], wire: WireTools) -> Json | None:
    """Returns the one call of an answer to a request with `functions`; None for any other answer."""
    if not calls or wire.get(calls[0].name, {}).get("type") != LEGACY:
        return None
    return {"name": calls[0].name, "arguments": calls[0].arguments}
