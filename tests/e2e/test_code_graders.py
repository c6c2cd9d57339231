"""An agent that prints no reward learns from a program of the operator's, whose service is killed while it runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
from rich.console import Console

from leyden.libs.cli.local import managed_service
from leyden.libs.cli.local.platform import Platform
from leyden.libs.cli.trial import try_agents
from leyden.libs.cli.view.watch import watch_run
from leyden.libs.client import Client
from leyden.libs.contracts.config import Reward
from tests.campaigns.soak import QUICK, bandit_run, kill, small_platform
from tests.invariants import violations
from tests.support.long import long_only
from tests.support.shared import open_to_agents
from tests.support.waiting import until

STEPS = 26
KILLS = 2
# The first ones never end by themselves, so that somebody can kill their service meanwhile.
SCORE = f"""
import json, os, sys, time
graded = json.load(sys.stdin)
task, rollout = graded["task"], graded["rollout"]
with open(sys.argv[1], "a") as log:
    log.write(f"{{os.getpid()}}\\n")
if len(open(sys.argv[1]).readlines()) <= {KILLS}:
    time.sleep(600)
print("a line that is no reward")
asked, said = rollout["conversations"][0]["turns"]
found = rollout["answer"]["answer"]
with open("reward.json", "w") as verdict:
    told = {{"extracted": found, "explanation": asked["content"]}}
    json.dump({{"reward": float(found == task["answer"]), **told}}, verdict)
"""
FUNCTION = """
def length(task, rollout):
    return len(rollout["output"])
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "graders" / "mine"
    made.mkdir(parents=True)
    (made / "score.py").write_text(SCORE)
    (made / "grade.py").write_text(FUNCTION)
    return made


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """The process ids of programs, in the order of their starts."""
    return open_to_agents(tmp_path / "begun.log")


@pytest.fixture
def platform(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Platform]:
    monkeypatch.setattr(managed_service, "MAX_BACKOFF_SECONDS", 0.5)
    roots = json.dumps([str(folder.parent)])
    with small_platform(tmp_path, GRADER_CODE_ROOTS=roots, GRADER_LEASE_SECONDS="2") as running:
        yield running


def graded_run(log: Path, begun: Path, folder: Path) -> dict[str, Any]:
    command = ["{python}", "-I", "-S", "score.py", str(begun)]
    components = [
        {"name": "right", "grader": {"type": "command", "command": command, "directory": str(folder)}},
        {
            "name": "characters",
            "weight": 0.0,
            "grader": {"type": "python", "function": "grade.py:length", "directory": str(folder)},
        },
    ]
    evaluation = {"dataset": "graded", "rollouts_per_task": 1}
    document = bandit_run(log, "coded", STEPS, evaluation=evaluation, reward={"components": components[:1]}, **QUICK)
    document["dataset"] = "graded"
    document["agent"]["environment"]["BANDIT_SILENT"] = "1"
    return document | {"both": components}


def pids(begun: Path) -> list[int]:
    return [int(line) for line in begun.read_text().split()]


@long_only
@pytest.mark.timeout(900)
def test_an_agent_learns_from_a_program_whose_service_is_killed_while_it_runs(
    platform: Platform, client: Client, received: Path, begun: Path, folder: Path
) -> None:
    client.upload_dataset("graded", [{"number": number, "answer": "odd"} for number in range(16)])
    document = graded_run(received, begun, folder)
    both = document.pop("both")
    created = client.create_run(document)
    for number in range(KILLS):
        running = until(lambda: pids(begun)[number:], f"program {number + 1} begins")  # noqa: B023
        kill(platform, "grader", created.id)
        until(lambda: not any(map(psutil.pid_exists, running)), "its program ends with it")  # noqa: B023
    run = watch_run(client, created.id, Console(quiet=True))
    assert (run.phase, run.reason) == ("completed", None)

    first, last = sorted(client.evaluations(run.id), key=lambda one: one.number)
    assert first.results.reward is not None and last.results.reward is not None
    assert first.results.reward.mean < 0.9 < last.results.reward.mean

    # A killed service repeats its programs and doubles nothing: no rollout is lost, and none is a 0 for a failure.
    assert violations(platform.facts.database_url, run.id) == {}
    with psycopg.connect(platform.facts.database_url) as connection:
        stored = connection.execute(
            "SELECT state, extracted, value, explanation, count(*), count(DISTINCT rollout_id) FROM rollout_rewards"
            " WHERE run_id = %s GROUP BY 1, 2, 3, 4 ORDER BY 3",
            [run.id],
        ).fetchall()
        tries = connection.execute("SELECT max(tries) FROM gradings WHERE run_id = %s", [run.id]).fetchone()
    assert [row[:4] for row in stored] == [("scored", "even", 0.0, "heads?"), ("scored", "odd", 1.0, "heads?")]
    assert all(rows == rollouts for *_, rows, rollouts in stored)
    assert tries is not None and 2 <= tries[0] <= KILLS + 1
    assert not any(map(psutil.pid_exists, pids(begun)))

    # A trial grades with both.
    [trial] = try_agents(client, {**document, "reward": {"components": both}})
    assert trial.problems == []
    right, characters = trial.rollout.components
    assert (right.state, right.extracted) == ("scored", "odd" if right.value else "even")
    assert characters.value == len(json.dumps({"answer": right.extracted}))

    # `leyden reward test` gives the same, and stores nothing.
    graded = client.grade(trial.rollout.id, Reward.model_validate({"components": both}))
    assert (graded.total, graded.reason) == (right.value, None)
    assert [(one.value, one.extracted) for one in graded.components] == [
        (one.value, one.extracted) for one in trial.rollout.components
    ]
