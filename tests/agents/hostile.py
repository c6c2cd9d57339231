"""A bandit's agent that writes the text of the variable HOSTILE wherever it can."""

import json
import os
import sys

# `python -I` does not look here by itself.
sys.path.insert(0, os.path.dirname(__file__))
import plain_http

HOSTILE = os.environ["HOSTILE"]
MESSAGES = [{"role": "system", "content": HOSTILE}, {"role": "user", "content": "heads?"}]
QUESTION = {"model": "any", "max_tokens": 1, "logprobs": True, "messages": MESSAGES}

headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
answer = plain_http.ask(os.environ["OPENAI_BASE_URL"] + "/chat/completions", QUESTION, headers)
text = answer["choices"][0]["message"]["content"] or "\0"
print(HOSTILE)
print(json.dumps({"answer": "odd" if ord(text[0]) % 2 else "even"}))
