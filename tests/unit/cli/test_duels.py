"""The pairs of a duel: rollouts of one task, by one agent."""

from __future__ import annotations

from typing import Any, cast

from leyden.libs.cli.commands.rewards import _pairs
from leyden.libs.client import Client
from leyden.libs.contracts.api.rollouts import Rollout
from tests.unit.client.test_export import rollout


class Evaluations:
    """A client that has the rollouts of evaluations."""

    def __init__(self, **found: list[Rollout]) -> None:
        self._found = found

    def rollouts(self, *, evaluation: str, state: str) -> list[Rollout]:
        assert state == "finished"
        return self._found[evaluation]


def test_each_agent_of_a_run_meets_itself() -> None:
    def of(version: int, *agents: str | None) -> list[Rollout]:
        made: list[Any] = [rollout().model_copy(update={"id": f"{version}.{one}", "agent": one}) for one in agents]
        return made

    client = Evaluations(new=of(2, "writer", "planner", "late"), old=of(1, "planner", "writer"))
    found = [(mine.id, rival.id) for mine, rival in _pairs(cast("Client", client), "new", "old")]
    assert found == [("2.writer", "1.writer"), ("2.planner", "1.planner")]
