"""A trial names everything that would keep its rollout from training."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from leyden.libs.cli.trial import is_cured_by_override, problems_of, replaced_by, trial_document
from leyden.libs.contracts.api.rollouts import Attempt, Call, Outcome, RewardComponent, RolloutDetail

NOW = datetime(2026, 1, 2, tzinfo=UTC)


def rollout(kind: str | None = "succeeded", reason: str | None = "succeeded", **outcome: Any) -> RolloutDetail:
    values = {"kind": kind, "reward": 1.0, "facts": {}, "exit_code": 0, "detail": None, "created_at": NOW, **outcome}
    ended = Outcome.model_validate({"stdout_tail": "", "stderr_tail": "", **values}) if kind else None
    attempt = Attempt(
        number=1, state="settled", owner="o", lease_expires_at=NOW, created_at=NOW, started_at=NOW, finished_at=NOW,
        outcome=ended,
    )  # fmt: skip
    return RolloutDetail(
        id="r", run_id="run-a", group_id="g", evaluation_id="e", sibling=0, dataset_id="d", task_number=0, step=None,
        admitted_version=0, state="finished", attempt=1, reward=1.0, reason=reason, created_at=NOW, finished_at=NOW,
        task={}, attempts=[attempt], rewards=[],
    )  # fmt: skip


def call(reason: str | None = None, status: str = "completed", finish_reason: str | None = None) -> Call:
    return Call.model_construct(status=status, untrainable_reason=reason, temperature=0.0, finish_reason=finish_reason)


DROPS = (
    "let the agent leave out these parameters; a temperature must be above 0, best 1"
    " (or write `sampling.override`: training then samples without them)"
)


def test_a_good_rollout_has_no_problem() -> None:
    assert list(problems_of(rollout(), [call()])) == []


def test_failures_silence_and_greedy_calls_are_problems() -> None:
    greedy, broken = call("sampled with temperature"), call(status="failed")
    [failed] = problems_of(rollout("agent_error", exit_code=3, detail="exit status 3"), [call()])
    assert failed == "the agent ended as agent_error: exit status 3"
    [crashed] = problems_of(
        rollout("agent_error", detail="exit status 1", stderr_tail="at a.py\nKeyError: 'x'\n\n"), [call()]
    )
    assert crashed == "the agent ended as agent_error: exit status 1; the last line of its stderr: KeyError: 'x'"
    [no_reward, no_call] = problems_of(rollout(reason="no_reward", reward=None), [])
    assert ("no reward" in no_reward, "OPENAI_BASE_URL" in no_call) == (True, True)
    assert list(problems_of(rollout(), [greedy, call(), greedy, broken])) == [
        f"2 of 4 model calls cannot be trained: sampled with temperature 0; {DROPS}",
        "1 of 4 model calls did not complete: failed",
    ]


@pytest.mark.parametrize(
    ("reasons", "document", "is_cured"),
    [
        (["sampled with temperature"], {}, True),
        ([None, "sampled with top_p, top_k"], {}, True),
        (["sampled with temperature, json_schema"], {}, False),
        (["sampled with temperature"], {"sampling": {"override": {"temperature": 1}}}, False),
        ([None, "it has no tokens"], {}, False),
    ],
)
def test_an_override_is_named_where_it_cures(
    reasons: list[str | None], document: dict[str, Any], is_cured: bool
) -> None:
    assert is_cured_by_override(list(map(call, reasons)), replaced_by(document)) == is_cured


def test_calls_beyond_the_context_are_a_problem_with_a_remedy() -> None:
    [problem] = problems_of(rollout(), [call(), call("too long", "refused", "context_length_exceeded")])
    assert problem.startswith("1 of 2 model calls were refused: their messages exceed the model's context; let the")


def test_parameters_that_the_run_overrides_are_no_problem() -> None:
    calls = [call("sampled with temperature, top_p"), call("sampled with temperature, json_schema")]
    replaced = replaced_by({"sampling": {"override": {"temperature": 1}}})
    assert replaced_by({}) == replaced_by({"sampling": {"override": "keep"}}) == ()
    assert list(problems_of(rollout(), calls, replaced)) == [
        "1 of 2 model calls cannot be trained: sampled with json_schema;"
        " write training.constrained_calls 'mask' or 'train'"
    ]


def test_a_component_without_a_value_is_a_problem() -> None:
    values = {"attempt": 1, "revision": 1, "weight": 1.0, "extracted": None, "source": "token_f1"}
    missing = {"component": "answer", "state": "not_applicable", "value": None, "explanation": "task.answer is missing"}
    scored = {"component": "format", "state": "scored", "value": 0.0, "explanation": "not found"}
    components = [
        RewardComponent.model_validate({**values, **one, "duration_seconds": 0.1, "created_at": NOW})
        for one in (missing, scored)
    ]
    assert list(problems_of(rollout().model_copy(update={"components": components}), [call()])) == [
        "component answer of its reward is not_applicable: task.answer is missing"
    ]


def test_a_failure_of_the_platform_is_the_only_problem() -> None:
    assert list(problems_of(rollout("infra_error", detail="no disk"), [])) == [
        "the platform, not the agent, failed: no disk"
    ]
    assert list(problems_of(rollout(None, reason="lease_lost"), [])) == [
        "the platform, not the agent, failed: lease_lost"
    ]


def test_a_trial_has_no_step_and_one_task_and_leaves_wrong_sections_to_the_api() -> None:
    trial = trial_document({"name": "mine", "dataset": "d", "training": {"steps": 5, "precision": "bfloat16"}})
    assert trial == {
        "name": "trial of mine",
        "dataset": "d",
        "training": {"steps": 0, "precision": "bfloat16"},
        "sampling": {"max_attempts": 1},
        "evaluation": {"dataset": "d", "max_tasks": 1, "at_end": False},
    }
    assert trial_document({"training": [1]})["training"] == [1]
