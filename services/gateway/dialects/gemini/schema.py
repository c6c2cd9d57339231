"""Google's own form of schemas, a part of OpenAPI 3.0, as JSON Schema."""

from __future__ import annotations

from typing import Any

from pydantic.alias_generators import to_camel

from leyden.libs.contracts.conversation import Json

NOT_OF_JSON_SCHEMA = frozenset({"nullable", "propertyOrdering", "example"})
NUMBER_FORMATS = frozenset({"int32", "int64", "float", "double", "enum"})
"""Formats that repeat the type."""


def json_schema(schema: Json) -> Json:
    """Returns the JSON Schema of one of Google's schemas; a schema that is one already keeps its meaning.

    >>> json_schema({"type": "ARRAY", "items": {"type": "STRING", "nullable": True}, "min_items": "1"})
    {'type': 'array', 'items': {'type': ['string', 'null']}, 'minItems': 1}
    """
    named = {name if name.startswith("$") else to_camel(name): value for name, value in schema.items()}
    found = {name: _value(name, value) for name, value in named.items() if name not in NOT_OF_JSON_SCHEMA}
    if isinstance(found.get("format"), str) and found["format"] in NUMBER_FORMATS:
        del found["format"]
    if named.get("nullable") is True:
        if isinstance(found.get("type"), str):
            found["type"] = [found["type"], "null"]
        if isinstance(found.get("enum"), list):
            found["enum"] = [*found["enum"], None]
        if isinstance(found.get("anyOf"), list):
            found["anyOf"] = [*found["anyOf"], {"type": "null"}]
    return found


def _value(name: str, value: Any) -> Any:
    if name == "type" and isinstance(value, str):
        return value.lower()
    if name == "properties" and isinstance(value, dict):
        return {key: json_schema(one) if isinstance(one, dict) else one for key, one in value.items()}
    if name in {"anyOf", "oneOf", "allOf", "prefixItems"} and isinstance(value, list):
        return [json_schema(one) if isinstance(one, dict) else one for one in value]
    if name in {"items", "additionalProperties"} and isinstance(value, dict):
        return json_schema(value)
    # Integers of 64 bits are texts in Google's JSON.
    if name.startswith(("min", "max")) and isinstance(value, str) and value.isdecimal() and value.isascii():
        return int(value[:18])
    return value
