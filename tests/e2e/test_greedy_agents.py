"""Agents that ask for temperature 0 train where the run decides how its policy samples, and end a run with its reason
where it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
import pytest

from leyden.libs.cli.local.platform import Platform
from leyden.libs.client import Client
from tests.campaigns.soak import bandit_run
from tests.invariants import violations
from tests.support.chaos import RunWatch
from tests.support.long import long_only

GREEDY = {"environment": {"BANDIT_TEMPERATURE": "0"}}
WAIT_SECONDS = 240.0


def greedy_run(log: Path, name: str, steps: int, **sampling: Any) -> dict[str, Any]:
    groups = {"group_size": 8, "groups_per_step": 2, "max_policy_lag": 0}
    document = bandit_run(log, name, steps, sampling={**groups, **sampling})
    document["agent"]["environment"] |= GREEDY["environment"]
    return document


@long_only
@pytest.mark.timeout(600)
def test_an_agent_at_temperature_0_trains_where_the_run_samples(
    platform: Platform, client: Client, received: Path
) -> None:
    run = client.create_run(greedy_run(received, "overridden", 2, override={"temperature": 1}))
    assert RunWatch(platform, run.id).wait_for_end(WAIT_SECONDS), client.run(run.id)
    assert client.run(run.id).phase == "completed"
    calls = [call for sibling in range(8) for call in client.calls(f"{run.id}.0.{sibling}")]
    assert {(call.temperature, str(call.asked), call.trainable) for call in calls if call.status == "completed"} == {
        (1.0, "{'temperature': 0.0}", True)
    }
    # Siblings differ, as they cannot at temperature 0, and their tokens are trained.
    with psycopg.connect(platform.facts.database_url) as connection:
        trained = "SELECT count(*) FROM step_groups WHERE run_id = %s AND step IS NOT NULL"
        assert connection.execute(trained, (run.id,)).fetchone() == (4,)
        sampled = "SELECT count(DISTINCT sampled_ids) FROM model_calls WHERE run_id = %s"
        assert (connection.execute(sampled, (run.id,)).fetchone() or (0,))[0] > 4
    assert violations(platform.facts.database_url, run.id) == {}


@long_only
@pytest.mark.timeout(600)
def test_a_run_whose_agents_sample_at_temperature_0_ends_with_the_reason(
    platform: Platform, client: Client, received: Path
) -> None:
    run = client.create_run(greedy_run(received, "greedy", 6))
    assert RunWatch(platform, run.id).wait_for_end(WAIT_SECONDS), client.run(run.id)
    ended = client.run(run.id)
    assert ended.phase == "failed"
    assert ended.reason is not None and "can be trained: " in ended.reason and "sampling.override" in ended.reason
    assert ended.progress.step < 6
