"""Two agents that need each other: replies whose first characters both have odd code points earn 1; others earn 0.

They have names, `writer` and `checker`, share a key and an address, and do not see each other's reply.
"""

import json
import os
import sys

# `python -I` does not look here by itself.
sys.path.insert(0, os.path.dirname(__file__))
import plain_http


def parity(name):
    body = {
        "model": name,
        "max_tokens": 1,
        "temperature": 1.0,
        "messages": [{"role": "system", "content": "You are the " + name}, {"role": "user", "content": "heads?"}],
    }
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "x-agent-name": name}
    answer = plain_http.ask(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return ord((answer["choices"][0]["message"]["content"] or "\0")[0]) % 2


writer, checker = parity("writer"), parity("checker")
print(json.dumps({"reward": float(writer and checker), "writer": writer == 1, "checker": checker == 1}))
