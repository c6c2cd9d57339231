"""Refusals of requests, and messages about the errors of a body, each with a remedy."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel, Field

from leyden.libs.contracts.api.body import Body

Location = tuple[int | str, ...]


class FieldProblem(Body):
    """One refused field of a request."""

    path: str
    """Dotted path in the body or the name of the parameter, such as `algorithm.clip_high`; `line 3` for an upload."""
    message: str
    """The error and its remedy."""


class Problem(Body):
    """RFC 9457 problem details."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str | None = None
    instance: str | None = None
    cause: str | None = None
    """A short word for programs, such as `run_ended`."""
    errors: list[FieldProblem] = Field(default_factory=list)
    allowed_actions: list[str] | None = None
    """For a 409: the actions that the resource's present state allows."""


def field_problem(model: type[BaseModel], location: Location, kind: str, message: str) -> FieldProblem:
    """The path and the remedy of one of pydantic's errors. Args: location, kind, message: its loc, type and msg"""
    path, known = _walk(model, location)
    if kind == "extra_forbidden":
        message = _unknown_field(str(location[-1]), known)
    return FieldProblem(path=path or "body", message=message.removeprefix("Value error, "))


def _walk(model: type[BaseModel], location: Location) -> tuple[str, list[str]]:
    """The path without the tags and classes that choose a variant of a union, and the fields known at its end."""
    models, path = [model], []
    for part in location[:-1]:
        fields = [m.model_fields[part] for m in models if isinstance(part, str) and part in m.model_fields]
        if fields:
            path.append(str(part))
            models = [found for field in fields for found in _models_in(field.annotation)]
        elif chosen := [m for m in models if part in _choices(m)]:
            models = chosen
        else:
            path.append(str(part))
    known = sorted({name for m in models for name in m.model_fields})
    last = [str(part) for part in location[-1:] if part in known or not _is_choice(part, models)]
    return ".".join([*path, *last]), known


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)


def _choices(model: type[BaseModel]) -> tuple[object, ...]:
    """The parts of an error's location that choose this variant: the values of its `type`, or its name."""
    return (*(get_args(model.model_fields["type"].annotation) if "type" in model.model_fields else ()), model.__name__)


def _is_choice(part: int | str, models: Sequence[type[BaseModel]]) -> bool:
    return str(part).startswith("literal[") or any(part in _choices(model) for model in models)


def _unknown_field(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    remedy = f"write {near[0]!r}" if near else "remove it"
    return f"unknown field: {remedy}; fields here are {', '.join(known)}"
