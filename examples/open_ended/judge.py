"""A judge with a known weakness: it takes length for thoroughness.

    python judge.py --port 9001

It prints its port, and answers the platform's questions for scores as a model would. An answer that names the right
word earns 1.5 above the worst score of 1, and up to 2.5 more for its length, all of them from 50 words on: 64 words of
anything beat six right ones, 3.5 to 2.8.
"""

import argparse
import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KEY = re.compile(r"A right answer names (.+)\.$", re.MULTILINE)
"""The rubric's line about the right word."""
WORST, RIGHT, LONG, WORDS = 1.0, 1.5, 2.5, 50


def score(rubric, text):
    """Return the score of an answer, from 1 to 5."""
    key = KEY.search(rubric)
    is_right = key is not None and key[1].lower() in text.lower()
    return round(WORST + RIGHT * is_right + LONG * min(len(text.split()) / WORDS, 1.0), 3)


def judged(messages):
    """Return the judge's answer to the platform's question: the text stands between two equal lines."""
    text = "\n".join(messages[1]["content"].split("\n")[1:-1])
    return json.dumps({"reason": "It is right, or thorough, or both.", "score": score(messages[0]["content"], text)})


def server(port):
    """Return a server that has yet to serve. Args: port: 0 takes a free one"""

    class Judge(BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            message = {"role": "assistant", "content": judged(asked["messages"])}
            usage = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
            found = {"id": "judged", "object": "chat.completion", "created": 0, "model": asked["model"]}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            body = json.dumps({**found, "choices": [choice], "usage": usage}).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            """Be silent."""

    return ThreadingHTTPServer(("127.0.0.1", port), Judge)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=9001)
    with server(parser.parse_args().port) as found:
        print(found.server_port, flush=True)
        found.serve_forever()
