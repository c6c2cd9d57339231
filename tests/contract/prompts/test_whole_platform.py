"""`leyden prompts optimise` on a whole platform: a provider's model answers the agent, and no run trains it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from leyden.libs.cli.local.platform import Platform
from leyden.libs.client import Client
from tests.campaigns.soak import small_platform
from tests.fakes.judge import Said, ScriptedJudge, judge_beside
from tests.fakes.rewriter import TASKS, document, optimising, rewritten
from tests.support.long import long_only
from tests.support.waiting import until


@pytest.fixture
def rewriter() -> Iterator[ScriptedJudge]:
    with judge_beside() as scripted:
        scripted.answer = answered
        yield scripted


def answered(body: dict[str, Any], number: int) -> Said:
    """The model of the agent, which no run trains, and the rewriter: one server."""
    if body["model"] == "rewriter":
        return rewritten(body, number)
    system, question = (message["content"] for message in body["messages"])
    return Said(question.upper() if "capital letters" in system else question)


@pytest.fixture
def platform(tmp_path: Path, rewriter: ScriptedJudge) -> Iterator[Platform]:
    providers = json.dumps({"elsewhere": {"url": rewriter.url}})
    with small_platform(tmp_path, GATEWAY_PROVIDERS=providers) as running:
        yield running


@long_only
@pytest.mark.timeout(900)
def test_a_provider_s_model_gets_a_better_prompt_on_a_whole_platform(
    platform: Platform, rewriter: ScriptedJudge, tmp_path: Path
) -> None:
    of_provider = {
        "roles": [{"name": "writer", "policy": "elsewhere"}],
        "policies": {"elsewhere": {"provider": "elsewhere", "provider_model": "large"}},
    }
    (tmp_path / "run.json").write_text(json.dumps(document() | of_provider))
    url = platform.facts.url("api")
    with Client(url, platform.token) as leyden:
        leyden.upload_dataset("words", TASKS)
        with optimising(url, platform.token, rewriter, tmp_path) as process:
            said, _ = process.communicate(timeout=600)
        assert process.returncode == 0
        assert json.loads(said)["score"] == 1.0
        for run in leyden.runs():
            until(lambda run_id=run.id: leyden.run(run_id).phase == "completed", "the run completes")
            for rollout in leyden.rollouts(run=run.id):
                [call] = leyden.calls(rollout.id)
                assert call.answer is not None and call.status == "completed"
