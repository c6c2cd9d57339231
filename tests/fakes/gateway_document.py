"""The OpenAPI document of the agents' addresses, for tests; it is not served, as agents know OpenAI's API."""

from __future__ import annotations

from typing import Any

from starlette.routing import Route

from leyden.services.gateway.dialects import chat_completions, messages
from leyden.services.gateway.routes import BASE, ROUTES

_REF = "#/components/schemas/{model}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"enum": sorted(set(messages.ERROR_TYPES.values()))}, "message": {"type": "string"}},
        },
    },
}
_COMPLETION = {
    "type": "object",
    "required": ["id", "object", "created", "model", "choices", "usage"],
    "properties": {"object": {"const": "chat.completion"}, "choices": {"type": "array", "minItems": 1}},
}


def openapi_document() -> dict[str, Any]:
    """The body and the answer of each address."""
    schema = chat_completions._Body.model_json_schema(ref_template=_REF)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Leyden gateway", "version": "1"},
        "components": {"schemas": schema.pop("$defs")},
        "paths": {route.path_format: {_method(route): _operation(route)} for route in ROUTES},
    }
    _describe_chat(document["paths"][BASE + "/chat/completions"]["post"], schema)
    body = messages._Body.model_json_schema(ref_template="#/components/schemas/messages{model}")
    definitions = body.pop("$defs")
    document["components"]["schemas"] |= {f"messages{name}": found for name, found in definitions.items()}
    for path, item in document["paths"].items():
        if "/messages" in path:
            item["post"]["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
            item["post"]["responses"]["default"]["content"] = {"application/json": {"schema": _ANTHROPIC_ERROR}}
            item["post"]["responses"]["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    return document


def _method(route: Route) -> str:
    assert route.methods is not None
    return "post" if "POST" in route.methods else "get"


def _operation(route: Route) -> dict[str, Any]:
    done = {"description": "Done.", "content": {"application/json": {"schema": {"type": "object"}}}}
    failed = {"description": "What is wrong.", "content": {"application/json": {"schema": _ERROR}}}
    return {
        "operationId": route.name,
        "summary": route.endpoint.__doc__,
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in route.param_convertors
        ],
        "responses": {"200": done, "default": failed},
    }


def _describe_chat(operation: dict[str, Any], schema: dict[str, Any]) -> None:
    operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    operation["responses"]["200"]["content"] = {
        "application/json": {"schema": _COMPLETION},
        "text/event-stream": {"schema": {"type": "string"}},
    }
