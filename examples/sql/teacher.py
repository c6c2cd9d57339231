"""A server of chat completions that knows the solutions: it shows a model that solves nothing how the work is done.

    python teacher.py tasks/train.jsonl --port 9001

It prints its port. The writer gets the task's query, and the checker a no for every third question, so that there is
work for the rewriter, which gets the task's query again.
"""

import argparse
import json
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from prompts import CHECKER


def solution(solutions: dict[str, str], messages: list[dict[str, Any]]) -> str:
    """Return the reply to a conversation; nothing for a question that is no task."""
    system, lines = messages[0]["content"], messages[-1]["content"].splitlines()
    question = next((line for line in lines if line in solutions), None)
    if question is None:
        return ""
    if system == CHECKER:
        return "no" if zlib.crc32(question.encode()) % 3 == 0 else "yes"
    return solutions[question]


def server(files: list[Path], port: int) -> ThreadingHTTPServer:
    """Return a server that has yet to serve. Args: port: 0 takes a free one"""
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    solutions = {row["question"]: row["sql"] for row in rows}

    class Teacher(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            message = {"role": "assistant", "content": solution(solutions, asked["messages"])}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
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
