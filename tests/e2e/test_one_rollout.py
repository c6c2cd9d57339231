"""One task travels to new weights: every row that the services write on its way, in the order of the hand-offs.

Read this page first. The agent (`tests/agents/witness.py`) asks the model twice, sends two spans and one reward, and
prints its outcome. The model is a random Llama of 100,000 parameters.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pytest
from psycopg.rows import dict_row
from rich.console import Console

from leyden.libs.cli.local.platform import Platform
from leyden.libs.cli.view.watch import watch_run
from leyden.libs.client import Client
from tests.support.shared import open_to_agents

AGENT = Path(__file__).parents[1] / "agents" / "witness.py"

Row = dict[str, Any]


def run_document(log: Path) -> dict[str, object]:
    """One step over one group of eight rollouts, and a measurement of the weights before and after it."""
    log.touch()
    return {
        "name": "one-rollout",
        "dataset": "bandit",
        "agent": {
            "command": [sys.executable, "-I", "-S", str(AGENT)],
            "environment": {"WITNESS_LOG": str(open_to_agents(log))},
        },
        "runner": {"grant_reward": True},
        # By chance all eight answers may earn the same.
        "sampling": {"group_size": 8, "groups_per_step": 1, "refill_zero_variance": 10},
        "optimizer": {"learning_rate": 0.001},
        "training": {"steps": 1},
        "evaluation": {"dataset": "bandit", "max_tasks": 1},
    }


@dataclass
class Store:
    """Reads rows of the platform's database."""

    dsn: str

    def rows(self, statement: str, *values: object) -> list[Row]:
        with psycopg.connect(self.dsn, row_factory=dict_row) as connection:
            return connection.execute(statement.encode(), values).fetchall()

    def row(self, statement: str, *values: object) -> Row:
        [found] = self.rows(statement, *values)
        return found


@pytest.mark.timeout(600)
def test_a_task_travels_to_new_weights(platform: Platform, client: Client, tmp_path: Path) -> None:
    created = client.create_run(run_document(tmp_path / "witness.log"))
    run = watch_run(client, created.id, Console(quiet=True))
    assert (run.phase, run.reason) == ("completed", None)
    store = Store(platform.facts.database_url)

    # The trainer recorded one step, which consumed one group. The others were stale, or had no variance.
    step = store.row("SELECT * FROM steps WHERE run_id = %s", run.id)
    assert step["number"] == 1
    trained = store.row("SELECT * FROM step_groups WHERE run_id = %s AND verdict = 'trained'", run.id)
    assert trained["step"] == 1

    # The controller admitted the group: siblings of one task, at the version that the engine served.
    group = store.row("SELECT * FROM groups WHERE id = %s", trained["group_id"])
    assert (group["state"], group["size"], group["admitted_version"]) == ("complete", 8, 0)
    where = (group["dataset_id"], group["task_number"])
    task = store.row("SELECT * FROM tasks WHERE (dataset_id, number) = (%s, %s)", *where)
    assert task["payload"] == {"number": task["number"]}

    # Each sibling is a rollout. A runner leased the first one, ran the agent, and settled the attempt.
    rollout = store.row("SELECT * FROM rollouts WHERE group_id = %s AND sibling = 0", group["id"])
    assert (rollout["id"], rollout["state"], rollout["attempt"]) == (f"{group['id']}.0", "finished", 1)
    attempt = store.row("SELECT * FROM attempts WHERE rollout_id = %s", rollout["id"])
    assert (attempt["number"], attempt["state"]) == (1, "settled")

    # The gateway recorded both calls before the agent had their answers. The second call's row holds what it adds.
    first, second = store.rows("SELECT * FROM model_calls WHERE rollout_id = %s ORDER BY sequence", rollout["id"])
    assert [call["status"] for call in (first, second)] == ["completed", "completed"]
    assert [turn["content"] for turn in first["turns"]] == ["heads?"]
    assert (second["parent_call_id"], second["shared_turns"] >= 1) == (first["id"], True)
    assert (first["answer"]["role"], second["turns"][-1]["content"]) == ("assistant", "again?")
    # Tokens, their log-probabilities and the version that sampled each of them, as the engine gave them.
    for call in (first, second):
        counts = [len(call[name]) // 4 for name in ("sampled_ids", "generator_logprobs", "policy_versions")]
        assert counts == [call["completion_tokens"]] * 3
        assert set(np.frombuffer(call["policy_versions"], "<i4")) == {0}

    # The collector stored the agent's spans and its reward.
    spans = store.rows("SELECT * FROM spans WHERE rollout_id = %s ORDER BY name", rollout["id"])
    assert [(span["name"], span["kind"]) for span in spans] == [("leap", "tool"), ("look", "tool")]
    reward = store.row("SELECT * FROM rewards WHERE rollout_id = %s", rollout["id"])
    assert (reward["key"], reward["value"]) == ("kindness", 0.0)

    # The runner read the outcome from the agent's last line, and the controller finished the rollout with it.
    outcome = store.row("SELECT * FROM outcomes WHERE rollout_id = %s", rollout["id"])
    assert (outcome["kind"], outcome["reward"]) == ("succeeded", rollout["reward"])

    # Credit is the call's return less the siblings' mean; a sample is a path of calls with the advantages by token.
    credited = store.rows("SELECT * FROM credits WHERE rollout_id = %s", rollout["id"])
    assert {credit["call_id"] for credit in credited} == {first["id"], second["id"]}
    assert all(credit["advantage"] == credit["return"] - credit["baseline"] for credit in credited)
    samples = store.rows("SELECT * FROM samples WHERE rollout_id = %s", rollout["id"])
    assert sum(sample["trained_tokens"] for sample in samples) == sum(c["completion_tokens"] for c in (first, second))
    consumed = store.rows("SELECT sample_id FROM step_samples WHERE run_id = %s AND step = 1", run.id)
    assert {sample["id"] for sample in samples} <= {row["sample_id"] for row in consumed}

    # The step made policy version 1, and the engine serves it: the second evaluation ran on it.
    versions = store.rows("SELECT version, path FROM policy_versions WHERE run_id = %s ORDER BY version", run.id)
    assert [row["version"] for row in versions] == [0, 1]
    assert (Path(versions[1]["path"]) / "config.json").is_file()
    engine = store.row("SELECT * FROM engines")
    assert (engine["run_id"], engine["policy_version"], engine["state"]) == (run.id, 1, "serving")
    assert [evaluation.measured_version for evaluation in client.evaluations(run.id)] == [0, 1]
