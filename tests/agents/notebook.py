"""The two-armed bandit as a notebook would play it: this process leases attempts and runs their agent itself.

Arguments: the API's address, its token, the run, attempts at once, and a log as that of `bandit.py`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from leyden.libs.client import Attempt, Client

# As `bandit.py` does: agents have no package.
sys.path.insert(0, str(Path(__file__).parent))
import plain_http

QUESTION = {"model": "any", "max_tokens": 1, "temperature": 1.0, "messages": [{"role": "user", "content": "heads?"}]}


def reward_of(answer: Any) -> float:
    """1.0 for a reply whose first character has an odd code point."""
    text = answer["choices"][0]["message"]["content"] or "\0"
    return float(ord(text[0]) % 2 == 1)


def tell(log: Path, rollout_id: str, attempt: int, **facts: Any) -> None:
    with log.open("a") as file:
        file.write(json.dumps({"rollout": rollout_id, "attempt": attempt} | facts) + "\n")


def pull(base_url: str, key: str, told: tuple[Path, str, int]) -> float:
    """Asks the model once and returns the reward."""
    tell(*told, asked=1)
    answer = plain_http.ask(f"{base_url}/chat/completions", QUESTION, {"Authorization": f"Bearer {key}"})
    tell(*told, answer=answer)
    return reward_of(answer)


def main(url: str, token: str, run_id: str, at_once: str, log: str) -> None:
    def agent(attempt: Attempt) -> float:
        told = (Path(log), attempt.leased.rollout_id, attempt.leased.number)
        return pull(attempt.base_url, attempt.api_key, told)

    with Client(url, token, patience_seconds=120) as client:
        print(client.work(run_id, agent, at_once=int(at_once), worker="notebook"))


if __name__ == "__main__":
    main(*sys.argv[1:])
