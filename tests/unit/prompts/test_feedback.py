"""The reflection model reads the task, the conversation and every reason of a reward."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from leyden.libs.contracts.api.rollouts import Attempt, Call, Outcome, Reward, RewardComponent, RolloutDetail
from leyden.libs.contracts.conversation import ToolCall, Turn
from leyden.libs.prompts.feedback import CONVERSATION_LETTERS, description

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def rollout(**columns: Any) -> RolloutDetail:
    outcome = Outcome(
        kind="timeout",
        reward=None,
        facts={},
        exit_code=None,
        detail="60 s are over",
        stdout_tail="thinking\n",
        stderr_tail="Traceback",
        created_at=NOW,
    )
    times = dict.fromkeys(("lease_expires_at", "created_at", "started_at", "finished_at"), NOW)
    attempts = [
        Attempt(number=number, state="settled", owner="", outcome=one, **times)
        for number, one in ((1, outcome.model_copy(update={"detail": "excused"})), (2, outcome))
    ]
    names = ("id", "run_id", "group_id", "dataset_id", "state")
    return RolloutDetail(
        **dict.fromkeys(names, "x"),
        evaluation_id=None,
        sibling=0,
        task_number=0,
        admitted_version=0,
        step=None,
        attempt=2,
        reward=0.25,
        reason="timeout",
        created_at=NOW,
        finished_at=NOW,
        task={"question": "2+2"},
        attempts=attempts,
        **{"rewards": [], **columns},
    )


def component(name: str, value: float | None, explanation: str, extracted: str | None = None) -> RewardComponent:
    return RewardComponent(
        component=name,
        state="scored" if value is not None else "failed",
        weight=1.0,
        value=value,
        extracted=extracted,
        explanation=explanation,
        source="regex",
        duration_seconds=0.0,
        attempt=2,
        revision=1,
        created_at=NOW,
    )


def call(number: int, turns: tuple[Turn, ...], answer: Turn) -> Call:
    return Call.model_construct(
        id=f"call-{number}",
        status="completed",
        delivered=True,
        turns=turns,
        tools=(),
        answer=answer,
        parent_call_id=None,
        shared_turns=0,
        shared_tokens=0,
        agent_name=None,
        role="writer",
        missing_parent=None,
        prompt_ids=None,
    )


def test_a_rollout_is_described_with_all_its_reasons() -> None:
    comment = Reward(key="k", attempt=2, source="external", name="taste", value=0.5, comment="too long", created_at=NOW)
    grades = [component("right", 0.0, "the reference is 4", "5"), component("judge", None, "no answer")]
    first = (Turn("system", "Be brief."), Turn("user", "2+2"))
    asked = Turn("assistant", "", tool_calls=(ToolCall("t", "add", '{"a": 2}'),))
    calls = [call(1, first, asked), call(2, (*first, asked, Turn("tool", "4")), Turn("assistant", "5"))]
    found = description(rollout(rewards=[comment], components=grades), calls, (0.25, 1.0))
    conversation = '[system] Be brief.\n\n[user] 2+2\n\n[assistant] \ncalls add({"a": 2})\n\n[tool] 4\n\n[assistant] 5'
    assert found == {
        "Inputs": {"question": "2+2"},
        "Generated Outputs": {"conversation 1 of writer": conversation, "output of the agent": "thinking"},
        "Feedback": (
            "Reward: 0.25\nRewards of 2 tries of this task, this one first: 0.25, 1\n"
            "right: 0, for the answer '5': the reference is 4\njudge: failed: no answer\ntaste: too long\n"
            "The agent ended as timeout: 60 s are over\nTraceback"
        ),
    }


def test_a_long_conversation_loses_its_middle() -> None:
    calls = [call(1, (Turn("user", "a" * 50_000),), Turn("assistant", "the end"))]
    [text, _] = description(rollout(), calls, (0.25,))["Generated Outputs"].values()
    assert text.startswith("[user] aaa") and text.endswith("[assistant] the end")
    assert "letters are left out]" in text and len(text) < CONVERSATION_LETTERS + 50
