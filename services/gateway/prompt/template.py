"""Renders conversations with the model's own chat template, in the sandbox of `sandbox.py`."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta

from leyden.libs.contracts.conversation import Json, Tool, ToolCall, Turn
from leyden.libs.contracts.ids import new_call_id
from leyden.services.gateway.calls.context import ModelRequest
from leyden.services.gateway.errors import BadRequest
from leyden.services.gateway.prompt.reasoning import (
    REASONING_PARSERS,
    THINK,
    ReasoningParser,
    ReasoningParserName,
    reasoning_parser_of,
)
from leyden.services.gateway.prompt.sandbox import RenderingSlow, TemplateSandbox, cpu_limit, to_json
from leyden.services.gateway.prompt.tokenizer import ModelTokenizer, ModelUnreadable, read_model_json, token_text
from leyden.services.gateway.prompt.tools.hermes import generic_turns, parsed_arguments
from leyden.services.gateway.prompt.tools.ids import given_ids, short_ids
from leyden.services.gateway.prompt.tools.parsers import (
    CALL_TOKENS,
    TEXT_TAGS,
    TOOL_PARSERS,
    ToolParserName,
    tool_parser_of,
)

_UNRENDERABLE = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError
)  # fmt: skip
"""Exceptions of templates that refuse a conversation or do not support its shape."""
_ANSWER, _NEXT = "the-answer-of-a-probe", "the-next-message-of-a-probe"
_PROBE_CALL = ToolCall(f"call_{new_call_id()}_0", "f", json.dumps({"x": _ANSWER}))
_MARK = f"mark-{secrets.token_hex(16)}"
_BRACKETED = re.compile(r"\W.*\w.*\W", re.DOTALL)
PROBE_SECONDS = 5.0
"""CPU time of the renderings that find out the marks of a new template; and again of those that find out its forms."""
_PROBE_OF_CALLS = (
    Turn("user", "x"),
    Turn("assistant", "", tool_calls=(_PROBE_CALL,)),
    Turn("tool", "x", tool_call_id=_PROBE_CALL.id),
)
_PROBES = (
    (Turn("system", "x"), Turn("user", "x"), Turn("assistant", "x"), Turn("user", "x")),
    (Turn("user", "x"), Turn("assistant", "x"), Turn("user", "x")),
    _PROBE_OF_CALLS,
)
"""Conversations in which every role speaks; some templates know no system message, others no tools."""


class ChatModel:
    """Chat template and tokenizer of one model; rendering is a pure function of its arguments.

    Args: folder: Hugging Face format; the template is chat_template.jinja or stands in tokenizer_config.json;
        context_length: where the engines allow less than the model
        tool_parser, reasoning_parser: the formats of its tool calls and of its reasoning, instead of those that the
        template's text suggests
    Raises: ModelUnreadable: a file is missing or unusable
    """

    def __init__(
        self,
        folder: Path,
        *,
        context_length: int | None = None,
        tool_parser: ToolParserName | None = None,
        reasoning_parser: ReasoningParserName | None = None,
    ) -> None:
        self.name, self.folder = folder.name, folder
        settings = read_model_json(folder / "tokenizer_config.json")
        source = _template_source(folder, settings)
        environment = TemplateSandbox()
        self._template = environment.from_string(source)
        self._has_tools = "tools" in jinja2.meta.find_undeclared_variables(environment.parse(source))
        texts = {name: token_text(value) for name, value in settings.items() if name.endswith("_token")}
        self._specials = {name: text for name, text in texts.items() if text is not None}
        self._has_short_ids = False
        with cpu_limit(PROBE_SECONDS):
            # Once, not for each conversation: later prompts write the ids of earlier ones again.
            if self._probed(_PROBE_OF_CALLS) is None:
                self._has_short_ids = self._probed(tuple(short_ids(_PROBE_OF_CALLS))) is not None
            written = "\n".join([source, *filter(None, map(self._probed, _PROBES))])
        self.tokenizer = ModelTokenizer(
            folder, context_length=context_length, is_mark=lambda name: _is_mark(name, written)
        )
        self.tool_parser = (
            tool_parser_of(source, lists_tools=self._has_tools) if tool_parser is None else TOOL_PARSERS[tool_parser]
        )
        self.reasoning_parser = (
            reasoning_parser_of(source) if reasoning_parser is None else REASONING_PARSERS[reasoning_parser]
        )
        of_calls = CALL_TOKENS.get(self.tool_parser.name, ())
        self._of_answers = self.tokenizer.specials.intersection(of_calls) | self._marks_of_reasoning()
        fields = (name for name in ("reasoning_content", "thinking") if f".{name}" in source or f"'{name}'" in source)
        self._reasoning_field = next(fields, None)
        # Llama's template refuses an answer with two tool calls, that of gpt-oss leaves out one.
        with cpu_limit(PROBE_SECONDS):
            self.renders_parallel_calls = (
                self.tool_parser.name not in {"llama3", "gpt_oss"} or self._renders_both_calls()
            )
            """Whether an answer may have several tool calls."""
            self._closing = self._find_closing()
            self._call_closing = self._find_call_closing()

    def render(
        self, turns: Sequence[Turn], tools: tuple[Tool, ...], options: Json, *, add_generation_prompt: bool = True
    ) -> str:
        """Renders the full conversation. `encode` reads the special tokens in its texts as letters (`_as_text`).

        Args: options: the request's template options, such as `enable_thinking`
        Raises: BadRequest: the template refuses the conversation, cannot render it, or takes longer than `cpu_limit`
        """
        turns = self._with_its_ids([self._as_text(turn) for turn in turns])
        tools = tuple(Tool(_spelled(tool.document, self.tokenizer.as_text)) for tool in tools)
        uses_tools = bool(tools) or any(turn.role == "tool" or turn.tool_calls for turn in turns)
        spelled = generic_turns(tuple(turns), tools) if uses_tools and not self._has_tools else turns
        messages = list(map(self._message, spelled))
        variables = {
            **self._specials,
            **options,
            "tools": [self._described(tool) for tool in tools] or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._fill(messages, variables)
        except RenderingSlow as error:
            raise BadRequest(
                f"The model's chat template renders these messages too slowly: {error}. Send fewer or shorter messages,"
                " or train a model with a simpler template.",
                param="messages",
                code="template_timeout",
            ) from error
        except _UNRENDERABLE as error:
            raise BadRequest(
                f"The model's chat template cannot render these messages: {error}.",
                param="messages",
                code="template_error",
            ) from error

    def _fill(self, messages: list[Json], variables: Json) -> str:
        """Raises: RenderingSlow, and those of _UNRENDERABLE."""
        # Some templates (GLM) list the arguments one by one, which malformed ones do not allow; others (DeepSeek)
        # expect them as text.
        functions = [call["function"] for message in messages for call in message.get("tool_calls", ())]
        for repair in (_wrap_malformed_arguments, _write_arguments) if functions else ():
            with suppress(*_UNRENDERABLE):
                return self._template.render(**variables, messages=messages)
            repair(functions)
        return self._template.render(**variables, messages=messages)

    def _probed(self, turns: Sequence[Turn]) -> str | None:
        """Returns a conversation as the template writes it, with the marks that it makes from a role's name.

        None where it refuses the conversation.
        """
        variables = {**self._specials, "tools": None, "documents": None, "add_generation_prompt": True}
        with suppress(*_UNRENDERABLE, RenderingSlow):
            return self._fill(list(map(_template_message, self._with_its_ids(turns))), variables)
        return None

    def _with_its_ids(self, turns: Sequence[Turn]) -> Sequence[Turn]:
        """Returns the turns with ids of tool calls that the template takes."""
        return list(short_ids(given_ids(turns))) if self._has_short_ids else turns

    def start_of_turn(
        self, index: int, turns: Sequence[Turn], tools: tuple[Tool, ...], options: Json, text: str
    ) -> int | None:
        """Returns the position of turn `index`'s content in the rendered conversation; None where it is not found.

        It renders the conversation with a marker before that content; without the marker the text must be the same.

        Args: text: the rendered conversation
        """
        turn = turns[index]
        marked = [*turns[:index], replace(turn, content=_MARK + turn.content), *turns[index + 1 :]]
        try:
            before, mark, after = self.render(marked, tools, options).partition(_MARK)
        except BadRequest:
            return None
        return len(before) if mark and before + after == text else None

    def split_reasoning(self, turn: Turn) -> Turn:
        """Returns an assistant's turn with the reasoning that the agent wrote into its content in the model's marks."""
        if turn.role != "assistant" or turn.reasoning is not None or not self.reasoning_parser.opening:
            return turn
        if self.reasoning_parser.closing not in turn.content:
            return turn
        reasoning, content = self.reasoning_parser.split(turn.content)
        return replace(turn, reasoning=reasoning, content=content)

    def read_reasoning(self, turn: Turn, request: ModelRequest) -> Turn:
        """Returns a turn with the reasoning in its content split; without any where the model's family has none."""
        if self.reasoning_parser.name == "none" and self._reasoning_field is None and not request.asks_for_reasoning:
            return replace(turn, reasoning=None) if turn.reasoning is not None else turn
        return self.split_reasoning(turn)

    def shows_reasoning(self, turn: Turn, text: str) -> tuple[bool, str]:
        """Returns whether a rendered answer begins with the turn's reasoning, and the text after it."""
        return self.reasoning_marks.shows(turn.reasoning, text)

    @property
    def reasoning_marks(self) -> ReasoningParser:
        """The marks around reasoning; those of most families where the parser has none."""
        return self.reasoning_parser if self.reasoning_parser.closing else THINK

    def _message(self, turn: Turn) -> Json:
        message = _template_message(turn)
        for call in message.get("tool_calls", ()):
            # JSON may write a token's name with escapes.
            call["function"]["arguments"] = _spelled(call["function"]["arguments"], self._spell_answer)
        if turn.reasoning is None:
            return message
        if self._reasoning_field is None and not self.reasoning_marks.opening:
            return message
        if self._reasoning_field is None:
            return message | {"content": self.reasoning_marks.spell(turn.reasoning, turn.content)}
        if self._reasoning_field == "thinking" and turn.tool_calls:
            # The template of gpt-oss has one place for both.
            return message | {"content": "", "thinking": turn.reasoning or turn.content}
        return message | {self._reasoning_field: turn.reasoning}

    def _as_text(self, turn: Turn) -> Turn:
        """Returns a turn whose texts write no special tokens: turns begin and end where the template writes them.

        Answers keep those around calls and reasoning, which models write, too, and agents send back as content.
        Sampled tokens stay as they are: the prompt continues them, and their text is not encoded again.
        """
        # Why: few texts name a special token, and without this a prompt of 200 turns takes a seventh more.
        if not self.tokenizer.names_specials(_texts(turn)):
            return turn
        as_text = self.tokenizer.as_text
        spell = self._spell_answer if turn.role == "assistant" else as_text
        return replace(
            turn,
            content=spell(turn.content),
            name=turn.name and as_text(turn.name),
            tool_call_id=turn.tool_call_id and as_text(turn.tool_call_id),
            reasoning=turn.reasoning and spell(turn.reasoning),
            tool_calls=tuple(
                replace(call, id=as_text(call.id), name=as_text(call.name), arguments=spell(call.arguments))
                for call in turn.tool_calls
            ),
        )

    def _spell_answer(self, text: str) -> str:
        return self.tokenizer.as_text(text, besides=self._of_answers)

    def _marks_of_reasoning(self) -> frozenset[str]:
        parser = self.reasoning_parser
        # The mark that ends the reasoning of gpt-oss ends a message.
        marks = [parser.opening, parser.closing] if parser.opening else []
        return frozenset(name for name in self.tokenizer.specials if any(name in mark for mark in marks))

    def _described(self, tool: Tool) -> Json:
        # The template of gpt-oss cannot write a tool without a description.
        if self.tool_parser.name != "gpt_oss" or tool.function.get("description"):
            return tool.document
        return tool.document | {"function": tool.function | {"description": ""}}

    def _renders_both_calls(self) -> bool:
        calls = (ToolCall("call_0000000001", _ANSWER, "{}"), ToolCall("call_0000000002", _NEXT, "{}"))
        results = [Turn("tool", "x", tool_call_id=call.id) for call in calls]
        try:
            text = self.render((Turn("user", "x"), Turn("assistant", "", tool_calls=calls), *results), (), {})
        except BadRequest:
            return False
        return _ANSWER in text and _NEXT in text

    def closing_of(self, answer: Turn, last: int | None = None) -> str | None:
        """Returns the text that ends an assistant's turn; None where the template ends such turns in different ways, or
        ends a turn with a call by another mark than the sampled one.

        Args: last: the last sampled token
        """
        if not answer.tool_calls or self._call_closing is None:
            return self._closing
        is_other_mark = (
            last is not None and last in self.tokenizer.eos_ids and self.tokenizer.decode([last]) != self._call_closing
        )
        return None if is_other_mark else self._call_closing

    def _find_call_closing(self) -> str | None:
        """Returns the mark that ends an answer with a tool call, where a template (gpt-oss, Gemma 4) ends others
        differently."""
        turns = (
            Turn("user", "x"),
            Turn("assistant", "", tool_calls=(_PROBE_CALL,)),
            Turn("tool", _NEXT, tool_call_id=_PROBE_CALL.id),
        )
        try:
            at_end = self.render(turns[:2], (), {}, add_generation_prompt=False).rpartition(_ANSWER)[2]
            inside = self.render(turns, (), {}).rpartition(_ANSWER)[2]
        except BadRequest:
            return None
        if self._closing is not None and at_end.endswith(self._closing):
            return None
        marks = (self.tokenizer.decode([token]) for token in self.tokenizer.eos_ids)
        return next((mark for mark in marks if at_end.endswith(mark) and inside.startswith(at_end)), None)

    def _find_closing(self) -> str | None:
        """Returns the text that the template writes after both a last answer and one before a user's turn."""
        turns = (Turn("user", "x"), Turn("assistant", _ANSWER), Turn("user", _NEXT))
        try:
            at_end = self.render(turns[:2], (), {}, add_generation_prompt=False).rpartition(_ANSWER)
            inside = self.render(turns, (), {}).partition(_ANSWER)
        except BadRequest:
            return None
        if not (at_end[1] and inside[1]):
            return None
        closing, following = at_end[2], inside[2].partition(_NEXT)[0]
        if following.startswith(closing):
            return closing
        # Phi ends the last answer with one more token than the others: only the common tokens count.
        pairs = zip(self.tokenizer.segments(closing), self.tokenizer.segments(following), strict=False)
        return "".join(first for first, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) or None


def _is_mark(name: str, written: str) -> bool:
    """Whether an added token stands in the template as a mark, as DeepSeek's `<｜User｜>`, which is no special token.

    `written` is the template with what it writes: some make the mark from the role's name.
    A mark is a word in brackets or the like: words alone, punctuation and white space are none.
    """
    return bool(_BRACKETED.fullmatch(name)) and name in written and name not in TEXT_TAGS


def _texts(turn: Turn) -> str:
    parts = (part for call in turn.tool_calls for part in (call.id, call.name, call.arguments))
    return "\n".join((turn.content, turn.name or "", turn.tool_call_id or "", turn.reasoning or "", *parts))


def _template_message(turn: Turn) -> Json:
    message: Json = {"role": turn.role, "content": turn.content}
    if turn.name is not None and turn.role != "assistant":
        message["name"] = turn.name
    if turn.tool_call_id is not None:
        message["tool_call_id"] = turn.tool_call_id
    if turn.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                # Templates expect an object; invalid JSON is passed as text.
                "function": {"name": call.name, "arguments": parsed_arguments(call.arguments or "{}")},
            }
            for call in turn.tool_calls
        ]
    return message


def _spelled(value: Any, spell: Callable[[str], str]) -> Any:
    """Returns a JSON value with each of its texts spelled."""
    if isinstance(value, str):
        return spell(value)
    if isinstance(value, list):
        return [_spelled(item, spell) for item in value]
    if isinstance(value, dict):
        return {spell(key): _spelled(item, spell) for key, item in value.items()}
    return value


def _wrap_malformed_arguments(functions: list[Json]) -> None:
    """Replaces arguments that are no object by an object that holds them."""
    for function in functions:
        if not isinstance(function["arguments"], dict):
            function["arguments"] = {"arguments": function["arguments"]}


def _write_arguments(functions: list[Json]) -> None:
    """Replaces arguments by their JSON text."""
    for function in functions:
        function["arguments"] = to_json(function["arguments"])


def _template_source(folder: Path, settings: Json) -> str:
    path = folder / "chat_template.jinja"
    source: Any = path.read_text(encoding="utf-8") if path.is_file() else settings.get("chat_template")
    if isinstance(source, list):
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if not isinstance(source, str):
        raise ModelUnreadable(f"{folder} has no chat template: add chat_template.jinja")
    return source
