"""An agent that keeps a log of everything the platform told it: answers, spans and rewards that it was thanked for.

One question whole, one streamed, two spans, one reward at the door, and a verdict. Standard library alone. Each line of
WITNESS_LOG is one JSON document, written before anything else is done with what was received.
"""

import json
import os
import secrets
import time
import urllib.error
import urllib.parse
import urllib.request

FAR = 120
WAITING = (408, 409, 429, 499, 500, 502, 503, 504)
WHO = [os.environ["LEYDEN_ROLLOUT_ID"], int(os.environ["LEYDEN_ATTEMPT"])]
KEY = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}


def note(kind, what):
    with open(os.environ["WITNESS_LOG"], "a") as file:
        file.write(json.dumps({"kind": kind, "id": what, "who": WHO}) + "\n")


def post(url, document, read):
    """What `read` makes of the answer; tries again as SDKs and exporters do, for a minute."""
    request = urllib.request.Request(url, json.dumps(document).encode(), KEY)
    for retry in range(FAR):
        request.add_header("x-stainless-retry-count", str(retry))
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return read(response)
        except urllib.error.HTTPError as error:
            if error.code not in WAITING:
                raise
        except (OSError, ValueError, EOFError):
            pass
        time.sleep(0.5)
    raise SystemExit(f"{url} never answered")


def whole(response):
    answer = json.load(response)
    return answer["id"], answer["choices"][0]["message"]["content"]


def streamed(response):
    events = response.read().decode().split("\n\n")
    if events[-2:] != ["data: [DONE]", ""]:
        raise EOFError("the stream ended early")
    chunks = [json.loads(event[6:]) for event in events[:-2] if event.startswith("data: ")]
    [name] = {chunk["id"] for chunk in chunks}
    return name, "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


def ask(messages, **more):
    read = streamed if more.get("stream") else whole
    # First, as SDKs write it: a later call goes on from the record of the first.
    question = {"messages": messages, "model": "any", "max_tokens": 1, "temperature": 1.0}
    name, text = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", question | more, read)
    note("answer", name)
    return text


def span(trace, answered):
    now = time.time_ns()
    attributes = [{"key": "gen_ai.operation.name", "value": {"stringValue": "execute_tool"}}]
    span_id = secrets.token_hex(8)
    document = {"traceId": trace, "spanId": span_id, "name": answered, "attributes": attributes}
    return document | {"startTimeUnixNano": str(now), "endTimeUnixNano": str(now + 1), "kind": 1}


def tell(spans):
    scope = {"scope": {"name": "witness"}, "spans": spans}
    url = os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] + "/v1/traces"
    post(url, {"resourceSpans": [{"resource": {}, "scopeSpans": [scope]}]}, lambda response: response.read())
    for one in spans:
        note("span", one["spanId"])


messages = [{"role": "user", "content": "heads?"}]
first = ask(messages)
again = [*messages, {"role": "assistant", "content": first}, {"role": "user", "content": "again?"}]
ask(again, stream=True, max_tokens=3)
trace = secrets.token_hex(16)
tell([span(trace, "look"), span(trace, "leap")])
post(os.environ["LEYDEN_REWARD_URL"], {"value": 0.0, "key": "kindness"}, lambda response: response.read())
note("reward", "kindness")
print(json.dumps({"reward": float(ord((first or "\0")[0]) % 2)}))
