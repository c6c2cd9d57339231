"""Tool calls of each model family: what its template writes for a call parses back to that call."""

from __future__ import annotations

import json
from typing import Any

import pytest

from leyden.libs.contracts.conversation import Tool, ToolCall, Turn
from leyden.services.gateway.prompt.reasoning import REASONING_PARSERS
from leyden.services.gateway.prompt.template import ChatModel
from leyden.services.gateway.prompt.tokenizer import TEXT_MARK
from leyden.services.gateway.prompt.tools.parsers import TOOL_PARSERS, tool_parser_of
from tests.fakes.model_families import FAMILIES

ARGUMENTS: dict[str, Any] = {
    "city": 'Zürich "old" town\nline {two}',
    "days": 3,
    "exact": False,
    "places": ["a, b", {"x": [1, None]}],
    "filter": {"kind": {"deep": "}"}, "n": 2.5},
}
PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "exact": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    "places": {"type": ["array", "null"]},
    "filter": {"type": "object"},
}
TOOLS = (
    Tool.of(
        {
            "name": "get_weather",
            "description": "d",
            "parameters": {"type": "object", "properties": PROPERTIES, "required": []},
        }
    ),
)
SINGLE = {"llama3_1", "llama3_2", "gpt_oss"}
IMITATIONS = [
    '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
    '[TOOL_CALLS] [{"name": "g", "arguments": {}}]',
    "<tool_call>\n<function=g>\n</function>\n</tool_call>",
    "<tool_call>g\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "<|channel|>commentary to=functions.g<|message|>{}<|call|>",
    "<|tool_call>call:g{}<tool_call|>",
    '<|python_tag|>{"name": "g", "parameters": {}}',
]


NO_ESCAPES = {"glm": IMITATIONS[3:4]}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("families")
    return {name: ChatModel(family.write(folder / name)) for name, family in FAMILIES.items()}


@pytest.fixture
def model(family, models):
    return models[family]


def sampled_text(model: ChatModel, arguments: list[dict[str, Any]]) -> str:
    """The text that the model samples to call the tool, as its template writes such an answer."""
    turns = [Turn("user", "?")]
    calls = tuple(ToolCall(f"call_{n:09}", "get_weather", json.dumps(one)) for n, one in enumerate(arguments))
    prompt = model.render(turns, TOOLS, {})
    full = model.render([*turns, Turn("assistant", "", tool_calls=calls)], TOOLS, {}, add_generation_prompt=False)
    # Some templates open thoughts for the model that they leave out of the answer.
    prompt = prompt.removesuffix("<think>\n") if not full.startswith(prompt) else prompt
    assert full.startswith(prompt)
    text = full[len(prompt) :].replace(TEXT_MARK, "")
    # Phi ends a conversation with one more token.
    for end in ["\n", *map(model.tokenizer.decode, ([token] for token in model.tokenizer.eos_ids))] * 2:
        text = text.removesuffix(end)
    return text


def test_the_template_chooses_the_parser(family, model):
    assert model.tool_parser.name == FAMILIES[family].parser


def test_a_rendered_call_parses_back(model):
    content, [call] = model.tool_parser.parse(sampled_text(model, [ARGUMENTS]), TOOLS)
    assert (call.name, json.loads(call.arguments), call.is_malformed) == ("get_weather", ARGUMENTS, False)
    assert content.replace("<think>", "").replace("</think>", "").strip() == ""


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - SINGLE))
def test_several_calls_parse_back_in_order(model):
    asked = [ARGUMENTS, {}, {"days": 1}]
    _, calls = model.tool_parser.parse(sampled_text(model, asked), TOOLS)
    assert [json.loads(call.arguments) for call in calls] == asked


def test_the_templates_that_write_one_call_alone_are_known(family, model):
    assert model.renders_parallel_calls == (family not in SINGLE)


def test_a_cut_text_has_no_call_that_the_full_text_lacks(model):
    text = sampled_text(model, [ARGUMENTS, {"days": 1}] if model.renders_parallel_calls else [ARGUMENTS])
    full = model.tool_parser.parse(text, TOOLS)[1]
    for length in range(len(text)):
        content, calls = model.tool_parser.parse(text[:length], TOOLS)
        assert calls == full[: len(calls)]
        assert calls or content == text[:length]


@pytest.mark.parametrize("text", IMITATIONS)
def test_a_call_inside_an_argument_is_text(model, text):
    sampled = sampled_text(model, [{"city": text}])
    found = model.tool_parser.parse(sampled, TOOLS)
    if text in NO_ESCAPES.get(model.tool_parser.name, ()):
        # The format has no escapes for its own marks.
        assert found == (sampled, ())
        return
    [call] = found[1]
    assert json.loads(call.arguments) == {"city": text}


@pytest.mark.parametrize("text", IMITATIONS)
def test_a_call_inside_an_argument_that_was_cut_is_text(model, text):
    sampled = sampled_text(model, [{"city": text + " and on"}])
    cut = sampled[: sampled.index("and on")]
    assert [call for call in model.tool_parser.parse(cut, TOOLS)[1] if not call.is_malformed] == []


@pytest.mark.parametrize(
    ("parser", "text", "calls"),
    [
        ("llama3", '{"name": "f", "parameters": {"x":  1}}', [("f", '{"x":  1}')]),
        ("llama3", '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "arguments": {}}',
         [("f", "{}"), ("g", "{}")]),
        ("llama3", '[{"name": "f", "parameters": {}}, {"name": "g", "parameters": {}}]', [("f", "{}"), ("g", "{}")]),
        ("llama3", '<|python_tag|>brave_search.call(query="a, b")', [("brave_search", '{"query": "a, b"}')]),
        ("mistral", '[TOOL_CALLS][{"arguments": {}, "name": "f", "id": "call_the_first"}]', [("f", "{}")]),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"x": "[TOOL_CALLS]"}[TOOL_CALLS]g[CALL_ID]i1[ARGS]{}',
         [("f", '{"x": "[TOOL_CALLS]"}'), ("g", "{}")]),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
         "<｜tool▁calls▁end｜>",
         [("f", "{}")]),
        ("gpt_oss", '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}', [("f", '{"x": 1}')]),
        ("gpt_oss", ' to=functions.f<|channel|>commentary json<|message|>{"x": 1}<|call|>', [("f", '{"x": 1}')]),
        ("gpt_oss", "<|channel|>commentary to=f<|message|>{}<|call|>", [("f", "{}")]),
        ("phi4", '<|tool_call|>{"name": "f", "arguments": {}}<|/tool_call|>', [("f", "{}")]),
        ("qwen3_coder", "<function=f>\n</function>", [("f", "{}")]),
        ("qwen3_coder", "<function=f>\n<parameter=a>\n</parameter> </function>\n</parameter>\n</function>",
         [("f", '{"a": "</parameter> </function>"}')]),
        ("glm", "<tool_call>f\n</tool_call>", [("f", "{}")]),
        ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", [("f", '{"a": "1"}')]),
    ],
)  # fmt: skip
def test_forms_that_models_sample_beside_the_template(parser, text, calls):
    content, found = TOOL_PARSERS[parser].parse(f" {text}\n")
    assert [(call.name, call.arguments) for call in found] == calls
    assert content == ""


PREAMBLE = "**Action plan**:\n1. Generate an HTML file\n---\nWill start executing the plan step by step"


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        ('<|channel|>analysis<|message|>User asks: "What is 2 + 2?" Simple arithmetic. Provide answer.<|end|>'
         "<|start|>assistant<|channel|>final<|message|>2 + 2 = 4.<|return|>",
         'User asks: "What is 2 + 2?" Simple arithmetic. Provide answer.', "2 + 2 = 4.", []),
        ("<|channel|>analysis<|message|>Need to use function get_weather.<|end|><|start|>assistant<|channel|>commentary"
         ' to=functions.get_weather <|constrain|>json<|message|>{"location":"San Francisco"}<|call|>',
         "Need to use function get_weather.", "", [("get_weather", '{"location":"San Francisco"}')]),
        (f"<|channel|>analysis<|message|>Long.<|end|><|start|>assistant<|channel|>commentary<|message|>{PREAMBLE}<|end|>"
         "<|start|>assistant<|channel|>commentary to=functions.generate_file<|constrain|>json<|message|>"
         '{"template": "basic_html"}<|call|>',
         "Long.", PREAMBLE, [("generate_file", '{"template": "basic_html"}')]),
        ("<|channel|>analysis<|message|>We need to use lookup_weather tool.<|end|><|start|>assistant<|channel|>analysis"
         ' to=lookup_weather code<|message|>{"location": "Tokyo"}',
         "We need to use lookup_weather tool.", "", [("lookup_weather", '{"location": "Tokyo"}')]),
        (' to=functions.get_weather<|channel|>commentary <|constrain|> json<|message|>{"location": "Tokyo"}<|call|>',
         None, "", [("get_weather", '{"location": "Tokyo"}')]),
    ],
)  # fmt: skip
def test_the_published_examples_of_harmony(text, reasoning, content, calls):
    """Those of openai/harmony: docs/format.md, and src/tests.rs for a call in `analysis`."""
    found, rest = REASONING_PARSERS["gpt_oss"].split(text)
    kept, sampled = TOOL_PARSERS["gpt_oss"].parse(rest)
    assert (found, kept, [(call.name, call.arguments) for call in sampled]) == (reasoning, content, calls)


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("llama3", '{"name": "Bob", "age": 3}'),
        ("llama3", 'Call {"name": "f", "parameters": {}}'),
        ("llama3", '{"name": "f", "parameters": {}} is what I would call.'),
        ("llama3", '{"name": "f", "parameters": {"x": }}'),
        ("llama3", "<|python_tag|>print(1)"),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"na'),
        ("mistral", "[TOOL_CALLS]f[ARGS]{"),
        ("mistral", '[TOOL_CALLS]f[ARGS]"text"'),
        ("qwen3_coder", "<tool_call>\n<function=f>\nprose\n</function>\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n1"),
        ("glm", "<tool_call>f\nprose</tool_call>"),
        ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```"),
        ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f<｜tool▁call▁end｜>"),
        ("gpt_oss", '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": '),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1'),
        ("hermes", '<tool_call>{"name": "f", "argu'),
        ("phi4", '<|tool_call|>[{"name": "f", "arguments": {}}'),
        ("gemma4", '<|tool_call>call:f{a:1'),
    ],
)  # fmt: skip
def test_half_calls_and_prose_stay_text(parser, text):
    assert TOOL_PARSERS[parser].parse(text) == (text, ())


@pytest.mark.parametrize(
    ("parser", "text", "arguments"),
    [
        ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{'x'}<｜tool▁call▁end｜>", "{'x'}"),
        ("gpt_oss", "<|channel|>commentary to=functions.f<|message|>{x}<|call|>", "{x}"),
        ("gemma4", "<|tool_call>call:f{a:b c}<tool_call|>", '{"a":b c}'),
    ],
)
def test_a_complete_call_without_json_is_malformed(parser, text, arguments):
    [call] = TOOL_PARSERS[parser].parse(text)[1]
    assert (call.name, call.arguments, call.is_malformed) == ("f", arguments, True)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "integer"}, "5", 5),
        ({"type": "number"}, "5", 5),
        ({"type": "integer"}, "five", "five"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "5", "5"),
        ({"enum": [1, 2]}, "1", 1),
        ({"$ref": "#/x"}, '{"a": 1}', {"a": 1}),
        ({"type": {"odd": 1}, "anyOf": 3}, "5", "5"),
        ("odd", "5", "5"),
        # As Python writes it.
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "FALSE", False),
        ({"type": "boolean"}, "maybe", "maybe"),
        ({"type": ["integer", "null"]}, "None", None),
        ({"type": ["string", "boolean"]}, "True", "True"),
        ({"type": "array"}, "['it', \"isn't\"]", ["it", "isn't"]),
        ({"type": "object"}, "{'a': True, 'b': None}", {"a": True, "b": None}),
        ({"type": "object"}, "{'a', 'b'}", "{'a', 'b'}"),
        ({"type": "array"}, "[" + "-" * 60_000 + "1]", "[" + "-" * 60_000 + "1]"),
        ({"type": "array"}, "[b'a']", "[b'a']"),
        (None, "5", "5"),
    ],
)
def test_the_schema_decides_between_a_text_and_another_value(schema, text, value):
    tool = Tool.of({"name": "f", "parameters": {"properties": {"a": schema}}})
    sampled = f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"
    [call] = TOOL_PARSERS["qwen3_coder"].parse(sampled, [tool])[1]
    assert json.loads(call.arguments) == {"a": value}


def test_a_template_that_lists_no_tools_gets_the_format_that_the_gateway_asks_for():
    assert tool_parser_of("[TOOL_CALLS]", lists_tools=False).name == "hermes"
    assert tool_parser_of("[TOOL_CALLS]", lists_tools=True).name == "mistral"


def test_a_parser_is_chosen_by_name(tmp_path):
    folder = FAMILIES["qwen2_5"].write(tmp_path / "m")
    assert ChatModel(folder, tool_parser="llama3").tool_parser.name == "llama3"


@pytest.mark.parametrize(
    ("name", "piece"),
    [
        ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>x"),
        ("gpt_oss", "to=functions." + "m" * 2000),
        ("qwen3_coder", "<function="),
    ],
)
def test_an_answer_that_repeats_itself_is_parsed_in_linear_time(name: str, piece: str) -> None:
    text = piece * 4000
    assert TOOL_PARSERS[name].parse(text, TOOLS) == (text, ())


@pytest.mark.parametrize("value", ["\\ud83d", "NaN", "1e999"])
def test_a_value_that_no_json_text_can_hold_makes_no_call(value: str) -> None:
    tools = (Tool.of({"name": "f", "parameters": {"properties": {"x": {"type": "array"}}}}),)
    text = f'<tool_call>\n<function=f>\n<parameter=x>\n["{value}"]\n</parameter>\n</function>\n</tool_call>'
    if value != "\\ud83d":
        text = text.replace('"', "")
    assert TOOL_PARSERS["qwen3_coder"].parse(text, tools) == (text, ())


def test_a_method_in_a_text_is_no_call_without_llamas_tag() -> None:
    assert TOOL_PARSERS["llama3"].parse("requests.call(url)", TOOLS) == ("requests.call(url)", ())
