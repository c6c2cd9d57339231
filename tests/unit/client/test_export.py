"""Conversations of stored calls, and each format of an export."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from atif import Trajectory

from leyden.libs.client import Refused
from leyden.libs.client.export import FORMATS, Export
from leyden.libs.client.export.conversations import conversations_of
from leyden.libs.contracts.api.rollouts import Call, Rollout
from leyden.libs.contracts.conversation import Dialect, Json, ToolCall, Turn

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SYSTEM, TASK = Turn("system", "You plan trips."), Turn("user", "Lyon or Nice?")
TOOLS: tuple[Json, ...] = ({"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}},)
ASKS = Turn(
    "assistant",
    "",
    tool_calls=(ToolCall("a", "weather", '{"city": "Lyon"}'), ToolCall("b", "weather", '{"city": "Nice"}')),
    reasoning="Both.",
)
RAIN, SUN = Turn("tool", "rain", tool_call_id="a"), Turn("tool", "no such city", tool_call_id="b", is_error=True)
NICE, LYON = Turn("assistant", "Nice."), Turn("assistant", "Lyon.")
SUMMARY = Turn("user", "So far: it rains in Lyon. Go on.")


def rollout(number: int = 0, reward: float | None = 1.0, *, group: int = 0, task: int = 0) -> Rollout:
    return Rollout(
        id=f"run-a.{group}.{number}", run_id="run-a", group_id=f"run-a.{group}", evaluation_id=None, sibling=number,
        dataset_id="d", task_number=task, admitted_version=0, step=1, state="finished", attempt=1, reward=reward,
        reason="succeeded", created_at=NOW, finished_at=NOW,
    )  # fmt: skip


def call(name: str, turns: Iterable[Turn], answer: Turn | None, **changes: Any) -> Call:
    values: dict[str, Any] = {
        "id": name, "rollout_id": "run-a.0.0", "attempt": 1, "request_id": name, "choice": 0, "status": "completed",
        "trainable": True, "untrainable_reason": None, "dialect": Dialect.CHAT_COMPLETIONS, "request": {},
        "turns": tuple(turns), "tools": TOOLS, "answer": answer, "prompt_tokens": 3, "completion_tokens": 2,
        "cached_tokens": 1, "sampled_ids": [7, 8], "logprobs": [-0.5, -0.25], "policy_versions": [0, 1],
        "temperature": 1.0, "finish_reason": "stop", "queued_seconds": 0.0, "first_token_seconds": None,
        "total_seconds": 0.1, "created_at": NOW, "credit": None, "role": "planner", "agent_name": "trips",
    }  # fmt: skip
    return Call(**{**values, **changes})


def planned(answer: Turn = NICE) -> list[Call]:
    """Parallel tool calls, their results, and an answer."""
    return [call("c1", [SYSTEM, TASK], ASKS), call("c2", [SYSTEM, TASK, ASKS, RAIN, SUN], answer)]


def export(
    form: str, calls: Mapping[str, Sequence[Call]] | Sequence[Call], rollouts: Sequence[Rollout] = (), **options: Any
) -> tuple[list[Json], dict[str, int]]:
    """Rows and what was left out; every rollout has the calls of a sequence."""

    def read(one: Rollout) -> Sequence[Call]:
        return calls.get(one.id, ()) if isinstance(calls, Mapping) else calls

    rows = Export(form, rollouts or [rollout()], read, **{"roles": None, "per_task": None, **options})
    found = list(rows)
    assert [json.loads(json.dumps(row)) for row in found] == found
    return found, rows.left_out


def test_a_continued_call_is_part_of_the_last_one() -> None:
    [found] = conversations_of(rollout(), planned()).found
    assert found.turns == (SYSTEM, TASK, ASKS, RAIN, SUN, NICE)
    assert {at: one.id for at, one in found.answers.items()} == {2: "c1", 5: "c2"}
    assert (found.own, found.stretches, found.tools) == ({2, 5}, [(2, 5)], TOOLS)


def test_branches_share_their_beginning_and_own_it_once() -> None:
    again = call("c3", [SYSTEM, TASK, ASKS, RAIN], LYON)
    first, second = conversations_of(rollout(), [*planned(), again]).found
    assert (first.own, second.own, second.stretches) == ({2, 5}, {4}, [(4, 4)])
    assert set(second.answers) == {2, 4}


def added(calls: Sequence[Call], parents: Mapping[str, str]) -> list[Call]:
    """The calls as what they add to their parents; tokens are not changed."""
    whole = {one.id: one for one in calls}
    found = []
    for one in calls:
        parent = whole.get(parents.get(one.id, ""))
        if parent is not None and one.turns is not None and parent.turns is not None:
            answer = () if parent.answer is None else (parent.answer,)
            pairs = zip(one.turns, (*parent.turns, *answer), strict=False)
            shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            columns = {"parent_call_id": parent.id, "shared_turns": shared, "turns": one.turns[shared:], "tools": None}
            one = one.model_copy(update=columns)
        found.append(one)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_calls_that_give_what_they_add_have_the_conversations_of_whole_ones(seed: int) -> None:
    chance = random.Random(seed)
    calls: list[Call] = []
    parents: dict[str, str] = {}
    for number in range(12):
        name, parent = f"c{number}", chance.choice(calls) if calls else None
        turns: tuple[Turn, ...] = (TASK,)
        if parent is not None and chance.random() < 0.8:
            parents[name] = parent.id
            before = (*(parent.turns or ()), *(() if parent.answer is None else (parent.answer,)))
            kept = len(before) if chance.random() < 0.7 else chance.randint(0, len(before))
            turns = (*before[:kept], *chance.choices((RAIN, SUMMARY, NICE), k=chance.randint(0, 2)))
        answer, delivered = chance.choice((NICE, LYON, ASKS)), chance.random() < 0.8
        calls.append(call(name, turns, answer, delivered=delivered))
    whole, by_parts = conversations_of(rollout(), calls), conversations_of(rollout(), added(calls, parents))
    assert by_parts == whole
    assert len(whole.found) > 1


def test_a_conversation_whose_earlier_call_is_lost_is_incomplete_with_all_that_continue_it() -> None:
    lost, last = planned()
    lost = lost.model_copy(update={"turns": None, "missing_parent": "call c0 is not in the store"})
    [_, part] = added(planned(), {"c2": "c1"})
    after = call("c3", [SUMMARY], LYON, parent_call_id="c2", shared_turns=len(last.turns or ()) + 1)
    assert conversations_of(rollout(), [lost, part, after]).incomplete == 3


def test_a_compacted_context_and_another_role_are_conversations_of_their_own() -> None:
    compacted = call("c3", [SYSTEM, SUMMARY], LYON)
    checker = call("c4", [Turn("system", "You check.")], Turn("assistant", "Good."), role="checker", agent_name="check")
    found = conversations_of(rollout(), [*planned(), compacted, checker]).found
    assert [(one.id, one.role, len(one.turns)) for one in found] == [
        ("run-a.0.0/1", "planner", 6),
        ("run-a.0.0/2", "planner", 3),
        ("run-a.0.0/3", "checker", 2),
    ]


def test_an_answer_that_the_agent_sends_back_changed_is_no_answer_of_the_model() -> None:
    changed = Turn("assistant", "Hmm.")
    found = conversations_of(rollout(), [call("c1", [TASK], LYON), call("c2", [TASK, changed, SUMMARY], NICE)]).found
    assert [(one.own, one.stretches) for one in found] == [({1}, [(1, 1)]), ({3}, [(3, 3)])]


def test_what_has_no_conversation_is_counted() -> None:
    calls = [
        call("c1", [TASK], LYON).model_copy(update={"turns": None, "missing_parent": "call c0 is not in the store"}),
        call("c2", [TASK], LYON, delivered=False),
        call("c3", [TASK], None, status="failed"),
    ]
    rows, left_out = export("openai", calls)
    assert rows == []
    assert left_out == {
        "answers whose earlier calls are not stored": 1,
        "answers that never reached the agent": 1,
        "rollouts without a stored answer": 1,
    }


def test_an_undelivered_answer_that_was_continued_counts() -> None:
    first, last = planned()
    found, _, undelivered = conversations_of(rollout(), [first.model_copy(update={"delivered": False}), last])
    assert (len(found), undelivered) == (1, 0)


def test_a_conversation_ends_with_the_last_answer_that_reached_the_agent() -> None:
    first, last = planned()
    lost = [last.model_copy(update={"id": name, "delivered": False}) for name in ("c2", "c3")]
    [one], _, undelivered = conversations_of(rollout(), [first, *lost])
    assert ([call.id for call in one.answers.values()], undelivered) == (["c1"], 2)
    [one], _, undelivered = conversations_of(rollout(), [first, last, lost[1]])
    assert ([call.id for call in one.answers.values()], undelivered) == (["c2", "c1"], 1)


def test_rerolls_and_greedy_rollouts_are_left_out() -> None:
    again = rollout(1).model_copy(update={"rerolls_of": "run-a.0.0"})
    greedy = rollout(2).model_copy(update={"greedy": True})
    calls = {one.id: planned() for one in (rollout(), again, greedy)}
    rows, left_out = export("trl", calls, [rollout(), again, greedy])
    assert {row["rollout"] for row in rows} == {"run-a.0.0"}
    assert left_out == {"re-rolls and greedy rollouts": 2}


def test_openai_has_messages_and_tools_alone() -> None:
    [row], left_out = export("openai", planned())
    assert left_out == {}
    functions = [{"name": "weather", "arguments": f'{{"city": "{city}"}}'} for city in ("Lyon", "Nice")]
    assert row == {
        "messages": [
            {"role": "system", "content": "You plan trips."},
            {"role": "user", "content": "Lyon or Nice?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": name, "type": "function", "function": one} for name, one in zip("ab", functions, strict=True)
                ],
            },
            {"role": "tool", "content": "rain", "tool_call_id": "a"},
            {"role": "tool", "content": "no such city", "tool_call_id": "b"},
            {"role": "assistant", "content": "Nice."},
        ],
        "tools": list(TOOLS),
    }


def test_openai_trains_no_answer_twice_and_none_of_the_agents_own() -> None:
    shots = [Turn("user", "Hi."), Turn("assistant", "Hello."), TASK]
    rows, _ = export("openai", [call("c1", shots, LYON), call("c2", [*shots, LYON, SUMMARY], NICE, tools=())])
    assert [message.get("weight") for message in rows[0]["messages"]] == [None, 0, None, None, None, None]
    assert "tools" not in rows[0]
    rows, _ = export("openai", [*planned(), call("c3", [SYSTEM, TASK, ASKS, RAIN], LYON)])
    assert [message.get("weight") for message in rows[1]["messages"]] == [None, None, 0, None, None]


def test_trl_splits_at_the_first_answer_and_keeps_the_reward() -> None:
    [row], _ = export("trl", planned())
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    asks, rain, _, answer = row["completion"]
    assert [one["function"]["arguments"] for one in asks["tool_calls"]] == [{"city": "Lyon"}, {"city": "Nice"}]
    assert (asks["content"], asks["reasoning_content"]) == ("", "Both.")
    assert rain == {"role": "tool", "content": "rain", "tool_call_id": "a", "name": "weather"}
    assert answer == {"role": "assistant", "content": "Nice."}
    rest = {"tools": list(TOOLS), "reward": 1.0, "rollout": "run-a.0.0", "task": 0, "role": "planner"}
    assert {name: value for name, value in row.items() if name not in {"prompt", "completion"}} == rest


def test_trl_writes_each_answer_in_one_completion() -> None:
    rows, _ = export("trl", [*planned(), call("c3", [SYSTEM, TASK, ASKS, RAIN], LYON)])
    assert [message["content"] for message in rows[1]["prompt"]] == ["You plan trips.", "Lyon or Nice?", "", "rain"]
    assert rows[1]["completion"] == [{"role": "assistant", "content": "Lyon."}]


def test_trl_trains_the_answers_before_a_message_that_the_agent_wrote() -> None:
    hmm, more = Turn("assistant", "Hmm."), Turn("user", "More?")
    again = call("c3", [SYSTEM, TASK, ASKS, RAIN, SUN, NICE, more, hmm, SUMMARY], LYON)
    rows, left_out = export("trl", [*planned(), again])
    assert [[message["content"] for message in row["prompt"]] for row in rows] == [
        [SYSTEM.content, TASK.content],
        [SYSTEM.content, TASK.content, "", "rain", "no such city", "Nice.", "More?", "Hmm.", SUMMARY.content],
    ]
    assert [[message["content"] for message in row["completion"]] for row in rows] == [
        ["", "rain", "no such city", "Nice."],
        ["Lyon."],
    ]
    assert left_out == {}


@pytest.mark.parametrize("form", ["atif", "trl"])
def test_a_reward_that_is_unknown_is_null(form: str) -> None:
    [row], _ = export(form, planned(), [rollout(reward=None)])
    assert row.get("extra", row)["reward"] is None


@pytest.mark.parametrize("arguments", ['{"city": ', '["Lyon"]', "Lyon", '{"a":' * 600 + "1" + "}" * 600, "[" * 9999])
def test_a_malformed_call_is_left_out_where_arguments_are_objects(arguments: str) -> None:
    asks = Turn("assistant", "", tool_calls=(ToolCall("a", "weather", arguments, is_malformed=True),))
    rows, left_out = export("trl", [call("c1", [TASK], asks)])
    assert (rows, left_out) == ([], {"conversations with a tool call whose arguments are no JSON object": 1})
    [row], _ = export("openai", [call("c1", [TASK], asks)])
    assert row["messages"][1]["tool_calls"][0]["function"]["arguments"] == arguments
    [document], _ = export("atif", [call("c1", [TASK], asks)])
    check_atif(document)
    assert document["steps"][1]["tool_calls"][0]["extra"] == {"malformed_arguments": arguments}


def test_pairs_are_the_best_and_the_worst_of_groups_that_differ() -> None:
    rollouts = [rollout(0, 0.5), rollout(1, 1.0), rollout(2, 0.0), rollout(3, None)]
    rollouts += [rollout(0, 0.7 + 0.2 + 0.1, group=1), rollout(1, 1.0, group=1)]
    other = [Turn("tool", "rain", tool_call_id="x"), Turn("tool", "no such city", tool_call_id="y", is_error=True)]
    asks = Turn("assistant", "", reasoning="Both.", tool_calls=tuple(
        ToolCall(name, one.name, one.arguments) for name, one in zip("xy", ASKS.tool_calls, strict=True)
    ))  # fmt: skip
    worst = [call("w1", [SYSTEM, TASK], asks), call("w2", [SYSTEM, TASK, asks, *other], LYON)]
    calls = {one.id: planned() for one in rollouts} | {"run-a.0.2": worst}
    [row], left_out = export("pairs", calls, rollouts)
    assert [message["role"] for message in row["prompt"]] == ["system", "user", "assistant", "tool", "tool"]
    assert row["chosen"] == [{"role": "assistant", "content": "Nice."}]
    assert row["rejected"] == [{"role": "assistant", "content": "Lyon."}]
    assert (row["chosen_reward"], row["rejected_reward"], row["rejected_rollout"]) == (1.0, 0.0, "run-a.0.2")
    assert left_out == {
        "rollouts without a reward, which rank nowhere": 1,
        "groups without two rollouts whose rewards differ": 1,
    }


def test_pairs_begin_at_the_answer_before_a_result_that_differs() -> None:
    worst = [
        call("w1", [SYSTEM, TASK], ASKS),
        call("w2", [SYSTEM, TASK, ASKS, RAIN, Turn("tool", "sun", tool_call_id="b")], LYON),
    ]
    [row], _ = export("pairs", {"run-a.0.0": planned(), "run-a.0.1": worst}, [rollout(), rollout(1, 0.0)])
    assert [len(row[part]) for part in ("prompt", "chosen", "rejected")] == [2, 4, 4]


@pytest.mark.parametrize(
    "worst",
    [planned(), [call("w1", [Turn("user", "Else?")], LYON)], [call("w1", [SYSTEM, TASK], LYON, role="checker")]],
    ids=["equal answers", "another prompt", "another role"],
)
def test_a_group_without_a_common_prompt_and_a_difference_is_counted(worst: list[Call]) -> None:
    rows, left_out = export("pairs", {"run-a.0.0": planned(), "run-a.0.1": worst}, [rollout(), rollout(1, 0.0)])
    assert rows == []
    assert left_out == {"groups whose best and worst rollout share no prompt before answers that differ": 1}


def test_each_role_has_a_pair() -> None:
    def calls(answer: Turn) -> list[Call]:
        return [*planned(answer), call("k", [TASK], answer, role="checker")]

    both = {"run-a.0.0": calls(NICE), "run-a.0.1": calls(LYON)}
    rows, _ = export("pairs", both, [rollout(), rollout(1, 0.0)])
    assert [row["role"] for row in rows] == ["planner", "checker"]
    [row], _ = export("pairs", both, [rollout(), rollout(1, 0.0)], roles={"checker"})
    assert row["role"] == "checker"


def branches(first: str) -> list[Call]:
    """Two ways on from one answer."""
    answer, (rain, sun) = Turn("assistant", first), (Turn("user", "Rain?"), Turn("user", "Sun?"))
    return [
        call(f"{first}1", [TASK], answer),
        call(f"{first}2", [TASK, answer, rain], Turn("assistant", f"{first}, rain")),
        call(f"{first}3", [TASK, answer, sun], Turn("assistant", f"{first}, sun")),
    ]


def test_branches_train_an_answer_in_one_pair() -> None:
    both = [rollout(), rollout(1, 0.0)]
    rows, left_out = export("pairs", {"run-a.0.0": branches("Nice"), "run-a.0.1": branches("Lyon")}, both)
    found = [[[one["content"] for one in row[part]] for part in ("prompt", "chosen", "rejected")] for row in rows]
    assert found == [[[TASK.content], ["Nice", "Rain?", "Nice, rain"], ["Lyon", "Rain?", "Lyon, rain"]]]
    assert left_out == {"pairs of conversations with an answer that an earlier pair of their group has": 1}


def test_branches_that_differ_behind_a_common_answer_have_a_pair_each() -> None:
    worst = [one.model_copy(update={"id": f"w{one.id}"}) for one in branches("Nice")]
    worst[1:] = [one.model_copy(update={"answer": LYON}) for one in worst[1:]]
    rows, left_out = export("pairs", {"run-a.0.0": branches("Nice"), "run-a.0.1": worst}, [rollout(), rollout(1, 0.0)])
    assert [row["chosen"][0]["content"] for row in rows] == ["Nice, rain", "Nice, sun"]
    assert left_out == {}


def test_a_task_has_no_more_rollouts_or_pairs_than_wanted() -> None:
    rollouts = [rollout(number, 1.0 - number, group=group, task=group // 2) for group in range(4) for number in (0, 1)]
    calls = {one.id: planned(NICE if one.sibling == 0 else LYON) for one in rollouts}
    rows, _ = export("trl", calls, rollouts, per_task=3)
    assert [row["task"] for row in rows] == [0, 0, 0, 1, 1, 1]
    # Each dataset numbers its own tasks.
    elsewhere = [one.model_copy(update={"dataset_id": "held-out"}) for one in rollouts]
    assert len(export("trl", calls, [*rollouts, *elsewhere], per_task=1)[0]) == 2 * len(
        export("trl", calls, rollouts, per_task=1)[0]
    )
    rows, _ = export("pairs", calls, rollouts, per_task=1)
    assert [row["chosen_rollout"] for row in rows] == ["run-a.0.0", "run-a.2.0"]


def test_a_rollout_without_a_row_leaves_its_place_to_the_next_one() -> None:
    rows, _ = export("trl", {"run-a.0.1": planned()}, [rollout(), rollout(1)], per_task=1)
    assert [row["rollout"] for row in rows] == ["run-a.0.1"]


def test_atif_has_one_step_a_turn_with_the_results_of_its_tools() -> None:
    [document], _ = export("atif", planned())
    check_atif(document)
    assert [step["source"] for step in document["steps"]] == ["system", "user", "agent", "agent"]
    asks = document["steps"][2]
    assert [one["arguments"] for one in asks["tool_calls"]] == [{"city": "Lyon"}, {"city": "Nice"}]
    assert asks["observation"]["results"] == [
        {"content": "rain", "source_call_id": "a"},
        {"content": "no such city", "source_call_id": "b", "extra": {"is_error": True}},
    ]
    assert asks["metrics"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "cached_tokens": 1,
        "completion_token_ids": [7, 8],
        "logprobs": [-0.5, -0.25],
        "extra": {"policy_versions": [0, 1], "temperature": 1.0},
    }
    assert document["final_metrics"]["total_completion_tokens"] == 4
    assert (document["session_id"], document["trajectory_id"]) == ("run-a.0.0", "run-a.0.0/1")


def test_atif_marks_what_another_conversation_or_the_agent_wrote() -> None:
    lost = Turn("tool", "late", tool_call_id="z")
    again = call("c3", [SYSTEM, TASK, ASKS, RAIN, SUN, Turn("assistant", "Hmm."), SUMMARY, lost], LYON)
    documents, _ = export("atif", [*planned(), again])
    for document in documents:
        check_atif(document)
    assert [step.get("is_copied_context") for step in documents[1]["steps"]] == [None, None, True, True, *[None] * 3]
    system = documents[1]["steps"][5]
    assert (system["source"], system["observation"]["results"][0]["content"]) == ("system", "late")


def test_a_format_that_does_not_exist_names_those_that_do() -> None:
    with pytest.raises(Refused, match="write one of atif, openai, pairs, parquet, trl"):
        export("csv", planned())
    assert sorted(FORMATS) == ["atif", "openai", "pairs", "parquet", "trl"]


FIELDS: dict[str, tuple[set[str], set[str]]] = {
    "trajectory": (
        {"schema_version", "agent", "steps"},
        {"session_id", "trajectory_id", "notes", "final_metrics", "continued_trajectory_ref", "extra"}
        | {"subagent_trajectories"},
    ),
    "agent": ({"name", "version"}, {"model_name", "tool_definitions", "extra"}),
    "step": (
        {"step_id", "source", "message"},
        {"timestamp", "model_name", "reasoning_effort", "reasoning_content", "tool_calls", "observation", "metrics"}
        | {"is_copied_context", "llm_call_count", "extra"},
    ),
    "tool_call": ({"tool_call_id", "function_name", "arguments"}, {"extra"}),
    "result": (set(), {"source_call_id", "content", "subagent_trajectory_ref", "extra"}),
    "metrics": (
        set(),
        {"prompt_tokens", "completion_tokens", "cached_tokens", "cost_usd", "prompt_token_ids"}
        | {"completion_token_ids", "logprobs", "extra"},
    ),
    "final_metrics": (
        set(),
        {"total_prompt_tokens", "total_completion_tokens", "total_cached_tokens", "total_cost_usd", "total_steps"}
        | {"extra"},
    ),
}
"""Required and optional fields of each object in version 1.7 of the format, which allows no others."""
AGENT_ONLY = {"model_name", "reasoning_effort", "reasoning_content", "tool_calls", "metrics"}


def check_atif(document: Json) -> None:
    """Asserts the rules of version 1.7 of the format, and those of the package `atif`."""
    Trajectory.model_validate(document)
    _has_fields("trajectory", document)
    assert document["schema_version"] == "ATIF-v1.7"
    _has_fields("agent", document["agent"])
    _has_fields("final_metrics", document["final_metrics"])
    assert document["steps"]
    for number, step in enumerate(document["steps"], 1):
        assert step["step_id"] == number
        _check_step(step)


def _check_step(step: Json) -> None:
    _has_fields("step", step)
    assert step["source"] in {"system", "user", "agent"}
    assert isinstance(step["message"], str)
    assert step["source"] == "agent" or not step.keys() & AGENT_ONLY
    if "timestamp" in step:
        datetime.fromisoformat(step["timestamp"])
    calls = step.get("tool_calls", [])
    for one in calls:
        _has_fields("tool_call", one)
        assert isinstance(one["arguments"], dict)
    made = {one["tool_call_id"] for one in calls}
    for result in step.get("observation", {"results": []})["results"]:
        _has_fields("result", result)
        assert result.get("source_call_id") is None or result["source_call_id"] in made
    metrics = step.get("metrics", {})
    _has_fields("metrics", metrics)
    assert len(metrics.get("logprobs", ())) == len(metrics.get("completion_token_ids", ()))


def _has_fields(kind: str, found: Mapping[str, object]) -> None:
    required, optional = FIELDS[kind]
    assert required <= found.keys() <= required | optional, (kind, found.keys())


def test_parquet_has_a_row_for_each_answer_with_the_messages_since_the_one_before() -> None:
    again = call("c3", [SYSTEM, TASK, ASKS, RAIN], LYON)
    rows, _ = export("parquet", [*planned(), again])
    found = [(row["call_id"], row["continues"], [one["content"] for one in row["messages"]]) for row in rows]
    assert found == [
        ("c1", None, [SYSTEM.content, TASK.content]),
        ("c2", "c1", ["rain", "no such city"]),
        ("c3", "c1", ["rain"]),
    ]
    assert rows[0]["answer"]["tool_calls"][1] == {"id": "b", "name": "weather", "arguments": '{"city": "Nice"}'}
    assert (rows[0]["sampled_ids"], rows[0]["reward"], rows[0]["advantage"]) == ([7, 8], 1.0, None)


def test_a_parquet_file_has_the_rows_in_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pip install 'leyden[parquet]'")
    monkeypatch.setattr("leyden.libs.client.export.parquet.GROUP_TOKENS", 4)
    rows, _ = export("parquet", [*planned(), call("c3", [SYSTEM, TASK, ASKS, RAIN], LYON)])
    path = tmp_path / "rows.parquet"
    wanted = Export("parquet", [rollout(), rollout(1, None)], lambda _: planned(), roles=None, per_task=None)
    assert wanted.write_parquet(path) == 4
    file = parquet.ParquetFile(path)
    assert (file.num_row_groups, file.schema_arrow.names) == (2, list(rows[0]))
    read = file.read().to_pylist()
    assert [(row["rollout_id"], row["reward"], row["step"], row["created_at"]) for row in read[1:3]] == [
        ("run-a.0.0", 1.0, 1, NOW),
        ("run-a.0.1", None, 1, NOW),
    ]
    assert [json.loads(row["tools"]) for row in read] == [list(TOOLS)] * 4
    changed = {"created_at", "tools"}
    assert [{k: v for k, v in row.items() if k not in changed} for row in read[:2]] == [
        {k: v for k, v in row.items() if k not in changed} for row in rows[:2]
    ]


def test_other_formats_and_a_missing_package_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="rows of trl are JSON lines"):
        Export("trl", [], lambda _: (), roles=None, per_task=None).write_parquet(tmp_path / "rows")
    monkeypatch.setattr("leyden.libs.client.export.export.find_spec", lambda name: None)
    with pytest.raises(Refused, match=r"pip install 'leyden\[parquet\]'"):
        Export("parquet", [], lambda _: (), roles=None, per_task=None).write_parquet(tmp_path / "rows")
