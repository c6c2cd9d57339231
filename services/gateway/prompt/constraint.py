"""Turns an answer's schema and the tools that must be called into a constraint of the engine's decoding."""

from __future__ import annotations

import json
from collections.abc import Sequence

import orjson

from leyden.libs.contracts.conversation import Json, Tool
from leyden.services.gateway.calls.context import ModelRequest
from leyden.services.gateway.errors import BadRequest
from leyden.services.gateway.prompt.template import ChatModel
from leyden.services.gateway.schemas import check_strict_tools


def decoding_constraint(model: ChatModel, request: ModelRequest) -> dict[str, str]:
    """Returns SGLang's sampling parameter that constrains the answer; none where the model writes freely.

    A request with tools and a schema gets calls or an answer in that schema. One that must call a tool gets calls.

    Raises: BadRequest: the constraint needs the form of the model's tool calls, and no grammar of it is here
    """
    if not request.is_constrained:
        return {}
    schema = request.answer_schema
    if not request.required_tools and not request.parses_tool_calls:
        return {"json_schema": orjson.dumps(schema).decode()}
    if model.tool_parser.name != "hermes":
        param = "tool_choice" if request.required_tools else "tools"
        message = (
            f"{param}: decoding cannot be constrained to tool calls in this model's format ({model.tool_parser.name});"
            " send tool_choice auto, and either tools or a JSON format."
        )
        raise BadRequest(message, param=param, code="unsupported_parameter")
    names = request.required_tools or [tool.name for tool in request.tools]
    # Beside an answer's format a strict tool constrains decoding, too, whether it must be called or may.
    check_strict_tools(request.tools, names)
    tools = [tool for tool in request.tools if tool.name in names]
    calls = _calls(tools, is_single=not (request.parallel_tool_calls and model.renders_parallel_calls))
    if request.required_tools:
        return _structural_tag(calls)
    return _structural_tag({"type": "or", "elements": [calls, {"type": "json_schema", "json_schema": schema}]})


def _calls(tools: Sequence[Tool], *, is_single: bool) -> Json:
    """Returns the format of calls in Hermes' form.

    The arguments follow the schema of a strict tool; of any other tool they are any JSON object, as at OpenAI.
    """
    tags = []
    for tool in tools:
        schema = tool.parameters if tool.is_strict else None
        begin = f'<tool_call>\n{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": '
        content = {"type": "json_schema", "json_schema": schema or {"type": "object"}}
        tags.append({"type": "tag", "begin": begin, "content": content, "end": "}\n</tool_call>"})
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": is_single,
    }


def _structural_tag(form: Json) -> dict[str, str]:
    return {"structural_tag": orjson.dumps({"type": "structural_tag", "format": form}).decode()}
