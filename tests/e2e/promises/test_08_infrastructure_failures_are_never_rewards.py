"""Infrastructure failures are never rewards. A lost pod, a dead engine or a timeout of ours is retried or excluded; it
never trains as zero.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.campaigns.soak import bandit_run
from tests.faults.proxy import Trouble
from tests.faults.stage import Stage, stage
from tests.support.chaos import kill
from tests.support.long import long_only
from tests.support.waiting import until

AGENT = Path(__file__).parents[2] / "agents" / "impatient.py"
FAILURE_REWARD = -7.0
"""The reward of an agent's own failure; no rollout here may have it."""
STEPS = 10


def rows(on: Stage, question: str, run_id: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(on.database) as connection:
        return connection.execute(question.encode(), (run_id,)).fetchall()


@long_only
@pytest.mark.timeout(900)
def test_agents_that_fail_because_of_us_are_executed_again_and_none_is_rewarded_for_it(tmp_path: Path) -> None:
    gives_up = {"gateway": {"GATEWAY_HOLD_SECONDS": "1", "GATEWAY_RECORD_HOLD_SECONDS": "1"}}
    with stage(tmp_path, gives_up) as on:
        run = on.client.create_run(
            bandit_run(
                on.received,
                "failures",
                STEPS,
                agent={"command": ["{python}", "-I", "-S", str(AGENT)], "environment": {}},
                runner={"timeout_seconds": 30},
                sampling={
                    "groups_per_step": 2,
                    "agent_failure": "reward",
                    "failure_reward": FAILURE_REWARD,
                    "max_attempts": 30,
                },
            )
        )
        on.wait_for_rollouts(run.id, 8)
        for proxy in (on.engine_proxy, on.postgres_proxy):
            proxy.trouble = Trouble(refuse=True)
            time.sleep(3)
            proxy.heal()
            on.wait_for_rollouts(run.id, 4)
        at_work = "SELECT 1 FROM attempts WHERE run_id = %s AND state = 'running'"
        for victim in ("gateway", "runner", "engine"):
            until(lambda: rows(on, at_work, run.id) != [], "an agent at work")
            assert kill(on.platform, victim, run.id)
            on.wait_for_rollouts(run.id, 4)
        ended = on.ended(run.id)

        assert (ended.phase, ended.reason) == ("completed", None)
        rewards = rows(on, "SELECT DISTINCT reward FROM rollouts WHERE run_id = %s AND state = 'finished'", run.id)
        assert {reward for (reward,) in rewards} == {0.0, 1.0}
        counted = """
            SELECT DISTINCT o.kind FROM rollouts r JOIN outcomes o ON o.rollout_id = r.id AND o.attempt = r.attempt
            WHERE r.run_id = %s AND r.state = 'finished'"""
        assert rows(on, counted, run.id) == [("succeeded",)]
        failed = rows(on, "SELECT kind FROM outcomes WHERE run_id = %s AND kind <> 'succeeded'", run.id)
        assert failed
        assert on.damage(run.id) == {}
