"""An agent that wastes answers, as real clients do. It uses two calls of five, and its sibling's number is its reward.

It sends a question and closes the connection at once, and cuts a stream after 200 bytes. Then it asks something else,
discards that answer, asks the same again without counting its tries, and goes on from the second answer.
"""

import json
import os
import socket
import sys

# `python -I` does not look here by itself.
sys.path.insert(0, os.path.dirname(__file__))
import plain_http

URL = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
HEADERS = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
_, ROLLOUT, _, _ = os.environ["OPENAI_BASE_URL"].rsplit("/", 3)


def question(*contents, **parameters):
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": text} for number, text in enumerate(contents)]
    return json.dumps({"model": "any", "max_tokens": 8, "messages": messages} | parameters).encode()


def send(body, read_bytes):
    """Sends a request and closes its connection after so many bytes of the answer."""
    server, _, path = URL.removeprefix("http://").partition("/")
    host, _, port = server.rpartition(":")
    lines = [f"POST /{path} HTTP/1.1", f"Host: {server}", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in HEADERS.items()]
    with socket.create_connection((host, int(port)), 60) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        while read_bytes > 0 and (piece := connection.recv(min(read_bytes, 100))):
            read_bytes -= len(piece)


def ask(body):
    answer = json.loads(plain_http.post(URL, body, HEADERS))
    return answer["choices"][0]["message"]["content"] or ""


send(question("closed at once"), 0)
send(question("cut", stream=True, max_tokens=400), 200)
ask(question("heads?"))
second = ask(question("heads?"))
ask(question("heads?", second, "again?"))
print(json.dumps({"reward": float(ROLLOUT.rsplit(".", 1)[1])}))
