"""The flight agent as a service: attempts at once keep their keys and their spans apart."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from leyden.libs.cli.commands.demo import AGENT, DemoOptions, run_document
from leyden.libs.contracts.config import RunConfig
from tests.campaigns.experiments.choices import Choices
from tests.campaigns.experiments.external import CLIENTS, External
from tests.campaigns.experiments.servers import server_of

OPENING = 12
TASK = {"origin": "Rome", "destination": "Oslo", "budget": 200, "departure": "7:05", "price": 90}


class Platform(ThreadingHTTPServer):
    """Gateway and collector: a model that plays well, and the spans by key. The first calls wait for those of two."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.both = threading.Barrier(2, timeout=60)
        self.calls, self.spans = Counter[str](), dict[str, list[str]]()


class Handler(BaseHTTPRequestHandler):
    server: Platform

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/v1/traces":
            sent = ExportTraceServiceRequest.FromString(body).resource_spans[0].scope_spans[0].spans
            self.server.spans[self.headers["x-api-key"]] = [span.name for span in sent]
            return self.answer(b"")
        messages = json.loads(body)["messages"]
        self.server.calls[self.headers["authorization"]] += 1
        if len(messages) == OPENING:
            self.server.both.wait()
        replies = ["memory: where am I", "search: way to Oslo", messages[-1]["content"]]
        message = {"role": "assistant", "content": replies[(len(messages) - OPENING) // 2]}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        found = {"id": "c", "object": "chat.completion", "created": 0, "model": "any", "choices": [choice]}
        return self.answer(json.dumps(found).encode())

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def test_attempts_at_once_keep_their_keys_and_spans_apart() -> None:
    with Platform() as platform, ThreadPoolExecutor(3) as pool:
        pool.submit(platform.serve_forever)
        address = f"http://127.0.0.1:{platform.server_port}"
        environment = {
            **os.environ,
            "PYTHONPATH": str(AGENT),
            "OPENAI_BASE_URL": f"{address}/v1",
            "OTEL_EXPORTER_OTLP_ENDPOINT": address,
        }

        def ask(key: str, carrier: str) -> dict[str, Any]:
            task = {**TASK, "question": f"How do I reach Oslo, {key}?", "carrier": carrier}
            headers = {"authorization": f"Bearer {key}"}
            answer = httpx.post(f"http://127.0.0.1:{port}", json=task, headers=headers, timeout=120, trust_env=False)
            found: dict[str, Any] = answer.raise_for_status().json()
            return found

        try:
            with server_of([sys.executable, "service.py", "0"], CLIENTS, environment) as port:
                grades = list(pool.map(ask, ("one", "two"), ("SAS", "KLM")))
        finally:
            platform.shutdown()
    grade = {"reward": 1, "memory_first": True, "success": True, "first_tool": "memory", "calls": 3}
    assert grades == [grade, grade]
    assert platform.calls == {"Bearer one": 3, "Bearer two": 3}
    spans = ["execute_tool memory", "execute_tool search", "invoke_agent flight"]
    assert platform.spans == {"one": spans, "two": spans}


def test_the_document_is_the_demos_but_for_its_agent() -> None:
    own = RunConfig.model_validate_json((CLIENTS / "run.json").read_text())
    demo = run_document(DemoOptions())
    same = {"name": "any", "agent": demo.agent, "runner": demo.runner}
    assert own.model_copy(update=same) == demo.model_copy(update=same)
    tried = External().document(0, Choices(steps=7, held_out=100))
    assert (tried.runner, tried.agent) == (own.runner, own.agent)
