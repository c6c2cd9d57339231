"""An answer that nobody received, and one that its agent discarded and asked for again, get no credit."""

from __future__ import annotations

from pathlib import Path

import pytest

from leyden.libs.cli.local.platform import Platform
from leyden.libs.client import Client
from tests.campaigns.soak import bandit_run
from tests.invariants import violations
from tests.support.long import long_only
from tests.support.waiting import until

CARELESS = Path(__file__).parents[1] / "agents" / "careless.py"


@long_only
@pytest.mark.timeout(600)
def test_only_calls_that_the_agent_used_have_credit(platform: Platform, client: Client, received: Path) -> None:
    document = bandit_run(
        received,
        "careless",
        1,
        agent={"command": ["{python}", "-I", "-S", str(CARELESS)], "environment": {}},
        sampling={"group_size": 2, "groups_per_step": 1},
        credit={"rule": {"type": "equal_split"}},
    )
    run = client.create_run(document)
    until(lambda: client.run(run.id).phase in {"completed", "failed"}, "the end of the run")
    for sibling in range(2):
        # The platform may have lost an attempt before, whose calls are listed too.
        last = client.rollout(f"{run.id}.0.{sibling}").attempt
        calls = [call for call in client.calls(f"{run.id}.0.{sibling}", attempt=last) if call.turns]
        credited = [(call.turns[-1].content, call.credit.return_) for call in calls if call.credit]
        # Two of five calls, each with a half of the reward.
        assert credited == [("heads?", sibling / 2), ("again?", sibling / 2)]
        lost, used = calls[:-3], calls[-3:]
        assert [call.delivered for call in used] == [True, True, True]
        assert {call.delivered for call in lost} <= {False}
    assert violations(platform.facts.database_url, run.id) == {}
