"""The flight agent as an HTTP service, which knows nothing of Leyden.

`OPENAI_BASE_URL` and `OTEL_EXPORTER_OTLP_ENDPOINT` are read once. A POST has the task as JSON and the key for its model
as bearer; the answer is the grade. Requests are served at the same time. It prints the port on which it listens.
"""

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from openai import OpenAI
from play import play

# Each request brings its own key.
MODEL = OpenAI(api_key="none")
COLLECTOR = os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"]


class Agent(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        task = json.loads(self.rfile.read(int(self.headers["content-length"])))
        model = MODEL.with_options(api_key=self.headers["authorization"].removeprefix("Bearer "))
        body = json.dumps(play(task, model, COLLECTOR)).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Be silent."""


if __name__ == "__main__":
    with ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Agent) as server:
        print(server.server_port, flush=True)
        server.serve_forever()
