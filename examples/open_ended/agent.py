"""An agent of one call: it answers a question in words of its own.

The last line of output is the answer as JSON: `{"answer": "…"}`. Nobody grades it here. It needs the standard library
alone.
"""

import json
import os
import sys
import urllib.request
from pathlib import Path

MODEL = os.environ.get("OPENAI_MODEL", "any")
SYSTEM = "Answer in one short sentence."
MAX_TOKENS = 64


def answer(question):
    """Return the model's reply."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    body = {"model": MODEL, "messages": messages, "max_tokens": MAX_TOKENS, "temperature": 1.0}
    request = urllib.request.Request(  # noqa: S310  # the address that the platform gives
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    with urllib.request.urlopen(request, timeout=100) as response:  # noqa: S310
        return json.load(response)["choices"][0]["message"]["content"] or ""


if __name__ == "__main__":
    text = Path(sys.argv[1]).read_text() if len(sys.argv) > 1 else os.environ.get("LEYDEN_TASK")
    if not text:
        sys.exit("no task: set LEYDEN_TASK to a JSON object, or name a JSON file as the first argument")
    print(json.dumps({"answer": answer(json.loads(text)["question"])}))
