"""An agent with one question and two arms: a reply whose first character has an odd code point earns 1, another 0.

It speaks the chat completions protocol with the standard library alone, so that hundreds of attempts start quickly, and
appends the id of every answer it received to BANDIT_LOG before it does anything else with it.
"""

import json
import os
import time
import urllib.error
import urllib.request

QUESTION = {"model": "any", "max_tokens": 1, "messages": [{"role": "user", "content": "heads?"}]}


def ask(tries=60):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        data=json.dumps(QUESTION | {"temperature": 1.0}).encode(),
        headers={"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    for retry in range(tries):
        request.add_header("x-stainless-retry-count", str(retry))
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            if error.code not in (408, 409, 429, 500, 502, 503, 504):
                raise
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            pass
        time.sleep(0.5)
    raise SystemExit("the model never answered")


answer = ask()
log = os.environ.get("BANDIT_LOG")
if log:
    with open(log, "a") as file:  # noqa: PTH123 - one short line, appended whole
        file.write(answer["id"] + "\n")
text = answer["choices"][0]["message"]["content"] or "\0"
print(json.dumps({"reward": float(ord(text[0]) % 2), "odd": ord(text[0]) % 2 == 1}))
