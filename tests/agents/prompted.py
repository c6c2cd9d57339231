"""An agent that reads its prompt from an environment variable and asks a model once; it knows nothing of Leyden.

PROMPTED_OFFLINE answers in the model's place: as a model that does what the prompt says, and no more.
"""

import json
import os
import sys

# `python -I` does not look here by itself.
sys.path.insert(0, os.path.dirname(__file__))
import plain_http

task = json.loads(os.environ["LEYDEN_TASK"])
prompt = os.environ["SYSTEM_PROMPT"]


def asked(prompt, question):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    messages = [{"role": "system", "content": prompt}, {"role": "user", "content": question}]
    body = json.dumps({"model": "any", "messages": messages}).encode()
    answer = json.loads(plain_http.post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers))
    return answer["choices"][0]["message"]["content"]


if "PROMPTED_OFFLINE" in os.environ:
    answer = task["question"].upper() if "capital letters" in prompt else task["question"]
else:
    answer = asked(prompt, task["question"])
print("answer:", answer)
print(json.dumps({"reward": float(answer == task["answer"])}))
