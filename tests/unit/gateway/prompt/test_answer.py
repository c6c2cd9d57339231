"""The part of an unfinished answer that may be shown."""

from __future__ import annotations

import json

import pytest

from leyden.services.gateway.dialects.chat_completions import ChatCompletions
from leyden.services.gateway.prompt.answer import cut_at_stop, tool_parser, visible_length
from leyden.services.gateway.prompt.template import ChatModel
from leyden.services.gateway.prompt.tools.parsers import TOOL_PARSERS
from tests.fakes.model_families import FAMILIES


@pytest.mark.parametrize(
    ("text", "stops", "tools", "shown"),
    [
        ("abc", [], False, "abc"),
        ("abc", ["cd"], False, "ab"),
        ("abcde", ["cd"], False, "ab"),
        ("ab\n\nObs", ["\n\nObservation"], False, "ab"),
        ("ab\n", ["x"], False, "ab\n"),
        ("ab \n<tool", [], True, "ab"),
        ("ab \n<tool_call>{}</tool_call>", [], True, "ab"),
        ("ab \n", [], True, "ab"),
        ("ab <toolbox", [], True, "ab <toolbox"),
        ("aa", ["aab"], False, ""),
    ],
)
def test_the_beginning_of_a_stop_string_or_a_call_is_hidden(text, stops, tools, shown):
    assert text[: visible_length(text, stops, TOOL_PARSERS["hermes"] if tools else None)] == shown


def test_the_first_stop_string_in_the_text_cuts_it():
    assert cut_at_stop("abcabc", ["cab", "bc"]) == ("a", "bc")
    assert cut_at_stop("abc", ["x"]) == ("abc", None)


@pytest.mark.parametrize(
    ("text", "is_start", "shown"),
    [
        ('\n{"name', True, ""),
        ('{"name', False, '{"name'),
        ("Well, {", True, "Well, {"),
        ("Well <|python", True, "Well"),
    ],
)
def test_bare_json_is_hidden_at_the_beginning_of_an_answer_alone(text, is_start, shown):
    assert text[: visible_length(text, [], TOOL_PARSERS["llama3"], is_start=is_start)] == shown


@pytest.mark.parametrize(("choice", "name"), [("auto", "llama3"), ("required", "hermes"), ("none", None)])
def test_constrained_calls_are_parsed_in_the_form_of_the_constraint(tmp_path, choice, name):
    model = ChatModel(FAMILIES["llama3_1"].write(tmp_path / "m"))
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"model": "m", "messages": [{"role": "user", "content": "?"}], "tools": tools, "tool_choice": choice}
    parser = tool_parser(model, ChatCompletions().parse(json.dumps(body).encode(), max_choices=1))
    assert (None if parser is None else parser.name) == name
