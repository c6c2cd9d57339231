"""The report is one page that needs nothing else, whatever the agents said."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from leyden.libs.cli.commands.demo import DemoOptions, check_rise, run_document
from leyden.libs.cli.errors import CommandError
from leyden.libs.cli.view.comparison import held_out_reward
from leyden.libs.cli.view.report import Trajectory, answer_text, embedding_facts, last_question, render_report
from leyden.libs.contracts.api.rollouts import Call, CallCredit, RolloutDetail, Span
from leyden.libs.contracts.api.runs import (
    Evaluation,
    EvaluationResults,
    Fact,
    PassAt,
    Progress,
    Run,
    RunPolicy,
    Statistic,
    Step,
    StepComponent,
)
from leyden.libs.contracts.call_counts import CallCounts
from leyden.libs.contracts.conversation import Dialect, ToolCall, Turn

NOW = datetime(2026, 1, 2, tzinfo=UTC)
HOSTILE = "<script>alert('x')</script>"


def run() -> Run:
    progress = Progress(step=2, steps=2, policy_version=2, rollouts={"finished": 8}, reward_mean=0.5)
    return Run(
        id="run-a", name=HOSTILE, dataset_id="d", intent="running", phase="completed", reason=None, created_at=NOW,
        started_at=NOW, finished_at=NOW, progress=progress, allowed_actions=[], config=run_document(DemoOptions()),
    )  # fmt: skip


def step(number: int, reward: float | None, **facts: float) -> Step:
    return Step(
        number=number, metrics={"step_seconds": 1.5, "trained_tokens": 10.0}, groups={"trained": 3, "no_variance": 1},
        rollouts=8, reward_mean=reward, reward_std=0.1, facts=facts, started_at=NOW, created_at=NOW,
    )  # fmt: skip


def evaluation(version: int, share: float) -> Evaluation:
    statistic = Statistic(count=100, tasks=100, mean=share, low=share - 0.1, high=share + 0.1)
    facts = [
        Fact(name="success", kind="share", statistic=statistic, total=100),
        Fact(name="first_tool", kind="text", counts={"memory": 75, "search": 25}, total=125),
    ]
    results = EvaluationResults(
        rollouts={"finished": 100}, complete=True, reward=statistic, counted_tasks=100, facts=facts
    )
    return Evaluation(
        id=f"run-a.e{version}", run_id="run-a", number=version, dataset_id="d", policy_version=version,
        measured_version=version, rollouts_per_task=1, max_tasks=None, tasks=100, created_at=NOW, results=results,
    )  # fmt: skip


def trajectory() -> Trajectory:
    rollout: dict[str, Any] = {
        "id": "run-a.0.0", "run_id": "run-a", "group_id": "run-a.0", "evaluation_id": None, "sibling": 0,
        "dataset_id": "d", "task_number": 0, "admitted_version": 0, "step": 1, "state": "finished", "attempt": 1,
        "reward": 1.0, "reason": "succeeded", "created_at": NOW, "finished_at": NOW, "task": {"question": HOSTILE},
        "attempts": [], "rewards": [],
    }  # fmt: skip
    credit = CallCredit(
        parent_call_id=None, depth=0, state_key="", tools={}, intermediate_reward=0.3, return_=1.25, baseline=1.0,
        advantage=0.25,
    )  # fmt: skip
    call = Call(
        id="c1", rollout_id="run-a.0.0", attempt=1, request_id="c1", choice=0, status="completed", trainable=True,
        untrainable_reason=None, request={}, dialect=Dialect.CHAT_COMPLETIONS,
        turns=(Turn("user", "Where to?"),), tools=(),
        answer=Turn("assistant", HOSTILE), prompt_tokens=3, completion_tokens=2, cached_tokens=0, sampled_ids=[1, 2],
        logprobs=[-0.5, -0.25], policy_versions=[0, 0], temperature=0.8, finish_reason="stop", queued_seconds=0.0,
        first_token_seconds=None, total_seconds=0.1, created_at=NOW, credit=credit,
    )  # fmt: skip
    span = Span(
        attempt=1, trace_id="t", span_id="s", parent_span_id=None, name="execute_tool memory", kind="tool",
        tool="memory", status="ok", error_type=None, tool_call_id=None, response_id="chatcmpl-c1", start_ns=1,
        end_ns=2, scope=None, attributes={"gen_ai.tool.call.result": "Lyon"},
    )  # fmt: skip
    return Trajectory("After", RolloutDetail(**rollout), [call], [span])


def page() -> str:
    steps = [step(1, 0.1, success=0.2), step(2, 0.9, success=0.8)]
    return render_report(run(), steps, [evaluation(0, 0.1), evaluation(2, 0.8)], [trajectory()])


def test_the_page_fetches_nothing_and_runs_nothing() -> None:
    assert re.findall(r"(?:src|href)=|url\(|<script", page()) == []


def test_an_embedding_is_shown_with_its_facts_and_its_first_text() -> None:
    facts = {
        "leyden.embeddings.inputs": 2,
        "leyden.embeddings.texts": [HOSTILE, "b"],
        "gen_ai.embeddings.dimension.count": 256,
        "gen_ai.request.model": "asked",
        "gen_ai.response.model": "small",
    }
    made = trajectory()
    embedded = made.spans[0].model_copy(
        update={"tool": "embeddings", "scope": "leyden.gateway", "response_id": None, "attributes": facts}
    )
    assert embedding_facts(embedded) == f'2 inputs, 256 dimensions, small: "{HOSTILE}"'
    bare = {"leyden.embeddings.inputs": 1, "leyden.embeddings.texts": ["c" * 81]}
    assert embedding_facts(embedded.model_copy(update={"attributes": bare})) == f'1 input: "{"c" * 80}…"'
    assert embedding_facts(made.spans[0]) == ""
    shown = render_report(run(), [], [], [replace(made, spans=[*made.spans, embedded])])
    assert "embeddings: ok 2 inputs, 256 dimensions, small" in shown
    assert HOSTILE not in shown


def test_the_page_has_the_progress_of_further_policies() -> None:
    policy = RunPolicy(id="run-b", trains=True, step=2, steps=3, policy_version=2)
    shown = render_report(run().model_copy(update={"policies": {HOSTILE: policy}}), [], [], [])
    assert ": step 2 of 3, version 2</p>" in shown
    assert HOSTILE not in shown


def test_components_have_curves_and_failures() -> None:
    graded = {
        "answer": StepComponent(mean=0.25, failed_share=0.0),
        "judge": StepComponent(mean=None, failed_share=0.125),
    }
    shown = render_report(run(), [step(1, 0.1).model_copy(update={"components": graded})], [], [])
    assert "Components of the reward" in shown
    assert ">answer</text>" in shown
    assert "<td>judge</td><td>12.5% in step 1</td>" in shown
    assert "Components of the reward" not in page()


def test_tools_have_curves_of_their_failures() -> None:
    counts = CallCounts(calls=5, tools={"sql": {"ok": 1, "error": 3, "unset": 2}, "search": {"unset": 4}})
    shown = render_report(run(), [step(1, 0.1).model_copy(update={"calls": counts})], [], [])
    section = shown.split("<h2>Failed tool calls</h2>")[1].split("<h2>")[0]
    assert ">sql</text>" in section
    assert "search" not in section
    assert "Failed tool calls" not in page()


def test_a_policy_forbids_the_page_to_run_or_to_fetch() -> None:
    assert "http-equiv='Content-Security-Policy' content=\"default-src 'none'; style-src 'unsafe-inline'" in page()


def test_every_tool_is_shown_and_no_character_controls_the_page() -> None:
    shown = trajectory()
    [call], [span] = shown.calls, shown.spans
    uses = [{"tool": tool, "status": "ok", "source": "result"} for tool in ("memory", "calculator")]
    credit = call.credit.model_copy(update={"tools": {"calls": uses}}) if call.credit else None
    hostile = Turn("assistant", "a\x1b[2Jb\u202ec\nd")
    silent = span.model_copy(update={"response_id": None, "tool": "search\u2066", "span_id": "s2"})
    changed = call.model_copy(update={"credit": credit, "answer": hostile})
    text = render_report(run(), [], [], [Trajectory("After", shown.rollout, [changed], [span, silent])])
    assert "a\\x1b[2Jb\\u202ec\nd" in text
    assert "calculator: ok (result)" in text
    assert "memory: ok (result)" not in text
    assert "search\\u2066: ok" in text
    assert not set(text) & set("\x1b\u202e\u2066")


def test_counts_intervals_and_credit_are_shown() -> None:
    text = page()
    for expected in (
        "10 of 100: 10.0% [0.0%, 20.0%]",
        "80 of 100: 80.0% [70.0%, 90.0%]",
        "memory 75 (60%), search 25 (20%), others 25 (20%)",
        "intermediate reward +0.30 · return +1.25 · advantage +0.25",
        "memory: ok Lyon",
        "1 of 4",
    ):
        assert expected in text


def test_the_chances_of_several_rollouts_of_a_task_are_shown_with_the_tasks_that_they_count() -> None:
    chances = [PassAt(k=2, mean=0.5, tasks=100), PassAt(k=4, mean=0.75, tasks=70)]
    text = render_report(run(), [], [partial(2, 0.8, pass_at=chances)], [])
    assert "<td>pass@2</td><td>0.500</td>" in text
    assert "<td>pass@4</td><td>0.750 (70 tasks)</td>" in text


def test_what_a_call_was_asked_is_its_last_message_or_why_there_is_none() -> None:
    [call] = trajectory().calls
    reason = "call c1 has the parent c0, which is not in the store"
    lost = call.model_copy(update={"turns": None, "missing_parent": reason})
    nothing = call.model_copy(update={"turns": ()})
    assert [last_question(one) for one in (call, lost, nothing)] == ["Where to?", reason, ""]


def test_an_answer_is_shown_with_its_tool_calls() -> None:
    [call] = trajectory().calls
    answers = [Turn("assistant", "Let me see.", tool_calls=(ToolCall("1", "search", '{"x": 1}'),)), None]
    shown = [answer_text(call.model_copy(update={"answer": answer})) for answer in answers]
    assert shown == ['Let me see.\nsearch({"x": 1})', "(nothing)"]


def test_the_headline_names_the_model_and_goes_from_the_first_to_the_last_reward() -> None:
    steps = [step(3, 0.9), step(1, 0.1), step(2, None)]
    held_out = [(0, 0.3), (1, 0.2), (2, 0.8)]
    # Evaluations may have counted different tasks: the headline has the means on those that all of them counted.
    evaluations = [evaluation(0, 0.1), partial(2, 0.9, rollouts={"finished": 70, "excluded": 30})]
    for means, change in (
        (held_out, "held-out reward 0.300 → 0.800 (version 0 → 2)"),
        (held_out[:1], "training reward 0.100 → 0.900 (step 1 → 3)"),
    ):
        text = render_report(run(), steps, evaluations, [], held_out=means, model="/models/tiny")
        assert f"<p class='headline'>tiny: {change}</p>" in text
    alone = render_report(run(), [], evaluations[:1], [], held_out=held_out[:1], model="/models/tiny")
    assert "tiny: held-out reward 0.300 (version 0)" in alone
    assert "the platform&#x27;s model: no reward yet" in render_report(run(), [], [], [])


def partial(version: int, share: float, *, dataset: str = "d", **results: Any) -> Evaluation:
    whole = evaluation(version, share)
    changed = whole.results.model_copy(update=results)
    return whole.model_copy(update={"dataset_id": dataset, "results": changed})


def test_a_part_of_an_evaluation_is_shown_as_a_part() -> None:
    begun = partial(3, 0.9, complete=False, rollouts={"finished": 100, "queued": 300})
    lossy = partial(2, 0.8, rollouts={"finished": 100, "excluded": 25})
    text = render_report(run(), [], [evaluation(0, 0.1), lossy, begun], [])
    assert "version 0 (100 rollouts)" in text
    assert "version 2 (100 of 125 rollouts)" in text
    assert "version 3 (100 of 400 rollouts so far)" in text


def test_the_held_out_reward_of_a_run_is_that_of_its_newest_whole_evaluation() -> None:
    begun = partial(3, 0.9, complete=False, rollouts={"finished": 100, "queued": 300})
    elsewhere, again = partial(4, 1.0, dataset="other"), evaluation(0, 0.2).model_copy(update={"number": 9})
    assert held_out_reward([evaluation(0, 0.1), evaluation(2, 0.8), begun, elsewhere, again]) == "0.800 [0.700, 0.900]"
    few = evaluation(2, 0.0).model_copy(update={"number": 10, "tasks": 5, "max_tasks": 5})
    assert held_out_reward([evaluation(0, 0.1), evaluation(2, 0.8), few]) == "0.800 [0.700, 0.900]"
    lost = partial(3, 1.0, counted_tasks=49)
    assert held_out_reward([evaluation(2, 0.8), lost]) == "0.800 [0.700, 0.900]"
    lossy = partial(2, 0.8, rollouts={"finished": 100, "excluded": 25})
    assert held_out_reward([lossy]) == "0.800 [0.700, 0.900] (100 of 125 rollouts)"
    assert held_out_reward([begun]) is None and held_out_reward([]) is None


def test_the_axis_of_rewards_without_a_negative_one_begins_at_0() -> None:
    def lowest(*means: float) -> str:
        steps = [step(number, mean) for number, mean in enumerate(means, 1)]
        [label] = re.findall(r"dy='4'>([^<]+)<", render_report(run(), steps, [], []))[:1]
        return label

    assert (lowest(0.5, 0.9), lowest(0.05, 0.9), lowest(-0.5, 0.9)) == ("0.00", "0.00", "-0.60")


def test_a_run_without_steps_is_a_page_too() -> None:
    assert "Nothing yet." in render_report(run(), [], [], [])


def test_reward_that_does_not_rise_is_an_error() -> None:
    check_rise([step(1, 0.1), step(2, 0.2)])
    for means in ([0.2, 0.2], [0.3, 0.1], [0.5], [None, 0.5]):
        try:
            check_rise([step(number, mean) for number, mean in enumerate(means, 1)])
        except CommandError:
            continue
        raise AssertionError(means)
