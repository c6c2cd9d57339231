"""A two-armed bandit as an agent: a reply whose first character has an odd code point earns 1, any other earns 0.

It speaks the chat completions protocol with the standard library alone, so that hundreds of attempts start quickly.
BANDIT_LOG names a file of JSON lines to which it adds that it will ask, before it asks, and the whole answer, before
it does anything else with it: the agents' own word for what they got. It tells the collector of the answer by a span,
and adds that the collector took it. BANDIT_TOKENS is the length of an answer; where BANDIT_TOOL_SECONDS is named, it
pulls, waits as long as a tool would take, and pulls again; the rollouts of group 0 ask again and again until the file
BANDIT_GATE exists, where one is named. With BANDIT_SILENT it prints its answer, and no reward; its span
has an evaluation event of the name in BANDIT_EVALUATES.
BANDIT_TEMPERATURE is the temperature that it asks for, 1 by default.
"""

import json
import os
import sys
import time

# `python -I` does not look here by itself.
sys.path.insert(0, os.path.dirname(__file__))
import plain_http

TOKENS = int(os.environ.get("BANDIT_TOKENS", "1"))
TEMPERATURE = float(os.environ.get("BANDIT_TEMPERATURE", "1"))
QUESTION = {"model": "any", "max_tokens": TOKENS, "temperature": TEMPERATURE, "logprobs": True}
MESSAGES = [{"role": "user", "content": "heads?"}]


_, ROLLOUT, ATTEMPT, _ = os.environ["OPENAI_BASE_URL"].rsplit("/", 3)


def tell(**facts):
    log = os.environ.get("BANDIT_LOG")
    if log:
        with open(log, "a") as file:
            file.write(json.dumps({"rollout": ROLLOUT, "attempt": ATTEMPT} | facts) + "\n")


def ask():
    tell(asked=1)
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    return plain_http.ask(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions", QUESTION | {"messages": MESSAGES}, headers
    )


def is_odd(answer):
    text = answer["choices"][0]["message"]["content"] or "\0"
    return ord(text[0]) % 2 == 1


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
    if evaluates := os.environ.get("BANDIT_EVALUATES"):
        score = {"doubleValue": 1.0 if is_odd(answer) else 0.25}
        facts = {"name": {"stringValue": evaluates}, "score.value": score}
        attributes = [{"key": "gen_ai.evaluation." + fact, "value": value} for fact, value in facts.items()]
        span["events"] = [{"name": "gen_ai.evaluation.result", "timeUnixNano": now, "attributes": attributes}]
    name, key = os.environ["OTEL_EXPORTER_OTLP_HEADERS"].split("=", 1)
    document = {"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}
    plain_http.ask(os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] + "/v1/traces", document, {name: key})
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
if os.environ.get("BANDIT_SILENT"):
    print(json.dumps({"answer": "odd" if is_odd(answer) else "even"}))
else:
    print(json.dumps({"reward": float(is_odd(answer)), "odd": is_odd(answer)}))
