"""The agent as a process of its own, against a model and a collector on loopback that this file plays."""

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import agent
import prompt
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from world import Task

TASK = Task("How do I get to Rome?", "Lyon", "Rome", 120, "Iberia", "7:40", 95)


@dataclass
class Peer:
    """Answers chat completions with the given replies in order and keeps all it was sent."""

    replies: list[str]
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    port: int = 0

    def chat(self, body: bytes, headers: dict[str, str]) -> bytes:
        self.requests.append(json.loads(body))
        self.headers.append(headers)
        number = len(self.requests)
        message = {"role": "assistant", "content": self.replies[number - 1]}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        completion = {"id": f"chatcmpl-{number}", "object": "chat.completion", "created": 0, "model": "m"}
        return json.dumps({**completion, "choices": [choice]}).encode()

    def traces(self, body: bytes, headers: dict[str, str]) -> bytes:
        raw = gzip.decompress(body) if headers.get("content-encoding") == "gzip" else body
        for resource in ExportTraceServiceRequest.FromString(raw).resource_spans:
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]
        return b""


@contextmanager
def serving(peer: Peer) -> Iterator[Peer]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # the name http.server calls
            body = self.rfile.read(int(self.headers["content-length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            answer = {"/v1/chat/completions": peer.chat, "/v1/traces": peer.traces}[self.path](body, headers)
            self.send_response(200)
            self.send_header("content-type", "application/json" if answer else "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        peer.port = server.server_address[1]
        try:
            yield peer
        finally:
            server.shutdown()
            thread.join(10)


def play(replies: list[str], *arguments: str, **environment: str) -> tuple[Peer, dict[str, Any]]:
    with serving(Peer(replies)) as peer:
        base = {"PATH": os.environ["PATH"], "OPENAI_API_KEY": "key", "LEYDEN_TASK": json.dumps(vars(TASK))}
        urls = {"OPENAI_BASE_URL": f"http://127.0.0.1:{peer.port}/v1"}
        if environment.pop("traced", ""):
            urls["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{peer.port}"
        command = [sys.executable, agent.__file__, *arguments]
        done = subprocess.run(
            command, env={**base, **urls, **environment}, timeout=120, capture_output=True, text=True, check=True
        )
    assert done.stderr == ""
    return peer, json.loads(done.stdout.splitlines()[-1])


def attributes(span: Span) -> dict[str, str]:
    return {pair.key: pair.value.string_value for pair in span.attributes}


def test_the_winning_path_is_graded_and_its_tools_are_traced() -> None:
    peer, grade = play(["memory: where am I", "search: flight to Rome", "Take Iberia at 7:40."], traced="yes")
    assert grade == {"reward": 1, "memory_first": True, "success": True, "first_tool": "memory", "calls": 3}
    tools = {span.name: span for span in peer.spans if span.name.startswith("execute_tool")}
    assert set(tools) == {"execute_tool memory", "execute_tool search"}
    assert attributes(tools["execute_tool memory"]) == {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "memory",
        "gen_ai.tool.call.arguments": '{"query": "where am I"}',
        "gen_ai.tool.call.result": "You are in Lyon and have 120 euros.",
        "gen_ai.response.id": "chatcmpl-1",
    }
    assert [tool.status.code for tool in tools.values()] == [1, 1]
    (root,) = [span for span in peer.spans if not span.parent_span_id]
    assert root.name == "invoke_agent flight"
    assert {headers["traceparent"].split("-")[1] for headers in peer.headers} == {root.trace_id.hex()}


def test_the_span_of_a_failed_tool_has_an_error_status() -> None:
    peer, grade = play(["search: flight", "take a taxi", "Memory : where am I"], traced="yes")
    assert grade == {"reward": 0, "memory_first": False, "success": False, "first_tool": "search", "calls": 3}
    (search,) = [span for span in peer.spans if span.name == "execute_tool search"]
    assert (search.status.code, attributes(search)["error.type"]) == (2, "unknown_departure")
    assert not search.events
    told = [request["messages"][-1]["content"] for request in peer.requests[1:]]
    assert told == ["Error: unknown place of departure. Next tool?", "Error: name a tool. Next tool?"]


def test_the_agent_only_appends_to_the_history_and_does_not_change_replies() -> None:
    peer, _ = play([" memory: where am I\n", "search: x", "no"])
    histories = [request["messages"] for request in peer.requests]
    assert histories[1][: len(histories[0])] == histories[0]
    assert histories[2][: len(histories[1])] == histories[1]
    assert histories[1][-2] == {"role": "assistant", "content": " memory: where am I\n"}
    assert all("traceparent" not in headers for headers in peer.headers)
    assert peer.spans == []


def test_the_agent_reads_a_task_from_a_file(tmp_path: Path) -> None:
    other = Task(**{**vars(TASK), "question": "How do I get to Oslo?"})
    (tmp_path / "task.json").write_text(json.dumps(vars(other)))
    peer, _ = play(["x", "x", "x"], str(tmp_path / "task.json"))
    assert peer.requests[0]["messages"][-1] == {"role": "user", "content": "How do I get to Oslo?"}


def test_all_tasks_share_every_message_but_the_last() -> None:
    one, other = prompt.opening("How do I get to Rome?"), prompt.opening("How do I get to Oslo?")
    assert one[:-1] == other[:-1]
    assert [message["role"] for message in one] == ["system", *["user", "assistant"] * 5, "user"]


def test_the_prompt_does_not_mention_asking_memory_first() -> None:
    words = " ".join(message["content"] for message in prompt.opening("")).lower()
    assert "first" not in words
    assert "flight" not in words
