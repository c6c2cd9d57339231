"""The OpenAPI document of the collector. It is not served: exporters know OTLP, and tests want ours exact."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from leyden.services.collector.routes import JSON, PROTOBUF, router

Schema = dict[str, Any]

_PROBLEM: Schema = {
    "type": "object",
    "required": ["type", "title", "status", "detail"],
    "properties": {"status": {"type": "integer"}, "detail": {"type": "string"}},
}
_STATUS: Schema = {
    "type": "object",
    "required": ["code", "message"],
    "properties": {"code": {"type": "integer"}, "message": {"type": "string"}},
    "additionalProperties": False,
}
_STORED: Schema = {
    "type": "object",
    "required": ["key", "rewards"],
    "properties": {"key": {"type": "string"}, "rewards": {"type": "integer", "minimum": 1}},
    "additionalProperties": False,
}
_PARTIAL: Schema = {
    "type": "object",
    "properties": {
        "partialSuccess": {
            "type": "object",
            "required": ["errorMessage"],
            "properties": {
                "errorMessage": {"type": "string"},
                "rejectedSpans": {"type": "integer"},
                "rejectedLogRecords": {"type": "integer"},
            },
            "additionalProperties": False,
        }
    },
    "additionalProperties": False,
}
_BYTES: Schema = {"type": "string", "format": "binary"}
_VALUE: Schema = {
    "oneOf": [
        {"type": "object", "required": [kind], "properties": {kind: schema}, "additionalProperties": False}
        for kind, schema in {
            "stringValue": {"type": "string"},
            "boolValue": {"type": "boolean"},
            "intValue": {"type": "string", "pattern": "^-?[0-9]{1,18}$"},
            "doubleValue": {"type": "number"},
        }.items()
    ]
}
_ATTRIBUTES: Schema = {
    "type": "array",
    "items": {"type": "object", "required": ["key"], "properties": {"key": {"type": "string"}, "value": _VALUE}},
}
_NANOS: Schema = {"type": "string", "pattern": "^[0-9]{1,18}$"}
_SPAN: Schema = {
    "type": "object",
    "required": ["traceId", "spanId", "name"],
    "properties": {
        "traceId": {"type": "string", "pattern": "^[0-9a-f]{32}$"},
        "spanId": {"type": "string", "pattern": "^[0-9a-f]{16}$"},
        "name": {"type": "string"},
        "startTimeUnixNano": _NANOS,
        "endTimeUnixNano": _NANOS,
        "attributes": _ATTRIBUTES,
    },
}
_RECORD: Schema = {
    "type": "object",
    "properties": {
        "eventName": {"type": "string"},
        "timeUnixNano": _NANOS,
        "body": _VALUE,
        "attributes": _ATTRIBUTES,
    },
}


def openapi_document() -> dict[str, Any]:
    """The OpenAPI document of the collector's endpoints."""
    app = FastAPI(title="Leyden collector", version="1")
    app.include_router(router)
    document: dict[str, Any] = app.openapi()
    for path, operations in document["paths"].items():
        operation = operations["post"]
        if path.endswith("/reward"):
            failed = _answers("application/problem+json", _PROBLEM)
            operation["responses"] = {"200": {"description": "Durable.", **_answers(JSON, _STORED)}}
        else:
            outer, inner, one, schema = _NESTED[path.rpartition("/")[2]]
            request = {**_answers(JSON, _request(outer, inner, one, schema))["content"], PROTOBUF: {"schema": _BYTES}}
            operation["requestBody"] = {"required": True, "content": request}
            failed = {"content": {JSON: {"schema": _STATUS}, PROTOBUF: {"schema": _BYTES}}}
            stored = {"content": {JSON: {"schema": _PARTIAL}, PROTOBUF: {"schema": _BYTES}}}
            operation["responses"] = {"200": {"description": "Durable.", **stored}}
        operation["responses"]["default"] = {"description": "What is wrong.", **failed}
    return document


_NESTED = {
    "traces": ("resourceSpans", "scopeSpans", "spans", _SPAN),
    "logs": ("resourceLogs", "scopeLogs", "logRecords", _RECORD),
}


def _request(outer: str, inner: str, records: str, schema: Schema) -> Schema:
    """An export request in OTLP's JSON."""
    scope = {"type": "object", "properties": {records: {"type": "array", "items": schema}}}
    resource = {"type": "object", "properties": {inner: {"type": "array", "items": scope}}}
    return {"type": "object", "properties": {outer: {"type": "array", "items": resource}}}


def _answers(media_type: str, schema: Schema) -> dict[str, Any]:
    return {"content": {media_type: {"schema": schema}}}
