"""The OpenAPI document of the agents' addresses, for tests; it is not served, as agents know OpenAI's API."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from starlette.routing import Route

from leyden.services.gateway.dialects import chat_completions, messages, ollama
from leyden.services.gateway.dialects.gemini import answers
from leyden.services.gateway.dialects.gemini import dialect as gemini
from leyden.services.gateway.embeddings import vendors
from leyden.services.gateway.requests import ATTEMPT, BASE
from leyden.services.gateway.routes import ANTHROPIC_ROUTES, GEMINI_ROUTES, OLLAMA_ROUTES, OPENAI_ROUTES

ROUTES = (*OPENAI_ROUTES, *ANTHROPIC_ROUTES, *OLLAMA_ROUTES, *GEMINI_ROUTES)

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
_OLLAMA_ERROR = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
_GEMINI_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["code", "message", "status"],
            "properties": {
                "code": {"type": "integer"},
                "message": {"type": "string"},
                "status": {"enum": [*sorted(set(answers.STATUSES.values())), "INTERNAL"]},
            },
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
    body = _schema(document, "messages", messages._Body)
    for path, item in document["paths"].items():
        if "/messages" in path:
            item["post"]["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
            item["post"]["responses"]["default"]["content"] = {"application/json": {"schema": _ANTHROPIC_ERROR}}
            item["post"]["responses"]["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    chat = document["paths"][ATTEMPT + "/api/chat"]["post"]
    embed = document["paths"][ATTEMPT + "/api/embed"]["post"]
    for operation, model in ((chat, ollama._Body), (embed, vendors._OllamaBody)):
        asked = _schema(document, f"ollama{model.__name__}", model)
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": asked}}}
        operation["responses"]["default"]["content"] = {"application/json": {"schema": _OLLAMA_ERROR}}
    chat["responses"]["200"]["content"]["application/x-ndjson"] = {"schema": {"type": "string"}}
    _describe_gemini(document)
    return document


def _describe_gemini(document: dict[str, Any]) -> None:
    models = {"embedContent": vendors._One, "batchEmbedContents": vendors._Batch}
    for route in GEMINI_ROUTES:
        operation = document["paths"][route.path_format]["post"]
        action = route.path.rpartition(":")[2]
        body = _schema(document, f"gemini{action}", models.get(action, gemini._Body))
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
        operation["responses"]["default"]["content"] = {"application/json": {"schema": _GEMINI_ERROR}}
        if "stream" in route.path:
            chunks = {"type": "array", "items": {"type": "object"}}
            operation["responses"]["200"]["content"] = {"application/json": {"schema": chunks}}


def _schema(document: dict[str, Any], prefix: str, body: type[BaseModel]) -> dict[str, Any]:
    """The schema of a body, whose definitions go into the document under names with the prefix."""
    schema = body.model_json_schema(ref_template=f"#/components/schemas/{prefix}{{model}}")
    document["components"]["schemas"] |= {f"{prefix}{name}": found for name, found in schema.pop("$defs", {}).items()}
    return schema


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
