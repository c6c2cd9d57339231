"""Arguments of tool calls as JSON objects, for the dialects that have no text of them."""

from __future__ import annotations

import orjson

from leyden.libs.contracts.conversation import Json
from leyden.services.gateway.prompt.tools.hermes import parsed_arguments

MALFORMED = "INVALID_JSON"
"""The only member of an object of arguments where the model sampled none; its value is their text. The name is
pydantic-ai's."""


def arguments_object(arguments: str) -> Json:
    """Returns sampled arguments as an object, or the object of a malformed text."""
    parsed = parsed_arguments(arguments)
    try:
        orjson.dumps(parsed)
    except TypeError:
        # An integer beyond 64 bits.
        parsed = arguments
    return parsed if isinstance(parsed, dict) else {MALFORMED: arguments}


def arguments_text(arguments: Json) -> str:
    """Returns the JSON text of an object that an agent sends back, or the malformed text."""
    raw = arguments.get(MALFORMED)
    return raw if len(arguments) == 1 and isinstance(raw, str) else orjson.dumps(arguments).decode()
