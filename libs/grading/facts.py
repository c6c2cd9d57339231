"""The facts that graders see, and the fields that a grader's texts take from them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from leyden.libs.contracts.config.graders import FIELD

MAX_TEXT = 1_000_000
"""Characters of an output that graders read, from its end."""
MAX_DEPTH = 200
"""Levels of the JSON that graders read. Why: the readers of deeper ones may fail, and so an agent escapes its grade."""

_HALVES = re.compile("[\ud800-\udfff]")

Scored = tuple[float, str | None, str]
"""A grader's value, the answer that it found in the output, and an explanation."""


class MissingField(Exception):
    """A field of a grader's text has no value; `path` names it."""

    def __init__(self, path: str, cause: str) -> None:
        super().__init__(f"{path}: {cause}")
        self.path = path


@dataclass(frozen=True)
class AttemptFacts:
    """The stored record of one attempt.

    Args: output: the end of its standard output; line_reward: of its reward line; tools: the tools that the model
        called, in order; feedback: the values of each component in the order in which they came; waited_seconds: the
        longest wait for them
    """

    task: Mapping[str, Any]
    output: str
    line_reward: float | None = None
    calls: int = 0
    tools: tuple[str, ...] = ()
    feedback: Mapping[str, Sequence[float]] = field(default_factory=dict)
    waited_seconds: float = 0.0

    def begin_reading(self) -> None:
        """Runs before each look at the output, and does nothing here. Built-in graders look as late as they can: what
        they compute before is the task's part, and what they compute from then on is the agent's."""

    @property
    def text(self) -> str:
        """The graded output."""
        self.begin_reading()
        return self._text

    @property
    def last_object(self) -> dict[str, Any] | None:
        """The last line of the output that is a JSON object."""
        self.begin_reading()
        return self._last_object

    @cached_property
    def _text(self) -> str:
        return self.output[-MAX_TEXT:].rstrip()

    @cached_property
    def _last_object(self) -> dict[str, Any] | None:
        for line in reversed(self._text.split("\n")):
            if not line.lstrip().startswith("{"):
                continue
            try:
                found = agents_json(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                return found
        return None


def agents_json(text: str) -> Any:
    """Returns an agent's JSON as every reader takes it: U+FFFD for half of a surrogate pair, null for numbers that are
    not finite.

    Raises: ValueError: it is no JSON, or has more than MAX_DEPTH levels
    """
    try:
        return _readable(json.loads(text), MAX_DEPTH)
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error


_TOO_DEEP = f"it has more than {MAX_DEPTH} levels"


def _readable(value: Any, levels: int) -> Any:
    match value:
        case str():
            return whole(value)
        case float():
            return value if math.isfinite(value) else None
        case dict() | list() if not levels:
            raise ValueError(_TOO_DEEP)
        case dict():
            return {whole(name): _readable(one, levels - 1) for name, one in value.items()}
        case list():
            return [_readable(one, levels - 1) for one in value]
    return value


def whole(text: str) -> str:
    """The text with U+FFFD for each half of a surrogate pair, which no program can store or send."""
    return _HALVES.sub("\ufffd", text)


def text_of(template: str, facts: AttemptFacts) -> str:
    """Returns the text with the values of its fields.

    Raises: MissingField
    """
    return FIELD.sub(lambda field: shown(_value(field[1], facts)), template)


def texts_of(template: str, facts: AttemptFacts) -> list[str]:
    """Returns the references that the text names: several where it is one field that holds a list.

    Raises: MissingField
    """
    whole = FIELD.fullmatch(template)
    if whole is None:
        return [text_of(template, facts)]
    value = _value(whole[1], facts)
    references = [shown(one) for one in value] if isinstance(value, list) else [shown(value)]
    if not references:
        raise MissingField(whole[1], "the list is empty")
    return references


def _value(path: str, facts: AttemptFacts) -> object:
    root, *names = path.split(".")
    if root == "output" and not names:
        return facts.text
    value: object = facts.task if root == "task" else facts.last_object
    if value is None:
        raise MissingField(path, "no line of the output is a JSON object")
    for place, name in enumerate(names, 1):
        value = _item(value, name)
        if value is None:
            at = ".".join((root, *names[:place]))
            raise MissingField(path, f"{at} does not exist, or is null")
    return value


def _item(value: object, name: str) -> object:
    if isinstance(value, Mapping):
        return value.get(name)
    if isinstance(value, list) and name.isdecimal() and int(name) < len(value):
        return value[int(name)]
    return None


def shown(value: object) -> str:
    """A text as it is, and any other value as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
