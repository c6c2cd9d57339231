"""An agent that keeps a log of everything the platform told it: answers, spans and rewards that it was thanked for.

One question whole, one streamed, two spans, one reward at the door, and a verdict. Standard library alone. Each line of
WITNESS_LOG is one JSON document, written before anything else is done with what was received.
"""

import json
import os
import sys
import time

# `python -I` does not look here by itself.
sys.path.insert(0, os.path.dirname(__file__))
import plain_http

FAR = 120
WAITING = (408, 409, 429, 499, 500, 502, 503, 504)
WHO = [os.environ["LEYDEN_ROLLOUT_ID"], int(os.environ["LEYDEN_ATTEMPT"])]
KEY = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}


def note(kind, what):
    with open(os.environ["WITNESS_LOG"], "a") as file:
        file.write(json.dumps({"kind": kind, "id": what, "who": WHO}) + "\n")


def post(url, document, read):
    """The answer as parsed by `read`; tries again as SDKs and exporters do, for a minute."""
    body = json.dumps(document).encode()
    for retry in range(FAR):
        try:
            return read(plain_http.post(url, body, KEY | {"x-stainless-retry-count": str(retry)}, timeout_seconds=60))
        except plain_http.Refused as error:
            if error.status not in WAITING:
                raise
        except (OSError, ValueError, EOFError):
            pass
        time.sleep(0.5)
    raise SystemExit(f"{url} never answered")


def full_text(content):
    answer = json.loads(content)
    return answer["id"], answer["choices"][0]["message"]["content"]


def streamed(content):
    events = content.decode().split("\n\n")
    if events[-2:] != ["data: [DONE]", ""]:
        raise EOFError("the stream ended early")
    chunks = [json.loads(event[6:]) for event in events[:-2] if event.startswith("data: ")]
    [name] = {chunk["id"] for chunk in chunks}
    return name, "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


def ask(messages, **more):
    read = streamed if more.get("stream") else full_text
    # First, as SDKs write it: a later call goes on from the record of the first.
    question = {"messages": messages, "model": "any", "max_tokens": 1, "temperature": 1.0}
    name, text = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", question | more, read)
    note("answer", name)
    return text


def span(trace, answered):
    now = time.time_ns()
    attributes = [{"key": "gen_ai.operation.name", "value": {"stringValue": "execute_tool"}}]
    span_id = os.urandom(8).hex()
    document = {"traceId": trace, "spanId": span_id, "name": answered, "attributes": attributes}
    return document | {"startTimeUnixNano": str(now), "endTimeUnixNano": str(now + 1), "kind": 1}


def tell(spans):
    scope = {"scope": {"name": "witness"}, "spans": spans}
    url = os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] + "/v1/traces"
    post(url, {"resourceSpans": [{"resource": {}, "scopeSpans": [scope]}]}, bytes)
    for one in spans:
        note("span", one["spanId"])


messages = [{"role": "user", "content": "heads?"}]
first = ask(messages)
again = [*messages, {"role": "assistant", "content": first}, {"role": "user", "content": "again?"}]
ask(again, stream=True, max_tokens=3)
trace = os.urandom(16).hex()
tell([span(trace, "look"), span(trace, "leap")])
post(os.environ["LEYDEN_REWARD_URL"], {"value": 0.0, "key": "kindness"}, bytes)
note("reward", "kindness")
print(json.dumps({"reward": float(ord((first or "\0")[0]) % 2)}))
