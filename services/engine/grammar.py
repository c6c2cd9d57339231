"""Constrained decoding: grammars from SGLang's `json_schema` and `structural_tag`, compiled by llguidance.

JSON is compact as `json.dumps` writes it: SGLang allows any white space between values, and a random model writes it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson
from llguidance import LLMatcher, LLTokenizer

from leyden.services.engine.errors import BadRequest
from leyden.services.engine.request import SamplingParams

_JSON = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}


class Grammars:
    """Compiles grammars for one tokenizer, which it loads at the first use."""

    def __init__(self, folder: Path, vocab_size: int, end_ids: Iterable[int]) -> None:
        self._path = str(folder / "tokenizer.json")
        self._vocab_size, self._end_ids = vocab_size, sorted(end_ids)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        return LLTokenizer(self._path, n_vocab=self._vocab_size, eos_token=self._end_ids)

    def matcher(self, sampling: SamplingParams) -> LLMatcher | None:
        """Returns the state before the first token; None for a request without a grammar.

        Raises: BadRequest: the grammar is wrong or not supported
        """
        if sampling.json_schema is not None:
            name, rules = "json_schema", _rules({"type": "json_schema", "json_schema": _parsed(sampling.json_schema)})
        elif sampling.structural_tag is not None:
            document = _parsed(sampling.structural_tag)
            name, rules = "structural_tag", _rules(document.get("format") if isinstance(document, dict) else None)
        else:
            return None
        if sampling.min_new_tokens:
            raise BadRequest("sampling_params.min_new_tokens excludes a grammar: a grammar may end before it")
        matcher = LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(rules), log_level=0)
        if matcher.is_error():
            # The lines after the first one repeat the grammar.
            raise BadRequest(f"sampling_params.{name}: {matcher.get_error().splitlines()[0][:500]}")
        return matcher


def _parsed(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"a grammar must be JSON: {error}") from error


def _rules(form: Any) -> str:
    """Returns a structural tag's format as a Lark grammar."""
    return f"start: {_expression(form)}"


def _expression(form: Any) -> str:
    match form:
        case {"type": "json_schema", "json_schema": dict(schema)}:
            return f"%json {_text(schema | _JSON)}"
        case {"type": "const_string", "value": str(value)}:
            return _text(value)
        case {"type": "sequence", "elements": [_, *_] as elements}:
            return " ".join(f"({_expression(element)})" for element in elements)
        case {"type": "or", "elements": [_, *_] as elements}:
            return " | ".join(f"({_expression(element)})" for element in elements)
        case {"type": "tag", "begin": str(begin), "content": content, "end": str(end)}:
            return f"{_text(begin)} ({_expression(content)}) {_text(end)}"
        case {"type": "tags_with_separator", "tags": [_, *_] as tags, "separator": str(separator)}:
            tag = _expression({"type": "or", "elements": tags})
            more = "" if form.get("stop_after_first") else f" ({_text(separator)} ({tag}))*"
            return f"({tag}){more}" if form.get("at_least_one") else f"(({tag}){more})?"
    kind = form.get("type") if isinstance(form, dict) else None
    raise BadRequest(f"structural_tag: the format {kind!r} is wrong or not supported by this engine")


def _text(value: object) -> str:
    return orjson.dumps(value).decode()
