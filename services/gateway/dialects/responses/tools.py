"""Custom tools and namespaces of the Responses API as functions, and calls of these functions as the API's items.

A custom tool is a function of one text, `input`. A tool in a namespace has the namespace before its name. The record of
a call names the tools that its request had in another form (`request.wire_tools`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from leyden.libs.contracts.conversation import Json, ToolCall
from leyden.services.gateway.dialects.custom import WireTools, custom_function, input_of


def functions(tools: Sequence[Json], namespace: str | None = None) -> Iterator[Json]:
    """Yields the tools, with functions in place of custom tools and namespaces."""
    for tool in tools:
        match tool["type"]:
            case "namespace":
                yield from functions(tool.get("tools") or (), tool["name"])
            case "custom":
                yield _function(tool, namespace)
            case "function":
                yield {**tool, "name": flat_name(tool["name"], namespace)}
            case _:
                yield tool


def wire_tools(tools: Sequence[Json], namespace: str | None = None) -> dict[str, Json]:
    """Returns the tools that are no functions of their own, by the names of their functions."""
    found: dict[str, Json] = {}
    for tool in tools:
        if tool["type"] == "namespace":
            found |= wire_tools(tool.get("tools") or (), tool["name"])
        elif tool["type"] == "custom" or (tool["type"] == "function" and namespace is not None):
            named = {"namespace": namespace} if namespace is not None else {}
            found[flat_name(tool["name"], namespace)] = {"type": tool["type"], "name": tool["name"], **named}
    return found


def flat_name(name: str, namespace: str | None) -> str:
    """Returns the name of a tool's function.

    >>> flat_name("search", "crm"), flat_name("search", "mcp__crm__"), flat_name("search", None)
    ('crm__search', 'mcp__crm__search', 'search')
    """
    if namespace is None:
        return name
    return f"{namespace}{name}" if namespace.endswith("_") else f"{namespace}__{name}"


def call_item(call: ToolCall, item_id: str, wire: WireTools) -> Json:
    """Returns a tool call of an answer, as its request named the tool."""
    own = wire.get(call.name, {})
    named = {"call_id": call.id, "name": own.get("name", call.name), "status": "completed"}
    if "namespace" in own:
        named["namespace"] = own["namespace"]
    if own.get("type") == "custom":
        return {"id": item_id, "type": "custom_tool_call", **named, "input": input_of(call.arguments)}
    return {"id": item_id, "type": "function_call", **named, "arguments": call.arguments}


def _function(tool: Json, namespace: str | None) -> Json:
    name = flat_name(tool["name"], namespace)
    return {"type": "function", **custom_function(name, tool.get("description"), tool.get("format"))}
