"""Twenty calls of a model in one conversation, of which the first decides.

The first letter of the first reply picks one of four arms by its code point; nineteen more replies pick nothing. The
last line of output is the arm as JSON: `{"arm": "1"}`. Nobody grades it here. It needs the standard library alone.
"""

import http.client
import json
import os
import sys
from pathlib import Path
from urllib.parse import urlsplit

CALLS = int(os.environ.get("CALLS", "20"))
ARMS = 4
MODEL = os.environ.get("OPENAI_MODEL", "any")


def ask(connection, path, messages):
    """Return the model's reply of one token."""
    question = {"model": MODEL, "messages": messages, "max_tokens": 1, "temperature": 1.0}
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    connection.request("POST", path, json.dumps(question), headers)
    answer = connection.getresponse()
    body = answer.read()
    if answer.status != 200:
        sys.exit(f"status {answer.status}: {body[:500]}")
    return json.loads(body)["choices"][0]["message"]["content"] or ""


def converse(question):
    """Return the replies; each prompt has all turns before it."""
    url = urlsplit(os.environ["OPENAI_BASE_URL"] + "/chat/completions")
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    connection = kind(url.netloc, timeout=120)
    messages, replies = [{"role": "user", "content": question}], []
    for _ in range(CALLS):
        replies.append(ask(connection, url.path, messages))
        messages += [{"role": "assistant", "content": replies[-1]}, {"role": "user", "content": "go on"}]
    return replies


def arm(reply):
    """Return the arm that a reply picks; none for an empty one."""
    return str(ord(reply[0]) % ARMS) if reply else ""


if __name__ == "__main__":
    text = Path(sys.argv[1]).read_text() if len(sys.argv) > 1 else os.environ.get("LEYDEN_TASK")
    if not text:
        sys.exit("no task: set LEYDEN_TASK to a JSON object, or name a JSON file as the first argument")
    print(json.dumps({"arm": arm(converse(json.loads(text)["question"])[0])}))
