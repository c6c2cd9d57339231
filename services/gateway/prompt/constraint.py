"""Turns an answer's schema and the tools that must be called into a constraint of the engine's decoding."""

from __future__ import annotations

import json
from collections.abc import Sequence

import orjson

from leyden.libs.contracts.conversation import Json
from leyden.services.gateway.conversation import ModelRequest


def decoding_constraint(request: ModelRequest) -> dict[str, str]:
    """Returns SGLang's sampling parameter that constrains the answer; none where the model writes freely.

    A request with tools and a schema gets calls or an answer in that schema. One that must call a tool gets calls.
    """
    schema = request.answer_schema
    is_single = not request.parallel_tool_calls
    if request.required_tools:
        required = [tool for tool in request.tools if tool["function"]["name"] in request.required_tools]
        return _structural_tag(_calls(required, is_single=is_single))
    if schema is None:
        return {}
    if request.parses_tool_calls:
        answer = {"type": "json_schema", "json_schema": schema}
        calls = _calls(request.tools, is_single=is_single)
        return _structural_tag({"type": "or", "elements": [calls, answer]})
    return {"json_schema": orjson.dumps(schema).decode()}


def _calls(tools: Sequence[Json], *, is_single: bool) -> Json:
    """Returns the format of calls in Hermes' form.

    The arguments follow the schema of a strict tool; of any other tool they are any JSON object, as at OpenAI.
    """
    tags = []
    for tool in tools:
        function = tool["function"]
        schema = function.get("parameters") if function.get("strict") else None
        begin = f'<tool_call>\n{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": '
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
