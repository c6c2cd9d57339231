"""Request bodies of every dialect: JSON within limits, fields checked by name, errors that name the remedy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from leyden.libs.contracts.conversation import Json, Tool
from leyden.libs.contracts.strict import MAX_DEPTH, has_more_values, is_too_deep
from leyden.services.gateway.errors import BadRequest
from leyden.services.gateway.schemas import check_schema, check_strict_tools

MAX_VALUES = 100_000
"""Limit of objects, arrays and commas in a body: parsing 16 MiB of them would block all other calls for 20 s."""
M = TypeVar("M", bound=BaseModel)


def _as_integer(value: Any) -> Any:
    """Converts 20.0 to 20: JSON has one kind of number, and some languages print every one with a point."""
    return int(value) if type(value) is float and value.is_integer() else value


Integer = Annotated[int, BeforeValidator(_as_integer)]


class Wire(BaseModel):
    """A body or a part of one. Unknown fields have no effect: SDKs send new ones with every release, and add some to
    answers that they send back."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


def read_object(body: bytes, *, param: str, most: int = MAX_VALUES) -> Json:
    """Parses a body.

    Args:   param: the field with the conversation; most: values that it may have
    Raises: BadRequest
    """
    if has_more_values(body, most):
        message = f"The body has more than {most} values: send fewer in `{param}`."
        raise BadRequest(message, param=param, code="too_many_values")
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"The body is not valid JSON: {error}.", code="invalid_json") from error
    if not isinstance(document, dict):
        raise BadRequest("The body must be a JSON object.", code="invalid_json")
    if is_too_deep(document):
        raise BadRequest(f"The body is nested deeper than {MAX_DEPTH} levels: flatten it.", code="invalid_json")
    return document


def validated(model: type[M], document: Json, remedies: Mapping[str, str]) -> M:
    """Validates a body.

    Args: remedies: how to do without a field that is refused
    Raises: BadRequest: it names the first wrong field
    """
    # Null means unset.
    known = {name: value for name, value in document.items() if value is not None}
    for name in remedies.keys() & known:
        message = f"{name} is not supported; {remedies[name]}."
        raise BadRequest(message, param=name, code="unsupported_parameter")
    try:
        return model.model_validate(known)
    except ValidationError as error:
        raise _bad_request(error, known) from error


def first_reason(error: ValidationError) -> str:
    """The first wrong field of a server's answer, and what is wrong with it, without its value."""
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def answer_schema(kind: str, schema: Json | None, *, param: str, place: str) -> Json | None:
    """Returns the JSON Schema that a format asks for; None for text.

    Args: param: the format's field; place: the field with the schema
    Raises: BadRequest: no known format, or no valid schema
    """
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        message = f"{param} '{kind[:100]}' is not supported: send text, json_object or json_schema."
        raise BadRequest(message, param=param, code="unsupported_parameter")
    if schema is None:
        raise BadRequest(f"Missing required parameter: '{place}'.", param=place, code="missing_required_parameter")
    check_schema(schema, place)
    return schema


def required_tools(
    tools: Sequence[Tool], names: Sequence[str] | None, *, param: str = "tool_choice"
) -> tuple[str, ...]:
    """Returns the names of the tools of which one must be called: `names`, or all.

    Args:   param: the field that requires them
    Raises: BadRequest: no such tool, or a strict one whose schema cannot constrain its arguments
    """
    given = [tool.name for tool in tools]
    if not given or names == []:
        raise BadRequest(f"{param} needs tools.", param=param, code="invalid_value")
    offered = set(given)
    for name in names or ():
        if name not in offered:
            message = f"{param} names '{name[:100]}', but `tools` has no such tool."
            raise BadRequest(message, param=param, code="invalid_value")
    required = tuple(given if names is None else names)
    check_strict_tools(tools, required)
    return required


def _bad_request(error: ValidationError, document: Json) -> BadRequest:
    first = error.errors(include_url=False, include_input=False)[0]
    path = ".".join(_path_in(document, first["loc"], is_missing=first["type"] == "missing"))
    if first["type"] == "missing":
        return BadRequest(f"Missing required parameter: '{path}'.", param=path, code="missing_required_parameter")
    expected = first["msg"].partition(" or instance of ")[0].replace("a valid dictionary", "an object")
    return BadRequest(f"Invalid value for '{path}': {expected}.", param=path, code="invalid_value")


def _path_in(document: Any, location: Sequence[str | int], *, is_missing: bool) -> Iterator[str]:
    """The part of pydantic's location that the document has; after it come the names of our types."""
    for part in location:
        if isinstance(document, dict) and (part in document or is_missing):
            document = document.get(part)
        elif isinstance(document, list) and isinstance(part, int) and part < len(document):
            document = document[part]
        else:
            return
        yield str(part)
