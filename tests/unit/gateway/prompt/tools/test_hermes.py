"""Tool calls out of sampled text, and the generic form into it."""

from __future__ import annotations

import pytest

from leyden.libs.contracts.conversation import Tool, ToolCall, Turn
from leyden.services.gateway.prompt.tools.hermes import SampledCall, generic_turns
from leyden.services.gateway.prompt.tools.parsers import TOOL_PARSERS

parse_calls = TOOL_PARSERS["hermes"].parse


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("no call", "no call", []),
        ('<tool_call>{"name": "f", "arguments": {"a": [1,  2]}}</tool_call>', "", [("f", '{"a": [1,  2]}')]),
        ('<tool_call>\n{"arguments":{}, "name":"f"}\n</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "parameters": {"x": 1}}</tool_call>', "", [("f", '{"x": 1}')]),
        ('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [("f", '{"x": 1}')]),
        ('<tool_call>{"name": "f", "arguments": {"t": "</tool"}}', "", [("f", '{"t": "</tool"}')]),
        (
            'a <tool_call>{"name": "f", "arguments": {}}</tool_call> b '
            '<tool_call>{"name": "g", "arguments": {}}</tool_call> c',
            "a\nb  c",
            [("f", "{}"), ("g", "{}")],
        ),
        (
            '<tool_call>{"name": "f", "arguments": {"big": 1e999, "n": NaN}}</tool_call>',
            "",
            [("f", '{"big": 1e999, "n": NaN}')],
        ),
    ],
)
def test_calls_are_found_with_arguments_as_sampled(text, content, calls):
    assert parse_calls(text) == (content, tuple(SampledCall(*call) for call in calls))


@pytest.mark.parametrize(
    ("block", "name", "arguments"),
    [
        ('{"name": "f", "arguments": {}', "f", "{}"),
        ('{"name": "f", "arguments": {}} trailing', "f", "{}"),
        ('{"name": "f", "arguments": [1]}', "f", "[1]"),
        ('{"name": "f", "arguments": 3}', "f", "3"),
        ('{"name": "f" "arguments": {}}', "f", "{}"),
        ('{"name": "f", "arguments": {"x": }', "f", '{"x": }'),
        ('{"name": "f", "arguments": {"x": \'a\'}}', "f", "{\"x\": 'a'}"),
        ('{"name": "f", "parameters": {"x": "cut', "f", '{"x": "cut'),
        ('{"name": "f", "argu', "f", ""),
        ('{"name": "f", "arguments": ' + "[" * 5000, "f", "[" * 5000),
    ],
)
def test_a_malformed_call_has_its_name_and_the_raw_text_of_its_arguments(block, name, arguments):
    content, calls = parse_calls(f"x <tool_call>{block}</tool_call> y")
    assert (content, calls) == ("x\ny", (SampledCall(name, arguments, is_malformed=True),))


@pytest.mark.parametrize(
    "block", ["", "not json", "[]", '{"name": 3, "arguments": {}}', '{"arguments": {}}', '{"name": "a\\ud800"}', '{"na']
)
def test_a_block_without_a_readable_name_is_content(block):
    text = f"x <tool_call>{block}</tool_call>"
    assert parse_calls(text) == (text, ())
    good = '<tool_call>{"name": "ok"}</tool_call>'
    assert parse_calls(f"{text} {good}") == (text, (SampledCall("ok", "{}"),))


def test_the_generic_form_joins_results_of_a_round_and_preserves_sampled_arguments():
    turns = (
        Turn("user", "?"),
        Turn("assistant", "Two.", tool_calls=(ToolCall("1", "f", '{"a":1}'), ToolCall("2", "g", ""))),
        Turn("tool", "one", tool_call_id="1"),
        Turn("tool", "two", tool_call_id="2"),
    )
    user, assistant, results = generic_turns(turns, ())
    assert user == turns[0]
    assert assistant.content == (
        'Two.\n<tool_call>\n{"name": "f", "arguments": {"a":1}}\n</tool_call>'
        '\n<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
    )
    assert (assistant.tool_calls, results.role) == ((), "user")
    assert results.content == ("<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>")


def test_tools_are_listed_in_the_first_system_message_or_in_one_of_their_own():
    tools = (Tool.of({"name": "fé"}),)
    (extended, _) = generic_turns((Turn("system", "Be brief."), Turn("user", "?")), tools)
    (made, _) = generic_turns((Turn("user", "?"),), tools)
    assert extended.content.startswith("Be brief.\n\n# Tools\n")
    assert made.content.startswith("# Tools\n")
    assert '{"type": "function", "function": {"name": "fé"}}' in made.content
