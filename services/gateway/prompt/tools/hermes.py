"""Writes tool calls as text for templates without tools, and parses the JSON object of a sampled one.

The text has the format of Hermes and Qwen templates. A system text lists the tools as JSON, one a line, and asks for
`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`; a user message holds the results of one round, each as
`<tool_response>...</tool_response>`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from itertools import groupby

from leyden.libs.contracts.conversation import Tool, ToolCall, Turn
from leyden.libs.contracts.strict import is_too_deep

_PREAMBLE = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
_ARGUMENTS = re.compile(r'"(?:arguments|parameters)"\s*:\s*')
_decoder = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class SampledCall:
    """One tool call found in sampled text; `arguments` is the text exactly as sampled, JSON unless `is_malformed`."""

    name: str
    arguments: str
    is_malformed: bool = False


class _Malformed(ValueError):
    """A block is not a JSON object."""


def generic_turns(turns: tuple[Turn, ...], tools: tuple[Tool, ...]) -> tuple[Turn, ...]:
    """Rewrites tool roles and tool calls as text, for a template without tools.

    It appends the tools to the first system message, and adds one if there is none.
    """
    plain: list[Turn] = []
    for is_result, group in groupby(turns, key=lambda turn: turn.role == "tool"):
        if is_result:
            plain.append(Turn("user", "\n".join(_wrapped_result(turn) for turn in group)))
        else:
            plain.extend(_spelled_out(turn) for turn in group)
    return _with_preamble(plain, tools) if tools else tuple(plain)


def hermes_call(block: str, *, needs_arguments: bool = False) -> SampledCall | None:
    """Returns the call of a JSON object with `name` and `arguments` or `parameters`; None without a readable name.

    Args: needs_arguments: True also returns None for an object without them
    """
    text = block.strip()
    members, is_malformed = _members(text)
    name = _value(members.get("name", '""'))
    if not isinstance(name, str) or not name:
        return None
    arguments = members.get("arguments", members.get("parameters"))
    parsed = None if arguments is None else _value(arguments)
    if not is_unicode(block, [name, parsed]) or (needs_arguments and arguments is None):
        return None
    if arguments is None:
        return SampledCall(name, _raw_arguments(text) if is_malformed else "{}", is_malformed)
    if isinstance(parsed, str):
        # Some models write the arguments as a string of JSON, as OpenAI's API does.
        return SampledCall(name, parsed, is_malformed)
    return SampledCall(name, arguments, is_malformed or not isinstance(parsed, dict))


def _raw_arguments(text: str) -> str:
    """Returns the text of arguments that are no JSON, without the brace that closes the call."""
    found = _ARGUMENTS.search(text)
    raw = text[found.end() :] if found else ""
    return raw[:-1].rstrip() if raw.endswith("}") and raw.count("}") > raw.count("{") else raw


def _members(text: str) -> tuple[dict[str, str], bool]:
    """Returns the top-level members of a JSON object as raw text, and whether the text after them is no JSON.

    `json.loads` would lose the exact spelling.
    """
    members: dict[str, str] = {}
    try:
        position = _expect(text, 0, "{")
        while text[position : position + 1] != "}":
            key, position = _scan(text, position)
            start = _expect(text, _skip_space(text, position), ":")
            _, end = _scan(text, start)
            members[str(key)] = text[start:end]
            position = _skip_space(text, end)
            if text[position : position + 1] == ",":
                position = _skip_space(text, position + 1)
            elif text[position : position + 1] != "}":
                raise _Malformed("expected ',' between an object's members")
    except _Malformed:
        return members, True
    return members, bool(text[position + 1 :].strip())


def _scan(text: str, position: int) -> tuple[object, int]:
    try:
        value, end = _decoder.raw_decode(text, position)
    except (ValueError, RecursionError) as error:
        raise _Malformed(str(error)) from error
    return value, end


def _value(text: str) -> object:
    return _scan(text, 0)[0]


def _expect(text: str, position: int, character: str) -> int:
    if text[position : position + 1] != character:
        raise _Malformed(f"expected {character!r}")
    return _skip_space(text, position + 1)


def _skip_space(text: str, position: int) -> int:
    while text[position : position + 1] in {" ", "\t", "\n", "\r"}:
        position += 1
    return position


def _wrapped_result(turn: Turn) -> str:
    return f"<tool_response>\n{turn.content}\n</tool_response>"


def _spelled_out(turn: Turn) -> Turn:
    if not turn.tool_calls:
        return turn
    blocks = [_spell(call) for call in turn.tool_calls]
    return replace(turn, content="\n".join([turn.content, *blocks] if turn.content else blocks), tool_calls=())


def _spell(call: ToolCall) -> str:
    return f'<tool_call>\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments or "{}"}}}\n</tool_call>'


def _with_preamble(turns: list[Turn], tools: tuple[Tool, ...]) -> tuple[Turn, ...]:
    listing = "\n".join(json.dumps(tool.document, ensure_ascii=False) for tool in tools)
    preamble = _PREAMBLE.format(tools=listing)
    if turns and turns[0].role == "system":
        return (replace(turns[0], content=f"{turns[0].content}\n\n{preamble}"), *turns[1:])
    return (Turn("system", preamble), *turns)


def parsed_arguments(arguments: str) -> object:
    """Returns the arguments as a JSON value, so that equal values compare equal; invalid JSON is returned as text."""
    try:
        value: object = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return arguments if is_too_deep(value) or not is_unicode(arguments, value) else value


def is_unicode(text: str, value: object) -> bool:
    r"""Whether a value parsed from JSON contains valid Unicode alone: `\ud800` is valid JSON, but no character.

    >>> is_unicode('["\\ud800"]', ["\ud800"])
    False
    """
    if "\\ud" not in text.lower():
        return True
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
