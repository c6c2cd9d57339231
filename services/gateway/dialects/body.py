"""Request bodies of every dialect: JSON within limits, fields checked by name, errors that name the remedy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import jsonschema_rs
import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from leyden.libs.contracts.conversation import Json, Tool
from leyden.libs.contracts.strict import MAX_DEPTH, has_more_values, is_too_deep
from leyden.services.gateway.errors import BadRequest

MAX_VALUES = 100_000
"""Limit of objects, arrays and commas in a body: parsing 16 MiB of them would block all other calls for 20 s."""
MAX_SCHEMA_BYTES = 128 * 1024
"""Limit of an answer's schema: an engine compiles it, and every call's row holds it."""
DRAFTS = {
    *(f"http://json-schema.org/draft-{number}/schema" for number in ("04", "06", "07")),
    *(f"https://json-schema.org/draft/{year}/schema" for year in ("2019-09", "2020-12")),
}
"""Drafts of JSON Schema whose own schemas the library has; it would fetch another one."""

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


def check_schema(schema: object, place: str, *, tool: str | None = None) -> None:
    """Passes a JSON Schema. It compiles none of its patterns, which an agent could make last for minutes.

    Args:   place: the field with the schema; tool: the name of the tool that has the schema
    Raises: BadRequest: it is no object, large, invalid, or refers to another document
    """
    if not isinstance(schema, dict):
        owner = "" if tool is None else f" of the tool '{tool[:100]}'"
        raise BadRequest(f"{place}{owner} must be a JSON object.", param=place, code="invalid_value")
    if len(orjson.dumps(schema)) > MAX_SCHEMA_BYTES:
        raise BadRequest(
            f"{place} has more than {MAX_SCHEMA_BYTES} bytes: send a smaller schema.", param=place, code="invalid_value"
        )
    draft = schema.get("$schema")
    reason = f"{draft[:100]} is no draft of it" if isinstance(draft, str) and draft.rstrip("#") not in DRAFTS else ""
    if remote := next(_remote_references(schema), None):
        reason = f"it cannot refer to {remote[:100]}"
    if not reason:
        try:
            jsonschema_rs.meta.validate(schema)
        except ValueError as error:
            reason = str(error).partition("\n")[0][:300]
    if reason:
        raise BadRequest(f"{place} is not a valid JSON Schema: {reason}.", param=place, code="invalid_value")


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
    strict = set(required)
    for index, tool in enumerate(tools):
        if tool.name in strict and tool.is_strict and tool.parameters:
            check_schema(tool.parameters, f"tools[{index}].parameters", tool=tool.name)
    return required


def _remote_references(value: object) -> Iterator[str]:
    """Yields the references to other documents in a schema, which nests at most MAX_DEPTH levels."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if (
                name in {"$ref", "$dynamicRef", "$recursiveRef"}
                and isinstance(inner, str)
                and not inner.startswith("#")
            ):
                yield inner
            yield from _remote_references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _remote_references(inner)


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
