"""An agent can reach its own rollout and nothing else: not another rollout, not the control plane, not its own reward
unless granted.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from leyden.libs.cli.local.platform import Platform
from leyden.libs.client import Client
from tests.campaigns.soak import bandit_run
from tests.support.waiting import until

BURGLAR = Path(__file__).parents[2] / "agents" / "burglar.py"
RUN_SECONDS = 240.0
NOTHING: dict[str, Any] = {"resourceSpans": []}
CHAT = {"model": "any", "messages": [{"role": "user", "content": "late"}]}


def burglary(platform: Platform, log: Path) -> dict[str, Any]:
    """A run of two siblings that try to rob each other and the platform."""
    facts = platform.facts
    prey = {name: facts.url(name) for name in ("api", "engine", "gateway", "collector")}
    prey |= {"internal": [facts.internal_url(name) for name in ("runner", "controller", "credit", "api")]}
    agent = {"command": ["{python}", "-I", "-S", str(BURGLAR)], "environment": {"PREY": json.dumps(prey)}}
    sampling = {"group_size": 2, "groups_per_step": 1, "max_attempts": 3}
    return bandit_run(log, "burglary", 1, agent=agent, sampling=sampling)


def outcomes(platform: Platform, run_id: str) -> list[tuple[str, int, str, dict[str, Any], str]]:
    with psycopg.connect(platform.facts.database_url) as connection:
        return connection.execute(
            "SELECT rollout_id, attempt, kind, facts, stderr_tail FROM outcomes WHERE run_id = %s ORDER BY 1, 2",
            [run_id],
        ).fetchall()


def counts(platform: Platform, run_id: str) -> dict[str, int]:
    """Rows of what a thief could have written."""
    questions = {
        "rewards": "SELECT count(*) FROM rewards WHERE run_id = %(run)s",
        "external rewards": "SELECT count(*) FROM external_rewards WHERE rollout_id LIKE %(run)s || '.%%'",
        "spans": "SELECT count(*) FROM spans WHERE run_id = %(run)s",
        "tokens": """
            SELECT count(*) FROM api_tokens
            WHERE created_at > (SELECT created_at FROM runs WHERE id = %(run)s)""",
        "calls beyond one an attempt": """
            SELECT count(*) - count(DISTINCT (rollout_id, attempt)) FROM model_calls WHERE run_id = %(run)s""",
    }
    with psycopg.connect(platform.facts.database_url) as connection:
        rows = {name: connection.execute(question, {"run": run_id}).fetchone() for name, question in questions.items()}
    return {name: row[0] for name, row in rows.items() if row is not None}


@pytest.mark.timeout(900)
def test_an_agent_reaches_its_own_rollout_and_nothing_else(platform: Platform, client: Client, received: Path) -> None:
    run = client.create_run(burglary(platform, received))
    deadline = time.monotonic() + RUN_SECONDS
    while len(tried := outcomes(platform, run.id)) < 2:
        assert time.monotonic() < deadline, client.run(run.id)
        time.sleep(0.2)
    for rollout_id, attempt, kind, facts, said in tried:
        assert (kind, facts.get("got"), facts.get("served")) == ("succeeded", [], 200), said
        assert facts["statuses"].keys() <= {"401", "403", "404", "405"}, facts["statuses"]
        _nothing_opens_any_more(platform, rollout_id, attempt, facts["key"])
    assert set(counts(platform, run.id).values()) == {0}
    until(lambda: client.run(run.id).phase in {"cancelled", "completed", "failed"}, "the end of the run")


def _nothing_opens_any_more(platform: Platform, rollout_id: str, attempt: int, key: str) -> None:
    """The attempt has ended, so its key is worth nothing, in whatever hands it is."""
    here = f"/r/{rollout_id}/{attempt}"
    gateway, collector = platform.facts.url("gateway") + here, platform.facts.url("collector") + here
    with httpx.Client(headers={"authorization": f"Bearer {key}"}, trust_env=False, timeout=60) as http:
        # The doors are told of the end once it is in the store; what they are asked until then changes nothing.
        until(lambda: http.get(f"{gateway}/v1/models").status_code == 403, "the gateway knows of the end")
        until(lambda: http.post(f"{collector}/v1/traces", json=NOTHING).status_code == 403, "the collector knows of it")
        answers = [
            http.post(f"{gateway}/v1/chat/completions", json=CHAT),
            http.get(f"{gateway}/v1/models"),
            http.post(f"{collector}/v1/traces", json=NOTHING),
            http.post(f"{collector}/reward", json={"value": 1.0}),
        ]
    assert [answer.status_code for answer in answers] == [403] * 4, [answer.text for answer in answers]
    assert answers[0].json()["error"]["code"] == "ended"
