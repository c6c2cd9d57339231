"""Parses tool calls from sampled text in the format of each model family, chosen by the chat template's text.

A call is parsed only where its text is complete: text that was cut, or that is no call of the format, stays content.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, NamedTuple, get_args

from leyden.libs.contracts.conversation import Json, Tool
from leyden.services.gateway.prompt.tools.hermes import SampledCall, hermes_call, parsed_arguments

ToolParserName = Literal[
    "hermes", "qwen3_coder", "glm", "llama3", "mistral", "deepseek", "gpt_oss", "gemma4", "phi4"
]  # fmt: skip
Tools = Sequence[Tool]


class Found(NamedTuple):
    """A tool call and its place in the text."""

    start: int
    end: int
    call: SampledCall


@dataclass(frozen=True, slots=True)
class ToolParser:
    """The tool calls of a model family.

    Args: models: examples, for the documentation; signs: texts of chat templates of this family; marks: a stream hides
        the text from the first of these on, because a call may follow; openings: the same at the beginning of an answer
        alone; find: returns the calls of a complete answer in the order of the text
    """

    name: ToolParserName
    models: str
    signs: tuple[str, ...]
    marks: tuple[str, ...]
    find: Callable[[str, Tools], Iterable[Found]]
    openings: tuple[str, ...] = ()

    def parse(self, text: str, tools: Tools = ()) -> tuple[str, tuple[SampledCall, ...]]:
        """Returns content and tool calls of an answer; without calls the text as it is.

        Args: tools: their schemas tell texts from numbers where the format writes both alike
        """
        found = [one for one in self.find(text, tools) if _is_unicode(one.call.arguments)]
        if not found:
            return text, ()
        starts, ends = [0, *(one.end for one in found)], [*(one.start for one in found), len(text)]
        first, *others = [text[start:end] for start, end in zip(starts, ends, strict=True)]
        before, after = first.rstrip(), "".join(others).strip()
        content = f"{before}\n{after}" if before and after else before or after
        return content, tuple(one.call for one in found)


def _each(text: str, mark: re.Pattern[str], parse: Callable[[re.Match[str]], Sequence[Found]]) -> Iterator[Found]:
    """Yields the calls at each mark, up to the first that begins none: a later mark may be a text inside it."""
    position = 0
    while (begin := mark.search(text, position)) and (found := parse(begin)):
        yield from found
        position = found[-1].end


def _hermes(text: str, _tools: Tools) -> Iterator[Found]:
    position = 0
    while begin := _TOOL_CALL.search(text, position):
        # A text of the arguments may contain a tag.
        value = _value_end(text, begin.end())
        close = text.find(_TOOL_CALL_END, value or begin.end())
        end = len(text) if close < 0 else close
        position = end + (0 if close < 0 else len(_TOOL_CALL_END))
        call = hermes_call(text[begin.end() : end])
        # The text ended before the closing tag: the call is one only if nothing of it is missing.
        if call is not None and (close >= 0 or not call.is_malformed):
            yield Found(begin.start(), position, call)


def _phi4(text: str, _tools: Tools) -> Iterator[Found]:
    return _each(text, _PHI4, lambda begin: _listed(text, begin.start(), begin.end(), "<|/tool_call|>"))


def _llama3(text: str, _tools: Tools) -> Sequence[Found]:
    begin = -1 if text.lstrip()[:1] in {"{", "["} else text.find(_PYTHON_TAG)
    start = len(text) - len(text.lstrip()) if begin < 0 else begin
    body = text[start:].removeprefix(_PYTHON_TAG)
    has_tag = body != text[start:]
    if has_tag and (built_in := _BUILT_IN.fullmatch(body.strip())):
        arguments = dict(_BUILT_IN_ARGUMENT.findall(built_in[2]))
        return [Found(start, len(text), SampledCall(built_in[1], json.dumps(arguments, ensure_ascii=False)))]
    objects, end = _objects(text, len(text) - len(body))
    calls = [hermes_call(text[first:last], needs_arguments=True) for first, last in objects]
    # No mark ends a call, and bare JSON may be an answer: all of it must be calls.
    if text[end:].strip() or any(call is None or call.is_malformed for call in calls):
        return []
    return _places(start, objects, end, calls)


def _mistral(text: str, _tools: Tools) -> Iterator[Found]:
    def parse(begin: re.Match[str]) -> Sequence[Found]:
        named = _MISTRAL_NAMED.match(text, begin.end())
        if named is None:
            return _listed(text, begin.start(), begin.end(), "")
        end = _value_end(text, named.end())
        return [] if end is None else [Found(begin.start(), end, SampledCall(named[1], text[named.end() : end]))]

    return _each(text, _TOOL_CALLS, parse)


def _deepseek(text: str, _tools: Tools) -> Iterator[Found]:
    def parse(begin: re.Match[str]) -> Sequence[Found]:
        block = _DEEPSEEK_BODY.match(text, begin.end())
        if block is None:
            return []
        kind, body = block[1].strip(), block[2].strip()
        # V3 and R1 write `function`, the name and a block of code; V3.1 the name and the arguments.
        fenced = _FENCED.fullmatch(body)
        name, arguments = (fenced[1].strip(), fenced[2]) if fenced else (kind, body)
        is_call = name and (fenced or kind != "function")
        return [Found(begin.start(), block.end(), _call(name, arguments))] if is_call else []

    return _each(text, _DEEPSEEK, parse)


def _gpt_oss(text: str, _tools: Tools) -> Iterator[Found]:
    def parse(begin: re.Match[str]) -> Sequence[Found]:
        value = _value_end(text, begin.end())
        end = _HARMONY_END.search(text, value or begin.end())
        arguments = text[begin.end() : end.start() if end else value]
        if end is None and value is None:
            return []
        return [Found(begin.start(), end.end() if end else value or 0, _call(begin[1], arguments.strip() or "{}"))]

    return _each(text, _HARMONY, parse)


def _qwen3_coder(text: str, tools: Tools) -> Iterator[Found]:
    return _each(text, _FUNCTION, lambda begin: _paired(begin, _FUNCTION_END, _PARAMETER, "<parameter=", tools))


def _glm(text: str, tools: Tools) -> Iterator[Found]:
    return _each(text, _GLM, lambda begin: _paired(begin, _GLM_END, _GLM_ARGUMENT, "<arg_key>", tools))


def _gemma4(text: str, _tools: Tools) -> Iterator[Found]:
    def parse(begin: re.Match[str]) -> Sequence[Found]:
        block = _GEMMA_BODY.match(text, begin.end())
        if block is None:
            return []
        # Texts stand in marks of their own, and keys have no quotes.
        pieces = block[1].split('<|"|>')
        spelled = "".join(
            json.dumps(piece, ensure_ascii=False) if index % 2 else _BARE_KEY.sub(r'\1"\2":', piece)
            for index, piece in enumerate(pieces)
        )
        return [Found(begin.start(), block.end(), _call(begin[1], "{" + spelled + "}"))]

    return _each(text, _GEMMA, parse)


_TOOL_CALL, _TOOL_CALL_END = re.compile(r"<tool_call>\s*"), "</tool_call>"
_PHI4 = re.compile(r"<\|tool_call\|>")
_SPACE, _SEPARATOR = re.compile(r"\s*"), re.compile(r"\s*[,;]?\s*")
_PYTHON_TAG = "<|python_tag|>"
_BUILT_IN = re.compile(r"(\w+)\.call\((.*)\)", re.DOTALL)
_BUILT_IN_ARGUMENT = re.compile(r'(\w+)="(.*?)"(?=, \w+="|\Z)', re.DOTALL)
_TOOL_CALLS = re.compile(r"\[TOOL_CALLS\]")
_MISTRAL_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*[\w-]+\s*)?\[ARGS\]\s*(?={)")
_DEEPSEEK = re.compile(r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>")
_DEEPSEEK_BODY = re.compile(
    r"((?:(?!<｜tool▁).)*+)<｜tool▁sep｜>((?:(?!<｜tool▁).)*+)<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?",
    re.DOTALL,
)
_FENCED = re.compile(r"([^\n]+)\n```json\n(.*)\n```", re.DOTALL)
_HARMONY = re.compile(
    r"(?:<\|start\|>assistant)?(?:<\|channel\|>[a-z]+)? ?to=(?:functions\.)?([\w.-]++)(?:<\|channel\|>[a-z]++)?"
    r"(?: ?(?:<\|constrain\|> ?)?\w++)? ?<\|message\|>"
)
_HARMONY_END = re.compile(r"<\|call\|>|<\|end\|>|(?=<\|start\|>)")
_FUNCTION = re.compile(r"(?:<tool_call>\s*)?<function=([^<>\n]++)>\s*")
_FUNCTION_END = re.compile(r"(</parameter>\s*)?</function>(?:\s*</tool_call>|(?=\s*(?:<tool_call>|<function=|\Z)))")
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL)
_GLM = re.compile(r"<tool_call>\s*([^\s<]+)\s*")
_GLM_END = re.compile(r"(</arg_value>\s*)?</tool_call>")
_GLM_ARGUMENT = re.compile(
    r"<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>(?=\s*(?:<arg_key>|\Z))", re.DOTALL
)
_GEMMA = re.compile(r"<\|tool_call>call:([\w.-]+)\{")
_GEMMA_BODY = re.compile(r'((?:<\|"\|>(?:(?!<\|"\|>).)*<\|"\|>|(?!<\|"\|>).)*?)\}<tool_call\|>', re.DOTALL)
_BARE_KEY = re.compile(r"(^|[{,])\s*([^\s:{},\[\]\"]+):")
_decoder = json.JSONDecoder()

TOOL_PARSERS: dict[ToolParserName, ToolParser] = {
    parser.name: parser
    for parser in (
        ToolParser("gpt_oss", "gpt-oss", ("<|channel|>",), ("<|channel|>", "<|start|>"), _gpt_oss, (" to=", "to=")),
        ToolParser("deepseek", "DeepSeek V3, R1, V3.1", ("<｜tool▁call▁begin｜>",), ("<｜tool▁call",), _deepseek),
        ToolParser("gemma4", "Gemma 4", ("<|tool_call>call:",), ("<|tool_call>",), _gemma4),
        ToolParser("phi4", "Phi-4-mini", ("<|tool_call|>",), ("<|tool_call|>",), _phi4),
        ToolParser("mistral", "Mistral, Ministral, Devstral", ("[TOOL_CALLS]",), ("[TOOL_CALLS]",), _mistral),
        ToolParser("glm", "GLM-4.5, GLM-4.6", ("<arg_key>",), ("<tool_call>",), _glm),
        ToolParser("qwen3_coder", "Qwen3-Coder, Qwen3.5", ("<function=",), ("<tool_call>", "<function="), _qwen3_coder),
        ToolParser(
            "llama3",
            "Llama 3.1, 3.2, 3.3",
            (_PYTHON_TAG, '"parameters": '),
            (_PYTHON_TAG,),
            _llama3,
            ("{", "["),
        ),
        ToolParser("hermes", "Qwen2.5, Qwen3, Hermes, SmolLM", ("<tool_call>",), ("<tool_call>",), _hermes),
    )
}
"""The parsers by name. A template gets the first of whose signs it has one, else `hermes`."""
assert set(TOOL_PARSERS) == set(get_args(ToolParserName))

_TAGS = ("<tool_call>", "</tool_call>")
CALL_TOKENS: dict[ToolParserName, tuple[str, ...]] = {
    "hermes": _TAGS,
    "qwen3_coder": _TAGS,
    "glm": (*_TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "llama3": (_PYTHON_TAG,),
    "mistral": ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    "deepseek": (
        "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "gemma4": ("<|tool_call>", "<tool_call|>", '<|"|>'),
    "phi4": ("<|tool_call|>", "<|/tool_call|>"),
}  # fmt: skip
"""Tokens around the calls of an answer, which begin and end no turn; those of gpt-oss all do."""
TEXT_TAGS = frozenset(
    {
        *chain.from_iterable(CALL_TOKENS.values()),
        *("<tool_response>", "</tool_response>", "<think>", "</think>", "<tools>", "</tools>"),
        *(f"<｜tool▁output{form}｜>" for form in ("s▁begin", "▁begin", "▁end", "s▁end")),
    }
)
"""Tokens that texts may write where they are no special ones: agents explain calls and send results in these tags.

None of them begins a turn. Qwen3's template itself looks for them in users' messages.
"""


def tool_parser_of(template: str, *, lists_tools: bool) -> ToolParser:
    """Returns the parser for a chat template.

    Args: lists_tools: whether the template writes the tools; otherwise the gateway does, and asks for Hermes' format
    """
    if lists_tools:
        for parser in TOOL_PARSERS.values():
            if any(sign in template for sign in parser.signs):
                return parser
    return TOOL_PARSERS["hermes"]


def _call(name: str, arguments: str) -> SampledCall:
    """Returns a call whose end was sampled: arguments that are no JSON object make it malformed."""
    try:
        is_object = isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        is_object = False
    return SampledCall(name, arguments, not is_object)


def _listed(text: str, start: int, position: int, close: str) -> Sequence[Found]:
    """Returns the calls of a JSON object, or of a list of them, from `position` on; none if one is incomplete."""
    objects, end = _objects(text, position)
    calls = [hermes_call(text[first:last]) for first, last in objects]
    if any(call is None or call.is_malformed for call in calls):
        return []
    if text[end:].lstrip().startswith(close):
        end = text.index(close, end) + len(close)
    return _places(start, objects, end, calls)


def _places(
    start: int, objects: Sequence[tuple[int, int]], end: int, calls: Sequence[SampledCall | None]
) -> Sequence[Found]:
    """Returns calls that follow each other from `start` to `end`."""
    ends = [*(last for _, last in objects[:-1]), end]
    starts = [start, *ends]
    places = zip(starts, ends, calls, strict=False)
    return [Found(first, last, call) for first, last, call in places if call is not None]


def _objects(text: str, position: int) -> tuple[list[tuple[int, int]], int]:
    """Returns the places of JSON objects that follow each other, and the end of them.

    It returns none of a list whose end is missing.
    """
    position = _SPACE.match(text, position).end()  # type: ignore[union-attr]
    is_list = text[position : position + 1] == "["
    position, end = position + is_list, position
    objects = []
    while True:
        position = _SEPARATOR.match(text, position).end()  # type: ignore[union-attr]
        value = _value_end(text, position) if text[position : position + 1] == "{" else None
        if value is None:
            break
        objects.append((position, value))
        position = end = value
    if is_list:
        return (objects, position + 1) if text[position : position + 1] == "]" else ([], end)
    return objects, end


def _is_unicode(arguments: str) -> bool:
    r"""Whether arguments contain valid Unicode alone: a lone `\ud800` is valid JSON, but no character."""
    return "\\ud" not in arguments.lower() or not isinstance(parsed_arguments(arguments), str)


def _value_end(text: str, position: int) -> int | None:
    try:
        return _decoder.raw_decode(text, position)[1]
    except (ValueError, RecursionError):
        return None


def _paired(
    begin: re.Match[str], close: re.Pattern[str], pair: re.Pattern[str], opening: str, tools: Tools
) -> Sequence[Found]:
    """Returns the call whose arguments are names and values.

    Args: begin: ends before them, its group is the name; close: ends the call, its group is the end of the last value;
        opening: the mark before a name
    """
    text, position = begin.string, begin.end()
    end = next((one for one in close.finditer(text, position) if one[1] or one.start() == position), None)
    if end is None:
        return []
    body = text[position : max(end.end(1), end.start())]
    properties = _properties(tools, begin[1])
    arguments, position = {}, 0
    for one in pair.finditer(body):
        # A value that contains such marks itself cannot be told from the arguments after it.
        if body[position : one.start()].strip() or opening in one[2]:
            return []
        name = one[1].strip()
        arguments[name] = _typed(one[2], properties.get(name))
        position = one.end()
    if body[position:].strip():
        return []
    try:
        dumped = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        # A value may name half of a character, which no row can hold.
        dumped.encode()
    except ValueError:
        return []
    return [Found(begin.start(), end.end(), SampledCall(begin[1], dumped))]


def _properties(tools: Tools, name: str) -> Json:
    """Returns the schemas of a tool's parameters by name."""
    for tool in tools:
        if tool.name == name:
            properties = tool.parameters.get("properties") if isinstance(tool.parameters, dict) else None
            return properties if isinstance(properties, dict) else {}
    return {}


def _typed(text: str, schema: Any) -> Any:
    """Returns the JSON value of an argument if its schema allows one of that type, else the text.

    A value counts as Python writes it, too, if the schema allows no text: templates of these formats show models `True`
    and `['a']`, and SGLang reads them so.
    """
    types = _types(schema)
    if types <= {"string"}:
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text if "string" in types else _python_value(text)
    return value if _NAMES[type(value)] & types else text


def _python_value(text: str) -> Any:
    """Returns the list, the object or the word that Python writes so, else the text."""
    word = text.strip()
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    if word[:1] not in {"[", "{"}:
        return text
    try:
        value = ast.literal_eval(word)
        json.dumps(value)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return text
    return value if isinstance(value, list | dict) else text


def _types(schema: Any) -> set[str]:
    """Returns the JSON types that a schema names; agents send schemas of any shape."""
    if not isinstance(schema, dict):
        return set()
    declared = schema.get("type")
    listed = declared if isinstance(declared, list) else [declared]
    types = {name for name in listed if isinstance(name, str)}
    for keyword in ("anyOf", "oneOf"):
        options = schema.get(keyword)
        types |= {name for option in options for name in _types(option)} if isinstance(options, list) else set()
    if not types and isinstance(schema.get("enum"), list):
        types = {name for value in schema["enum"] for name in _NAMES[type(value)]}
    return types or ({"object"} if "properties" in schema or "$ref" in schema else set())


_WORDS = {"true": True, "false": False, "none": None}
_NAMES: dict[type, set[str]] = {
    str: {"string"}, bool: {"boolean"}, int: {"integer", "number"}, float: {"number"}, list: {"array"},
    dict: {"object"}, type(None): {"null"},
}  # fmt: skip
