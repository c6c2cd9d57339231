"""Messages about the errors of a request's body, each with a remedy."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel

from leyden.libs.contracts.api.problems import FieldProblem
from leyden.libs.service import problem_response

Location = tuple[int | str, ...]


async def on_refused(request: Request, error: Exception) -> Response:
    """422 with the path and the remedy of each refused field."""
    assert isinstance(error, RequestValidationError)
    model = _body_model(request)
    fields = [_field_problem(entry, model) for entry in error.errors()]
    detail = "; ".join(f"{field.path}: {field.message}" for field in fields[:5])
    return problem_response(
        422, detail, cause="invalid", extensions={"errors": [field.model_dump() for field in fields]}
    )


def _body_model(request: Request) -> type[BaseModel] | None:
    field = getattr(request.scope.get("route"), "body_field", None)
    annotation = getattr(getattr(field, "field_info", None), "annotation", None)
    return annotation if inspect.isclass(annotation) and issubclass(annotation, BaseModel) else None


def _field_problem(entry: Any, model: type[BaseModel] | None) -> FieldProblem:
    place, *location = entry["loc"]
    message = entry["msg"].removeprefix("Value error, ")
    if place != "body" or model is None:
        return FieldProblem(path=".".join(map(str, location or [place])), message=message)
    path, known = _walk(model, tuple(location))
    if entry["type"] == "extra_forbidden":
        message = _unknown_field(str(location[-1]), known)
    return FieldProblem(path=path or "body", message=message)


def _walk(model: type[BaseModel], location: Location) -> tuple[str, list[str]]:
    """The path without the tags that choose a variant of a union, and the fields known at its end."""
    models, path = [model], []
    for part in location[:-1]:
        fields = [m.model_fields[part] for m in models if isinstance(part, str) and part in m.model_fields]
        if fields:
            path.append(str(part))
            models = [found for field in fields for found in _models_in(field.annotation)]
        elif chosen := [m for m in models if _tag(m) == part]:
            models = chosen
        else:
            path.append(str(part))
    known = sorted({name for m in models for name in m.model_fields})
    is_tag = bool(location) and location[-1] not in known and any(_tag(m) == location[-1] for m in models)
    return ".".join([*path, *(str(part) for part in location[-1:] if not is_tag)]), known


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)


def _tag(model: type[BaseModel]) -> object:
    return model.model_fields["type"].default if "type" in model.model_fields else None


def _unknown_field(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    remedy = f"write {near[0]!r}" if near else "remove it"
    return f"unknown field: {remedy}; fields here are {', '.join(known)}"
