"""Judgements on the graders of a run: texts whose fields are none, and settings by which all outputs earn the same."""

from __future__ import annotations

import re
from collections.abc import Iterator

from leyden.libs.contracts.config import Reward
from leyden.libs.contracts.config.graders import FIELD, ROOTS, Choice, Grader, Length, Numeric, SqlResult, ToolUse
from leyden.libs.contracts.judgements.finding import Judgement

_ROOT = "|".join(ROOTS)
# Braces directly after a word or a brace are LaTeX's, JSON's or a set's: \boxed{{task.answer}} and {"a": {task.a}}.
_DOUBLED = re.compile(rf"(?<![\w\\{{}}^$\[(])\{{(\{{\s*(?:{_ROOT})(?:\.[^{{}}]*)?\}})\}}(?!\}})")
_LIKE_A_FIELD = re.compile(rf"\{{\s*(?:{_ROOT})\s*(?:\.[^{{}}]*)?\}}")
_MAKES = re.compile(r"\bcreate\b", re.IGNORECASE)
TEXTS = ("output", "reference", "rubric", "database")
"""The settings of graders that hold fields."""


def judge_rewards(reward: Reward | None) -> list[Judgement]:
    """Returns what can never be meant in a reward's graders.

    >>> grader = {"type": "string_check", "reference": "{{task.answer}}"}
    >>> [found] = judge_rewards(Reward.model_validate({"components": [{"name": "a", "grader": grader}]}))
    >>> found.path, found.remedy
    ('reward.components.0.grader.reference', 'write {task.answer}')
    """
    return [
        Judgement(f"reward.components.{place}.grader.{name}", "cannot", reason, remedy)
        for place, one in enumerate(reward.components if reward else ())
        if one.grader is not None
        for name, reason, remedy in _of_grader(one.grader)
    ]


def _of_grader(grader: Grader) -> Iterator[tuple[str, str, str]]:
    """Yields the name of a setting, the reason and the remedy."""
    for name in TEXTS:
        if text := getattr(grader, name, None):
            yield from ((name, *said) for said in _of_text(text))
    output = getattr(grader, "output", None)
    if output is not None and not re.search(r"\{\s*output\b", output):
        yield (
            "output",
            f"{output!r:.60} has no field of the output, so that all outputs earn the same",
            "write {output}",
        )
    match grader:
        case Length(at_least=0, at_most=None):
            yield "at_most", "every output has the value 1 without a bound", "write at_most or at_least"
        case ToolUse(at_least=0, at_most=None):
            yield "at_most", "every output has the value 1 without a bound", "write at_most, or at_least 1"
        case Choice(reference=reference, options=options) if not FIELD.search(reference):
            if reference.strip().casefold() not in {one.strip().casefold() for one in options}:
                yield (
                    "reference",
                    f"{reference!r:.60} is none of the options, so that none is right",
                    "write one of them",
                )
        case Numeric(reference=reference) if not FIELD.search(reference) and not re.search(r"\d", reference):
            yield "reference", f"{reference!r:.60} has no number", "write a number, or a field such as {task.answer}"
        case SqlResult(database=database) if not FIELD.search(database) and not _MAKES.search(database):
            remedy = "write CREATE TABLE and INSERT as text, as `sqlite3 FILE .dump` does, or a field of the task"
            yield "database", f"{database!r:.60} is no SQL text that makes tables", remedy


def _of_text(text: str) -> Iterator[tuple[str, str]]:
    """Yields reason and remedy of braces that look like fields and are none, or leave braces around the value."""
    for found in _DOUBLED.finditer(text):
        yield f"{found[0]} leaves braces around the value", f"write {_plain(found[1])}"
    for found in _LIKE_A_FIELD.finditer(text):
        plain = _plain(found[0])
        if FIELD.fullmatch(plain) is None:
            yield f"{found[0]} names no field", "write {output}, {output.NAME} or {task.NAME}"
        elif plain != found[0] and _DOUBLED.search(text) is None:
            yield f"{found[0]} is no field with its spaces", f"write {plain}"


def _plain(field: str) -> str:
    """The field without spaces at the ends of its names."""
    return "{" + ".".join(one.strip() for one in field.strip("{}").split(".")) + "}"
