"""Messages about the errors of a request's body, each with a remedy."""

from __future__ import annotations

import inspect
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel

from leyden.libs.contracts.api.problems import FieldProblem, Problem, field_problem
from leyden.libs.service import problem_response

PROBLEMS: dict[int | str, dict[str, Any]] = {
    "default": {
        "description": "The error and its remedy, as RFC 9457 problem details.",
        "content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}},
        "model": Problem,
    }
}
"""`responses` of every route in the OpenAPI document."""


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
    if place != "body" or model is None:
        path = ".".join(map(str, location or [place]))
        return FieldProblem(path=path, message=entry["msg"].removeprefix("Value error, "))
    return field_problem(model, tuple(location), entry["type"], entry["msg"])
