"""The OpenAPI document of the agents' doors. It is not served: agents know OpenAI's API, and tests want ours exact."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from services.gateway.request import body_schema
from services.gateway.routes import router

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
_COMPLETION = {
    "type": "object",
    "required": ["id", "object", "created", "model", "choices", "usage"],
    "properties": {"object": {"const": "chat.completion"}, "choices": {"type": "array", "minItems": 1}},
}


def openapi_document() -> dict[str, Any]:
    """What each door takes and answers."""
    app = FastAPI(title="Leyden gateway", version="1")
    app.include_router(router)
    document: dict[str, Any] = app.openapi()
    schema = body_schema(_REF)
    document.setdefault("components", {}).setdefault("schemas", {}).update(schema.pop("$defs"))
    for path, operations in document["paths"].items():
        for operation in operations.values():
            answers = {200: {"description": "Done.", "content": {"application/json": {"schema": {"type": "object"}}}}}
            failed = {"description": "What is wrong.", "content": {"application/json": {"schema": _ERROR}}}
            operation["responses"] = {**{str(code): answer for code, answer in answers.items()}, "default": failed}
        if path.endswith("/chat/completions"):
            _describe_chat(operations["post"], schema)
    return document


def _describe_chat(operation: dict[str, Any], schema: dict[str, Any]) -> None:
    operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    operation["responses"]["200"]["content"] = {
        "application/json": {"schema": _COMPLETION},
        "text/event-stream": {"schema": {"type": "string"}},
    }
