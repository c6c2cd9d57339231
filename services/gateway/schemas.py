"""The JSON Schemas of answers and of tools, to which engines constrain decoding."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import jsonschema_rs
import orjson

from leyden.libs.contracts.config.graders import DRAFTS
from leyden.libs.contracts.conversation import Tool
from leyden.services.gateway.errors import BadRequest

MAX_SCHEMA_BYTES = 128 * 1024
"""Limit of an answer's schema: an engine compiles it, and every call's row holds it."""


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


def check_strict_tools(tools: Sequence[Tool], names: Collection[str]) -> None:
    """Passes tools whose schemas constrain decoding: the strict ones of these names. Raises: BadRequest"""
    constrained = set(names)
    for index, tool in enumerate(tools):
        if tool.name in constrained and tool.is_strict and tool.parameters:
            check_schema(tool.parameters, f"tools[{index}].parameters", tool=tool.name)


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
