"""The bandit's question, asked once: whatever does not answer at once makes this agent fail, and it says so itself.

Its verdict is 0 or 1 by the answer. It never prints another reward, and it never fails where it was answered.
"""

import json
import os
import urllib.request

question = {"model": "any", "max_tokens": 1, "messages": [{"role": "user", "content": "heads?"}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    data=json.dumps(question).encode(),
    headers={"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
with urllib.request.urlopen(request, timeout=60) as response:
    text = json.load(response)["choices"][0]["message"]["content"] or "\0"
print(json.dumps({"reward": float(ord(text[0]) % 2)}))
