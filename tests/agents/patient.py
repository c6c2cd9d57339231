"""An agent on the official OpenAI SDK with its default settings; any error that the SDK raises ends it.

It asks PATIENT_CALLS times; every other answer is a stream. After each answer it sends an empty batch of spans, once.
PATIENT_LOG names a file of JSON lines to which it adds that it will ask, what it received, and the error that ended it.
The reward is the bandit's.
"""

import gc
import json
import os
import urllib.request

# The collector would take a third of the import's time.
gc.disable()
from openai import OpenAI  # noqa: E402

_, ROLLOUT, ATTEMPT, _ = os.environ["OPENAI_BASE_URL"].rsplit("/", 3)
CALLS = int(os.environ["PATIENT_CALLS"])
QUESTION = {"model": "any", "max_tokens": 24, "temperature": 1.0}


def tell(**facts):
    with open(os.environ["PATIENT_LOG"], "a") as file:
        file.write(json.dumps({"rollout": ROLLOUT, "attempt": ATTEMPT} | facts) + "\n")


def ask(client, number):
    question = QUESTION | {"messages": [{"role": "user", "content": f"heads? {number}"}]}
    tell(asked=1)
    if number % 2:
        chunks = list(client.chat.completions.create(**question, stream=True))
        first, *_, last = [chunk for chunk in chunks if chunk.choices]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        choice = {"finish_reason": last.choices[0].finish_reason}
        tell(answer={"id": first.id, "system_fingerprint": last.system_fingerprint, "choices": [choice]})
        return text
    raw = client.chat.completions.with_raw_response.create(**question)
    tell(answer=json.loads(raw.content))
    return raw.parse().choices[0].message.content


def send_spans():
    name, _, value = os.environ["OTEL_EXPORTER_OTLP_HEADERS"].replace("%20", " ").partition("=")
    headers = {name: value, "content-type": "application/json"}
    url = os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] + "/v1/traces"
    with urllib.request.urlopen(urllib.request.Request(url, b"{}", headers), timeout=120) as response:
        response.read()


def main():
    client = OpenAI()
    for number in range(CALLS):
        text = ask(client, number) or "\0"
        send_spans()
    print(json.dumps({"reward": float(ord(text[0]) % 2)}))


try:
    main()
except BaseException as error:
    tell(error=repr(error))
    raise
