"""Runs with several agents: each is checked as the one agent of a run is, and errors name it."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from leyden.libs.contracts.config import BrokenDocument, RunConfig
from leyden.libs.contracts.config.agents import stored_agent

PLAIN = {"name": "plain", "command": ["x"]}
SERVED = {"name": "served", "runner": {"type": "external"}}
IMAGE = {"type": "kubernetes", "image": "a:1", "timeout_seconds": 9.0}


def document(*agents: dict[str, Any], **sections: Any) -> dict[str, Any]:
    return {"name": "r", "dataset": "d", "agents": list(agents), **sections}


def test_each_agent_has_its_runner_over_that_of_the_run() -> None:
    other = {"name": "other", "command": ["y"], "runner": {"image": "b:1"}}
    run = RunConfig.model_validate(document(PLAIN, other, SERVED, runner=IMAGE))
    assert [(one.name, one.path, one.runner.type) for one in run.group_agents] == [
        ("plain", "agents.0", "kubernetes"),
        ("other", "agents.1", "kubernetes"),
        ("served", "agents.2", "external"),
    ]
    first, second, third = (one.runner.model_dump() for one in run.group_agents)
    assert (first["image"], second["image"], second["timeout_seconds"]) == ("a:1", "b:1", 9.0)
    # Another type of runner shares no field.
    assert third["timeout_seconds"] == 300.0


def test_the_agent_of_a_group_is_found_in_the_stored_document_by_its_name() -> None:
    run = RunConfig.model_validate(document(PLAIN, SERVED, runner={"stdout_reward": False}))
    stored = run.storable()
    assert RunConfig.stored(stored) == run
    newer = {**stored, "agents": [{**one, "new": 1} for one in stored["agents"]]}
    for one in run.group_agents:
        found = stored_agent(newer, one.name)
        assert (found.name, found.path, found.runner) == (one.name, one.path, one.runner)
        assert found.agent.command == one.agent.command
        assert not found.runner.stdout_reward
    with pytest.raises(BrokenDocument, match="agents: it has no agent 'none'"):
        stored_agent(stored, "none")


def test_a_run_with_one_agent_is_stored_as_before() -> None:
    stored = RunConfig.model_validate({"name": "r", "dataset": "d", "agent": {"command": ["x"]}}).storable()
    assert "agents" not in stored and stored["agent"]["command"] == ["x"]
    found = stored_agent(stored, None)
    assert (found.name, found.path, found.agent.command) == (None, "agent", ["x"])


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        (document(PLAIN, agent={"command": ["x"]}), "one or the other: write the agent into agents, with a name"),
        (document(), "agent: the run has none: write its command, or several agents with names into agents"),
        (document(PLAIN, PLAIN), "agents: ['plain'] name two agents each: write another name"),
        (
            document({**PLAIN, "runner": {"stdout_reward": False}}),
            "agents.0.runner.stdout_reward differs from runner.stdout_reward, which all agents of a run share",
        ),
        (
            document(PLAIN, {**PLAIN, "name": "b", "hosted_tools": "refuse"}),
            "hosted_tools is the same for all agents of a run",
        ),
        (
            document(PLAIN, {**PLAIN, "name": "b"}, credit={"baseline": {"type": "ema"}}, sampling={"min_siblings": 1}),
            "'ema' compares the groups of all agents with each other: write 'mean'",
        ),
        (
            document({**PLAIN, "runner": IMAGE}, {"name": "b", "command": ["x"], "directory": "/a", "runner": IMAGE}),
            "agents.1.directory is a folder of a runner's machine",
        ),
        (
            document({**PLAIN, "task_file": "/app/in.json", "runner": {**IMAGE, "attempts_per_pod": 2}}),
            "agents.0.task_file: attempts of a shared pod have one path in common: read LEYDEN_TASK_FILE instead",
        ),
        (document({**PLAIN, "task_file": "a/b"}), "agents.0.task_file: write a name in the agent's working folder"),
    ],
)
def test_contradictions_are_refused_with_the_remedy(refused: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        RunConfig.model_validate(refused)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("agent", "place"),
    [
        ({"command": ["x"]}, "name"),
        ({"name": "a b", "command": ["x"]}, "name"),
        ({"name": "a"}, "command"),
        ({"name": "a", "command": []}, "command"),
        ({**SERVED, "command": ["x"]}, "command"),
        ({**PLAIN, "directory": "relative"}, "directory"),
        ({**PLAIN, "weight": 2}, "weight"),
    ],
)
def test_a_wrong_field_of_an_agent_is_named_by_its_place(agent: dict[str, Any], place: str) -> None:
    with pytest.raises(ValidationError) as caught:
        RunConfig.model_validate(document(PLAIN, agent))
    assert [one["loc"] for one in caught.value.errors()] == [("agents", 1, place)]
