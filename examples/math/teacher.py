"""A server of chat completions that knows the solutions: it shows a model that solves nothing how the work is done.

    python teacher.py tasks/train.jsonl --port 9001

It prints its port. It calls the calculator with each of the task's steps, and answers with the task's answer.
"""

import argparse
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


def solution(tasks: dict[str, dict[str, Any]], messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the reply to a conversation: an empty one for a question that is no task, or has no steps."""
    asked = [one["content"] for one in messages if one["role"] == "user"]
    task = tasks.get(asked[0], {"steps": []}) if asked else {"steps": []}
    done = sum(one["role"] == "tool" for one in messages)
    if done >= len(task["steps"]):
        return {"role": "assistant", "content": task["answer"] if task["steps"] else ""}
    arguments = json.dumps({"expression": task["steps"][done]})
    call = {"id": f"step_{done}", "type": "function", "function": {"name": "calculate", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def server(files: list[Path], port: int) -> ThreadingHTTPServer:
    """Return a server that has yet to serve. Args: port: 0 takes a free one"""
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    tasks = {row["question"]: row for row in rows}

    class Teacher(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            message = solution(tasks, asked["messages"])
            reason = "tool_calls" if "tool_calls" in message else "stop"
            choice = {"index": 0, "message": message, "finish_reason": reason}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            found = {"id": "solution", "object": "chat.completion", "created": 0, "model": asked["model"]}
            body = json.dumps({**found, "choices": [choice], "usage": usage}).encode()
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
