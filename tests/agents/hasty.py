"""A bandit whose client waits three seconds for an answer and asks five times, counting its tries.

Without any answer the siblings with an even number fail, and the others print a reward of 0. It begins once the file
HASTY_GATE exists.
"""

import json
import os
import sys
import time

# `python -I` does not look here by itself.
sys.path.insert(0, os.path.dirname(__file__))
import plain_http

TIMEOUT_SECONDS, TRIES = 3, 5
QUESTION = {"model": "any", "max_tokens": 1, "messages": [{"role": "user", "content": "heads?"}]}
_, ROLLOUT, _, _ = os.environ["OPENAI_BASE_URL"].rsplit("/", 3)


def ask():
    url, body = os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(QUESTION).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    for retry in range(TRIES):
        try:
            counted = headers | {"x-stainless-retry-count": str(retry)}
            return json.loads(plain_http.post(url, body, counted, timeout_seconds=TIMEOUT_SECONDS))
        except TimeoutError:
            time.sleep(0.5)
    return None


while not os.path.exists(os.environ["HASTY_GATE"]):
    time.sleep(0.1)
answer = ask()
if answer is None and int(ROLLOUT.rsplit(".", 1)[1]) % 2 == 0:
    raise SystemExit("no answer")
text = "\0" if answer is None else answer["choices"][0]["message"]["content"] or "\0"
print(json.dumps({"reward": float(ord(text[0]) % 2)}))
