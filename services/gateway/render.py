"""From a conversation to token ids: the model's own chat template and tokenizer, without transformers.

The template runs in Jinja's immutable sandbox with the filters and functions that transformers gives it (`tojson`
without HTML escapes, `raise_exception`, `strftime_now`, `generation` blocks), so that it writes the same text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
import jinja2.nodes
import numpy as np
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from leyden.libs.service.errors import Misconfigured
from leyden.services.gateway.cuts import Cuts
from leyden.services.gateway.errors import BadRequest
from leyden.services.gateway.request import Json, Turn, parsed_arguments
from leyden.services.gateway.spelling import Spelling
from leyden.services.gateway.tail import UNRENDERABLE, Reached, Tail, TailTemplate
from leyden.services.gateway.tokens import TokenIds
from leyden.services.gateway.tools import generic_turns

SHARED_TEXTS, SHARED_CHARACTERS = 128, 16_384
"""How many texts are remembered with their tokens, and how long these are at most: siblings of a group begin with the
same prompt."""
_SENTINEL = "sentinel-of-the-closing"


class ModelUnreadable(Misconfigured):
    """The model's folder lacks something that the gateway needs; the message says what."""


class ChatModel:
    """Tokenizer, chat template and limits of one model; rendering is a pure function of its arguments.

    Args: folder: Hugging Face format: tokenizer.json, tokenizer_config.json, config.json, and the template in
        chat_template.jinja or in tokenizer_config.json; context_length: where engines allow less than the model
    Raises: ModelUnreadable: a file is missing or unusable
    """

    def __init__(self, folder: Path, *, context_length: int | None = None) -> None:
        self.name = folder.name
        settings = _read_json(folder / "tokenizer_config.json")
        config = _read_json(folder / "config.json")
        self._tokenizer = _read_tokenizer(folder)
        self.spelling = Spelling.of(self._tokenizer)
        self._encode_shared = lru_cache(SHARED_TEXTS)(self._encode)
        self.vocab_size: int = config.get("vocab_size", self._tokenizer.get_vocab_size())
        own_length: int = config.get("max_position_embeddings", 2**20)
        self.context_length = min(own_length, context_length or own_length)
        self.eos_ids = self._find_eos_ids(folder, settings, config)
        source = _template_source(folder, settings)
        environment = _environment()
        self._template = environment.from_string(source)
        self._tail = TailTemplate.of(environment, source)
        parsed = environment.parse(source)
        variables = jinja2.meta.find_undeclared_variables(parsed)
        self.template_has_tools = "tools" in variables
        self.is_timeless = all(name.name != "strftime_now" for name in parsed.find_all(jinja2.nodes.Name))
        """Whether the template writes the same text at any time."""
        self._specials = _special_tokens(settings)
        self.cuts = Cuts.of(self._tokenizer, "\n".join([source, *self._specials.values()]))
        self.closing = self._find_closing()

    def render(
        self, turns: Sequence[Turn], tools: tuple[Json, ...], options: Json, *, add_generation_prompt: bool
    ) -> str:
        """The conversation as the template writes it.

        Args: options: `chat_template_kwargs` of the request, such as `enable_thinking`
        Raises: BadRequest: the template refuses the conversation, or cannot render it
        """
        messages = self.messages(turns, tools)
        try:
            return self._template.render(self._variables(messages, tools, options, add_generation_prompt))
        except UNRENDERABLE as error:
            raise BadRequest(
                f"The model's chat template cannot render these messages: {error}.",
                param="messages",
                code="template_error",
            ) from error

    def messages(self, turns: Sequence[Turn], tools: tuple[Json, ...]) -> list[Json]:
        """The messages that the template gets for turns.

        Args: tools: none for turns that continue others, whose messages tell of the tools already
        """
        spelled = turns if self.template_has_tools else generic_turns(tuple(turns), tools)
        return [_template_message(turn) for turn in spelled]

    def render_from(
        self,
        messages: list[Json],
        since: Reached | None,
        tools: tuple[Json, ...],
        options: Json,
        *,
        add_generation_prompt: bool,
    ) -> Tail | None:
        """The text as `render` gives it, from what was reached on.

        None where the template does not work message by message, or what it wrote before may no more be the same.

        Args: since: in a conversation with the same tools, options and messages before
        """
        if self._tail is None:
            return None
        try:
            variables = self._variables(messages, tools, options, add_generation_prompt)
        except TypeError:
            return None
        return self._tail.write(messages, variables, since)

    def _variables(
        self, messages: list[Json], tools: tuple[Json, ...], options: Json, add_generation_prompt: bool
    ) -> Json:
        """Raises: TypeError: an option has the name of something else"""
        return dict(
            **self._specials,
            **options,
            messages=messages,
            tools=list(tools) or None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
        )

    def encode(self, text: str, *, after: int | None = None) -> TokenIds:
        """The tokens of a text, read-only, without any that the tokenizer would add.

        Args: after: the token that stands before the text. It is encoded with it and dropped: tokenizers treat the
            beginning of a text, and the space after a special token, in ways of their own.
        """
        if after is not None:
            ids = self._encoded(self.decode([after]) + text)
            if ids[:1] == [after]:
                return np.asarray(ids[1:], dtype=np.int32)
        return self._encode_shared(text) if len(text) <= SHARED_CHARACTERS else self._encode(text)

    def _encode(self, text: str) -> TokenIds:
        ids = np.asarray(self._encoded(text), dtype=np.int32)
        ids.flags.writeable = False
        return ids

    def _encoded(self, text: str) -> list[int]:
        # Only the way for many texts leaves out where in the text each token stands: a quarter of the time.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, special ones included; bytes that are no UTF-8 become U+FFFD."""
        if self.spelling is not None:
            return self.spelling.text(ids)
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def _find_eos_ids(self, folder: Path, settings: Json, config: Json) -> frozenset[int]:
        """Every token at which an engine ends an answer: of generation_config.json, config.json and the tokenizer."""
        generation = folder / "generation_config.json"
        declared = [
            (_read_json(generation) if generation.exists() else {}).get("eos_token_id"),
            config.get("eos_token_id"),
            self._tokenizer.token_to_id(_token_text(settings.get("eos_token")) or ""),
        ]
        flat = [item for entry in declared for item in (entry if isinstance(entry, list) else [entry])]
        return frozenset(item for item in flat if isinstance(item, int))

    def _find_closing(self) -> str | None:
        """What the template writes after an assistant's content; None where it does not keep the content as it is."""
        turns = (Turn("user", "x"), Turn("assistant", _SENTINEL), Turn("user", "x"))
        # The last text of a conversation may end in another way.
        tail = self.render_from(self.messages(turns, ()), None, (), {}, add_generation_prompt=True)
        try:
            text = tail.texts[1] if tail else self.render(turns[:2], (), {}, add_generation_prompt=False)
        except BadRequest:
            return None
        _, found, closing = text.rpartition(_SENTINEL)
        return closing if found else None


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
                # Templates expect an object; text that is no JSON stays the text it is.
                "function": {"name": call.name, "arguments": parsed_arguments(call.arguments or "{}")},
            }
            for call in turn.tool_calls
        ]
    return message


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols], undefined=jinja2.Undefined
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlock(Extension):
    """`{% generation %}` marks an assistant's text for training masks; here it only passes the text through."""

    tags = {"generation"}  # noqa: RUF012 - jinja declares it so

    def parse(self, parser: Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _read_json(path: Path) -> Json:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelUnreadable(
            f"cannot read {path}: {error}; set GATEWAY_MODEL_PATH to a Hugging Face folder"
        ) from error
    if not isinstance(document, dict):
        raise ModelUnreadable(f"{path} must hold a JSON object")
    return document


def _read_tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelUnreadable(f"{path} is missing: save the tokenizer in its fast format (tokenizer.json)")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _template_source(folder: Path, settings: Json) -> str:
    path = folder / "chat_template.jinja"
    source: Any = path.read_text(encoding="utf-8") if path.is_file() else settings.get("chat_template")
    if isinstance(source, list):
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if not isinstance(source, str):
        raise ModelUnreadable(f"{folder} has no chat template: add chat_template.jinja")
    return source


def _special_tokens(settings: Json) -> dict[str, str]:
    texts = {name: _token_text(value) for name, value in settings.items() if name.endswith("_token")}
    return {name: text for name, text in texts.items() if text is not None}


def _token_text(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
