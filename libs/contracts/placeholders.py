"""Placeholders of a task's fields in an agent's command and environment.

`{task.question}` is a field of the task, `{task.user.name}` one of an object in it, `{task.choices.0}` an item of a
list, and `{task}` the complete task. Text replaces its placeholder as it is; any other value does as JSON.
`{{task.question}}` stands for the text `{task.question}`. All other braces stay as they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_FIELD = r"\{task(?P<%s>(?:\.[^{}.\x00]+)*)\}"
_PLACEHOLDER = re.compile(rf"\{{{_FIELD % 'literal'}\}}|{_FIELD % 'path'}")


class MissingField(ValueError):
    """The task lacks a field that a placeholder names, or its value cannot stand in an argument."""


def task_fields(texts: Sequence[str]) -> list[tuple[str, ...]]:
    """The path of each field that a placeholder in the texts names, once, in order; the complete task is no field."""
    found = [path for text in texts for match in _PLACEHOLDER.finditer(text) if (path := _path(match))]
    return list(dict.fromkeys(found))


def with_task(text: str, task: Mapping[str, Any], *, null_is_missing: bool = False) -> str:
    """The text with the task's values. Args: null_is_missing: refuses a field whose value is null

    Raises: MissingField
    >>> with_task("--q={task.question} --n={task.n}", {"question": "What is 2+2?", "n": 3})
    '--q=What is 2+2? --n=3'
    """

    def value_of(match: re.Match[str]) -> str:
        if match["literal"] is not None:
            return match[0][1:-1]
        value = _value(task, _path(match))
        if value is None and null_is_missing:
            raise MissingField(f"{match[0]} is null")
        return _as_text(value, match[0])

    return _PLACEHOLDER.sub(value_of, text)


def as_literal(text: str, kept: Sequence[str]) -> str:
    """The text without new placeholders: one that none of the texts `kept` has stands for itself.

    >>> as_literal("{task.a} and {task.b}", ["Q: {task.a}"])
    '{task.a} and {{task.b}}'
    """
    known = {match["path"] for one in kept for match in _PLACEHOLDER.finditer(one) if match["literal"] is None}

    def literal(match: re.Match[str]) -> str:
        stays = match["literal"] is not None or match["path"] in known
        return match[0] if stays else f"{{{match[0]}}}"

    return _PLACEHOLDER.sub(literal, text)


def _path(match: re.Match[str]) -> tuple[str, ...]:
    return tuple((match["path"] or "").split(".")[1:])


def _value(task: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    value: Any = task
    for name in path:
        fields = dict(_fields(value))
        if name not in fields:
            raise MissingField(f"there is no field {{task.{'.'.join(path)}}} among {', '.join(sorted(task))}")
        value = fields[name]
    return value


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list):
        yield from ((str(number), item) for number, item in enumerate(value))


def _as_text(value: Any, placeholder: str) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if "\0" in text:
        raise MissingField(f"the character zero in {placeholder} cannot stand in an argument of a program")
    return text
