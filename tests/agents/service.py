"""The two-armed bandit as a service: it reads its base URL once, and plays for whichever attempt a request has the key.

Arguments: a log as that of `bandit.py`. OPENAI_BASE_URL is that of all attempts. It prints the port on which it
listens; POST / with the attempt's key as bearer and `{"rollout": …, "attempt": …}` answers `{"reward": …}`.
"""

from __future__ import annotations

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.agents.notebook import pull

BASE_URL = os.environ["OPENAI_BASE_URL"]
LOG = Path(sys.argv[1])


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        key = self.headers["authorization"].removeprefix("Bearer ")
        body = json.dumps({"reward": pull(BASE_URL, key, (LOG, asked["rollout"], asked["attempt"]))}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
    print(server.server_port, flush=True)
    server.serve_forever()
