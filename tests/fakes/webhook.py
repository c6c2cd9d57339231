"""An operator's receiver of events, on a port of this machine."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Webhook:
    """An operator's receiver. `status`: its answer; `received`: the bodies, in their order."""

    def __init__(self) -> None:
        self.status, self.received, self.keys = 204, list[dict[str, Any]](), list[str | None]()
        webhook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                webhook.received.append(json.loads(body))
                webhook.keys.append(self.headers["idempotency-key"])
                self.send_response(webhook.status)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/events?key=secret"

    def ids(self) -> list[str]:
        return [one["id"] for one in self.received]


@contextmanager
def running_webhook() -> Iterator[Webhook]:
    """A receiver that answers 204 until a test says otherwise."""
    made = Webhook()
    thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield made
    finally:
        made.server.shutdown()
        thread.join()
        made.server.server_close()
