"""One run trains two agents: a command that speaks chat completions, and a client that speaks Responses."""

from __future__ import annotations

import threading
from pathlib import Path

import psycopg
import pytest
from openai import OpenAI

from leyden.libs.cli.local.platform import Platform
from leyden.libs.client import Attempt, Client
from tests.campaigns.soak import bandit_run
from tests.invariants import violations
from tests.support.chaos import ENDED
from tests.support.waiting import until

STEPS = 3
PLAYED = """
    SELECT DISTINCT g.agent, split_part(a.owner, '/', 1) = 'notebook', c.dialect
    FROM groups g JOIN rollouts r ON r.group_id = g.id JOIN attempts a ON a.rollout_id = r.id
    JOIN model_calls c ON c.run_id = r.run_id AND c.rollout_id = r.id WHERE g.run_id = %s
"""
GROUPS = "SELECT number, agent FROM groups WHERE run_id = %s AND evaluation_id IS NULL ORDER BY number"
TASKS = "SELECT evaluation_id, task_number, agent FROM groups WHERE run_id = %s AND evaluation_id IS NOT NULL"


def respond(attempt: Attempt) -> float:
    """The bandit's agent, written with another client: an odd first character earns 1."""
    with OpenAI(base_url=attempt.base_url, api_key=attempt.api_key) as openai:
        answer = openai.responses.create(model="any", input="tails?", max_output_tokens=16, temperature=1.0)
    return float(ord((answer.output_text or "\0")[0]) % 2 == 1)


@pytest.mark.timeout(900)
def test_a_command_and_a_client_train_one_model_in_one_run(platform: Platform, client: Client, received: Path) -> None:
    evaluation = {"dataset": "bandit", "max_tasks": 2}
    document = bandit_run(received, "pair", STEPS, evaluation=evaluation, sampling={"group_size": 4})
    command = {"name": "command", **document.pop("agent")}
    served = {"name": "served", "runner": {"type": "external", "timeout_seconds": 120}}
    created = client.create_run({**document, "agents": [command, served]})

    worker = threading.Thread(
        target=lambda: client.work(created.id, respond, agent_name="served", at_once=4, worker="notebook"), daemon=True
    )
    worker.start()
    run = until(lambda: (run := client.run(created.id)).phase in ENDED and run, "the end of the run", 840)
    worker.join(60)

    assert (run.phase, run.reason, worker.is_alive()) == ("completed", None, False)
    with psycopg.connect(platform.facts.database_url) as connection:
        played = connection.execute(PLAYED, [run.id]).fetchall()
        groups = connection.execute(GROUPS, [run.id]).fetchall()
        tasks = connection.execute(TASKS, [run.id]).fetchall()
    assert sorted(played) == [("command", False, "chat_completions"), ("served", True, "responses")]
    assert [agent for _, agent in groups] == [("command", "served")[number % 2] for number, _ in groups]
    names = {"command", "served"}
    asked = {(one.id, task, name) for one in client.evaluations(run.id) for task in (0, 1) for name in names}
    assert set(tasks) == asked and len(tasks) == len(asked)
    # Both train; a step takes the groups that are ready first, whoever played them.
    for one in run.agents.values():
        assert one.step is not None and one.rollouts % 4 == 0 and one.reward_mean is not None
    assert run.agents.keys() == names
    for measured in client.evaluations(run.id):
        assert measured.results.agents.keys() == names and measured.results.complete
    found = client.metrics(run.id, [f"agent.{name}.reward_mean" for name in sorted(names)])
    steps = [{step for step, _, _ in series.points} for series in found.series]
    assert all(steps) and set().union(*steps) == set(range(1, STEPS + 1))
    assert violations(platform.facts.database_url, run.id) == {}
