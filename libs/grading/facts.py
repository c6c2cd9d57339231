"""The facts that graders see, and the fields that a grader's texts take from them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from leyden.libs.contracts.config.graders import FIELD

MAX_TEXT = 1_000_000
"""Characters of an output that graders read, from its end."""

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

    @cached_property
    def text(self) -> str:
        """The graded output."""
        return self.output[-MAX_TEXT:].rstrip()

    @cached_property
    def last_object(self) -> dict[str, Any] | None:
        """The last line of the output that is a JSON object."""
        for line in reversed(self.text.splitlines()):
            if not line.lstrip().startswith("{"):
                continue
            try:
                found = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(found, dict):
                return found
        return None


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
