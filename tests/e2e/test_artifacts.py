"""An agent asks the model and writes a Python function; the how-to's grader runs its tests on the stored file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from leyden.libs.cli.local.platform import Platform
from leyden.libs.cli.trial import try_agents
from leyden.libs.client import Client
from leyden.libs.contracts.config import Reward
from tests.campaigns.soak import QUICK, bandit_run, small_platform
from tests.invariants import violations
from tests.support.long import long_only

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to" / "rewards.md"
# As the how-to's, whose SDK takes seconds to import; a tiny model with random weights writes no Python.
AGENT = r"""
import json, os, sys, urllib.request
body = {"model": "policy", "messages": [{"role": "user", "content": sys.argv[1]}], "max_tokens": 4}
headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
request = urllib.request.Request(url, json.dumps(body).encode(), headers)
said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
os.mkdir("notes")
open("notes/answer.json", "w").write(json.dumps(said))
open("solution.py", "w").write("def add(a, b):\n    return a + abs(b)\n")
"""
TASK = {
    "text": "Write add(a, b).",
    "function": "add",
    "cases": [{"arguments": [1, 2], "result": 3}, {"arguments": [1, -2], "result": -1}],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "graders" / "functions"
    made.mkdir(parents=True)
    (made / "cases.py").write_text(re.findall(r"```python\n(.*?)```", HOW_TO.read_text(), re.DOTALL)[3])
    return made


@pytest.fixture
def platform(tmp_path: Path, folder: Path) -> Iterator[Platform]:
    with small_platform(tmp_path, GRADER_CODE_ROOTS=json.dumps([str(folder.parent)])) as running:
        yield running


@long_only
@pytest.mark.timeout(900)
def test_a_grader_tests_the_function_that_an_agent_wrote(
    platform: Platform, client: Client, received: Path, folder: Path
) -> None:
    client.upload_dataset("functions", [TASK])
    grader: dict[str, Any] = {"type": "command", "command": ["{python}", "cases.py"], "directory": str(folder)}
    reward = {"missing": "zero", "components": [{"name": "tests", "grader": grader}]}
    document = bandit_run(received, "files", 1, reward=reward, **QUICK)
    command = ["{python}", "-c", AGENT, "{task.text}"]
    document |= {"dataset": "functions", "agent": {"command": command, "artifacts": ["solution.py", "notes/**"]}}
    [trial] = try_agents(client, document)
    (tests,) = trial.rollout.components
    assert (tests.state, tests.value, tests.explanation) == ("scored", 0.5, "1 of 2 cases")
    outcome = trial.rollout.attempts[0].outcome
    assert outcome is not None and outcome.artifacts_left_out == 0
    assert [one.path for one in outcome.artifacts] == ["notes/answer.json", "solution.py"]
    said = json.loads(client.artifact(trial.rollout.id, "notes/answer.json"))
    assert isinstance(said, str) and len(trial.calls) == 1
    # A regrade has the same files.
    again = client.regrade(
        trial.rollout.id, Reward.model_validate({"components": [{"name": "again", "grader": grader}]})
    )
    assert (again.revision, again.total) == (2, 0.5)
    assert violations(platform.facts.database_url, trial.rollout.run_id) == {}
