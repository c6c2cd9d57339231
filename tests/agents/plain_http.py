"""HTTP for agents that start by the hundred: the import of `urllib.request` takes 65 ms of CPU time, this one 15 ms."""

import json
import socket
import time


class Refused(Exception):
    """The server answered with a status that is no success."""

    def __init__(self, status):
        super().__init__(f"status {status}")
        self.status = status


def post(url, body, headers, timeout_seconds=120):
    """Returns the body of the answer.

    Raises: Refused, OSError; EOFError, ValueError: the answer ended early, or is not HTTP
    """
    server, _, path = url.removeprefix("http://").partition("/")
    host, _, port = server.rpartition(":")
    fixed = {"Host": server, "Connection": "close", "Content-Length": str(len(body))}
    lines = [f"POST /{path} HTTP/1.1", *(f"{name}: {value}" for name, value in (fixed | headers).items())]
    with socket.create_connection((host, int(port)), timeout_seconds) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        with connection.makefile("rb") as answer:
            _, status, *_ = answer.readline().split(maxsplit=2)
            named = _headers(answer)
            content = _chunks(answer) if "transfer-encoding" in named else _exactly(answer, named["content-length"])
    if not 200 <= int(status) < 300:
        raise Refused(int(status))
    return content


def _headers(answer):
    named = {}
    while line := answer.readline().decode().strip():
        name, _, value = line.partition(":")
        named[name.lower()] = value.strip()
    if "transfer-encoding" not in named and "content-length" not in named:
        raise EOFError("the headers ended early")
    return named


def _chunks(answer):
    content = b""
    while size := int(answer.readline(), 16):
        content += _exactly(answer, size)
        _exactly(answer, 2)
    return content


def _exactly(answer, size):
    content = answer.read(int(size))
    if len(content) != int(size):
        raise EOFError("the answer ended early")
    return content


def ask(url, document, headers, tries=60):
    """Returns the JSON answer to a JSON document; tries again as OpenAI's clients do, and gives up with an exit."""
    body, headers = json.dumps(document).encode(), headers | {"Content-Type": "application/json"}
    for retry in range(tries):
        try:
            return json.loads(post(url, body, headers | {"x-stainless-retry-count": str(retry)}))
        except Refused as error:
            if error.status not in (408, 409, 429, 500, 502, 503, 504):
                raise
        except (OSError, EOFError, ValueError):
            pass
        time.sleep(0.5)
    raise SystemExit(f"{url} never answered")
