"""A bandit agent that makes one call without retries and fails if it gets no answer at once.

Its verdict is 0 or 1 by the answer. It never prints another reward, and it never fails where it was answered.
"""

import json
import os
import sys

# `python -I` does not look here by itself.
sys.path.insert(0, os.path.dirname(__file__))
import plain_http

question = {"model": "any", "max_tokens": 1, "messages": [{"role": "user", "content": "heads?"}]}
url, body = os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(question).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
answer = json.loads(plain_http.post(url, body, headers, timeout_seconds=60))
text = answer["choices"][0]["message"]["content"] or "\0"
print(json.dumps({"reward": float(ord(text[0]) % 2)}))
