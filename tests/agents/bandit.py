"""An agent with one question and two arms: a reply whose first character has an odd code point earns 1, another 0.

It speaks the chat completions protocol with the standard library alone, so that hundreds of attempts start quickly.
BANDIT_LOG names a file of JSON lines to which it adds that it will ask, before it asks, and the whole answer, before
it does anything else with it: the agents' own word for what they got. BANDIT_TOKENS is the length of an answer; the
rollouts of group 0 end only once the file BANDIT_GATE exists, where one is named.
"""

import http.client
import json
import os
import time
import urllib.error
import urllib.request

TOKENS = int(os.environ.get("BANDIT_TOKENS", "1"))
QUESTION = {"model": "any", "max_tokens": TOKENS, "temperature": 1.0, "logprobs": True}
MESSAGES = [{"role": "user", "content": "heads?"}]


_, ROLLOUT, ATTEMPT, _ = os.environ["OPENAI_BASE_URL"].rsplit("/", 3)


def tell(**facts):
    log = os.environ.get("BANDIT_LOG")
    if log:
        with open(log, "a") as file:
            file.write(json.dumps({"rollout": ROLLOUT, "attempt": ATTEMPT} | facts) + "\n")


def ask(tries=60):
    tell(asked=1)
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        data=json.dumps(QUESTION | {"messages": MESSAGES}).encode(),
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
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError, ValueError):
            pass
        time.sleep(0.5)
    raise SystemExit("the model never answered")


answer = ask()
tell(answer=answer)
gate = os.environ.get("BANDIT_GATE")
while gate and ROLLOUT.split(".")[1] == "0" and not os.path.exists(gate):
    time.sleep(0.1)
text = answer["choices"][0]["message"]["content"] or "\0"
print(json.dumps({"reward": float(ord(text[0]) % 2), "odd": ord(text[0]) % 2 == 1}))
