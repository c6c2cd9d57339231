"""A server of chat completions and responses that knows the solutions: it shows a model how the work is done.

    python teacher.py tasks/train.jsonl --port 9001

It prints its port. It calls `search` with each name that leads to the answer, one after the other, and then answers.
"""

import argparse
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Items = list[dict[str, Any]]


def step(solutions: dict[str, dict[str, Any]], items: Items) -> tuple[str | None, str]:
    """Return the next search of a conversation and no text, or none and the answer: nothing for an unknown question."""
    question = next((one["content"] for one in items if one.get("role") == "user"), None)
    known = solutions.get(question if isinstance(question, str) else "")
    if known is None:
        return None, ""
    done = sum(one.get("role") == "tool" or one.get("type") == "function_call_output" for one in items)
    return (known["searches"][done], "") if done < len(known["searches"]) else (None, f"Answer: {known['answer']}")


def chat_completion(query: str | None, text: str, call_id: str) -> dict[str, Any]:
    """Return a completion that calls the tool, or answers."""
    message: dict[str, Any] = {"role": "assistant", "content": text if query is None else None}
    if query is not None:
        function = {"name": "search", "arguments": json.dumps({"query": query})}
        message["tool_calls"] = [{"id": call_id, "type": "function", "function": function}]
    choice = {"index": 0, "message": message, "finish_reason": "stop" if query is None else "tool_calls"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return {"id": "solution", "object": "chat.completion", "created": 0, "choices": [choice], "usage": usage}


def response(query: str | None, text: str, call_id: str) -> dict[str, Any]:
    """Return a response with the same."""
    if query is None:
        part = {"type": "output_text", "text": text, "annotations": []}
        item = {"type": "message", "id": "message", "role": "assistant", "status": "completed", "content": [part]}
    else:
        called = {"name": "search", "arguments": json.dumps({"query": query})}
        item = {"type": "function_call", "id": call_id, "call_id": call_id, "status": "completed", **called}
    details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    usage = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2, **details}
    settings = {"parallel_tool_calls": False, "tool_choice": "auto", "tools": []}
    made = {"id": "solution", "object": "response", "created_at": 0, "status": "completed", "output": [item]}
    return {**made, **settings, "usage": usage}


def server(files: list[Path], port: int) -> ThreadingHTTPServer:
    """Return a server that has yet to serve. Args: port: 0 takes a free one"""
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    solutions = {row["question"]: row for row in rows}

    class Teacher(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            items = asked["input"] if "input" in asked else asked["messages"]
            write = response if "input" in asked else chat_completion
            found = write(*step(solutions, items), f"call_{len(items)}")
            body = json.dumps({**found, "model": asked["model"]}).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Be silent."""

    return ThreadingHTTPServer(("127.0.0.1", port), Teacher)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", type=Path, nargs="+")
    parser.add_argument("--port", type=int, default=9001)
    options = parser.parse_args()
    with server(options.tasks, options.port) as found:
        print(found.server_port, flush=True)
        found.serve_forever()
