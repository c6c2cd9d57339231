"""An agent with one question and two arms: a reply whose first character has an odd code point earns 1, another 0.

It speaks the chat completions protocol with the standard library alone, so that hundreds of attempts start quickly.
BANDIT_LOG names a file of JSON lines to which it adds that it will ask, before it asks, and the whole answer, before
it does anything else with it: the agents' own word for what they got. It tells the collector of the answer by a span,
and adds that the collector took it. BANDIT_TOKENS is the length of an answer; where BANDIT_TOOL_SECONDS is named, it
pulls, waits as long as a tool would take, and pulls again; the rollouts of group 0 ask again and again until the file
BANDIT_GATE exists, where one is named.
"""

import http.client
import json
import os
import time
import urllib.error
import urllib.parse
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


def post(url, document, headers, tries=60):
    body, headers = json.dumps(document).encode(), headers | {"Content-Type": "application/json"}
    request = urllib.request.Request(url, data=body, headers=headers)
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
    raise SystemExit(f"{url} never answered")


def ask():
    tell(asked=1)
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    return post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", QUESTION | {"messages": MESSAGES}, headers)


def export(answer):
    now, span_id = str(time.time_ns()), os.urandom(8).hex()
    named = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "coin", "gen_ai.response.id": answer["id"]}
    span = {
        "traceId": os.urandom(16).hex(),
        "spanId": span_id,
        "name": "execute_tool coin",
        "startTimeUnixNano": now,
        "endTimeUnixNano": now,
        "attributes": [{"key": key, "value": {"stringValue": value}} for key, value in named.items()],
    }
    _, key = urllib.parse.unquote(os.environ["OTEL_EXPORTER_OTLP_HEADERS"]).split("=", 1)
    document = {"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}
    post(os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] + "/v1/traces", document, {"Authorization": key})
    tell(span=span_id)


def pull():
    answer = ask()
    tell(answer=answer)
    export(answer)
    return answer


tool_seconds = float(os.environ.get("BANDIT_TOOL_SECONDS", "0"))
if tool_seconds:
    pull()
    time.sleep(tool_seconds)
answer = pull()
gate = os.environ.get("BANDIT_GATE")
while gate and ROLLOUT.split(".")[1] == "0" and not os.path.exists(gate):
    answer = pull()
text = answer["choices"][0]["message"]["content"] or "\0"
print(json.dumps({"reward": float(ord(text[0]) % 2), "odd": ord(text[0]) % 2 == 1}))
