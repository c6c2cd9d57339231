"""Views of rollouts in the API: results, trajectories, steps and rewards, computed from the store."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import httpx
import numpy as np
import pytest
from sqlalchemy import text, update

from leyden.libs.client.chains import Chains
from leyden.libs.contracts import ids
from leyden.libs.contracts.api.rollouts import Call
from leyden.libs.contracts.config import RunConfig
from leyden.libs.contracts.conversation import Json, Turn, parse_turn, turn_json
from leyden.libs.store import tables
from leyden.libs.store.alarms.progress import made_steps
from leyden.libs.store.database import Database
from leyden.libs.store.policies import policy_columns
from leyden.libs.store.read import results as read_results
from leyden.libs.store.runs.phases import step_rewards
from tests.support import builders


async def finish(database: Database, rollout: tables.Rollout, reward: float | None, facts: dict[str, Any]) -> None:
    await builders.add_attempt(database, rollout, state="settled")
    await builders.add_outcome(database, rollout, reward=reward, facts=facts)
    async with database.session() as session:
        row = await session.get_one(tables.Rollout, rollout.id)
        row.state, row.attempt, row.reward, row.reason = "finished", 1, reward, "succeeded"


async def add_step(database: Database, run: tables.Run, number: int, groups: dict[str, str], **metrics: float) -> None:
    async with database.session() as session:
        moment = datetime(2026, 1, 1, 0, number, tzinfo=UTC)
        row = tables.Step(run_id=run.id, number=number, metrics=metrics, checkpoint="", started_at=moment)
        row.created_at = moment.replace(second=30)
        session.add(row)
        for group_id, verdict in groups.items():
            session.add(tables.StepGroup(group_id=group_id, run_id=run.id, step=number, verdict=verdict))


async def add_credit(database: Database, call: tables.ModelCall, return_: float) -> None:
    values = {"depth": 0, "state_key": "", "tools": {"calls": []}, "intermediate_reward": 0.0, "baseline": 0.0}
    async with database.session() as session:
        session.add(
            tables.CallCredit(
                run_id=call.run_id,
                call_id=call.id,
                rollout_id=call.rollout_id,
                return_=return_,
                advantage=0.0,
                **values,
            )
        )


async def get(http: httpx.AsyncClient, path: str, **query: Any) -> Any:
    response = await http.get(path, params=query)
    assert response.status_code == 200, response.text
    return response.json()


async def test_an_evaluation_reports_shares_numbers_and_texts_with_intervals(
    api_http: httpx.AsyncClient, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await builders.add_run(database)
    evaluation = ids.evaluation_id(run.id, 1)
    async with database.session() as session:
        columns = {"dataset_id": run.dataset_id, "policy_version": 0, "rollouts_per_task": 2}
        session.add(tables.Evaluation(id=evaluation, run_id=run.id, number=1, **columns))
    rollouts = []
    for number in range(2):
        _, siblings = await builders.add_group(database, run, number, evaluation_id=evaluation, task_number=number)
        rollouts += siblings
    facts = [("memory", True, 1), ("memory", 1, 2), ("search", False, 3), ("memory", 0, 10**400)]
    for rollout, (tool, success, calls) in zip(rollouts, facts, strict=True):
        line = {"reward": float(success), "first_tool": tool, "success": success, "calls": calls, "notes": [1]}
        await finish(database, rollout, float(success), line)
    found = await get(api_http, f"/v1/runs/{run.id}/evaluations/1")
    results, by_name = found["results"], {fact["name"]: fact for fact in found["results"]["facts"]}
    assert (found["measured_version"], results["rollouts"], results["complete"]) == (0, {"finished": 4}, True)
    assert (results["reward"]["count"], results["reward"]["mean"]) == (4, 0.5)
    assert sorted(by_name) == ["calls", "first_tool", "success"]
    assert by_name["first_tool"]["counts"] == {"memory": 3, "search": 1}
    share = by_name["success"]["statistic"]
    assert by_name["success"]["kind"] == "share"
    # The siblings of each task say the same: Wilson's interval of 1 in 2.
    assert (share["count"], share["tasks"], share["mean"]) == (4, 2, 0.5)
    assert (share["low"], share["high"]) == pytest.approx((0.094531, 0.905469), abs=1e-6)
    # A number beyond double precision is left out.
    assert (by_name["calls"]["statistic"]["count"], by_name["calls"]["statistic"]["mean"]) == (3, 2.0)
    assert {name: fact["total"] for name, fact in by_name.items()} == {"calls": 3, "first_tool": 4, "success": 4}
    monkeypatch.setattr(read_results, "MAX_TEXTS", 1)
    found = await get(api_http, f"/v1/runs/{run.id}/evaluations/1")
    fewer = next(fact for fact in found["results"]["facts"] if fact["name"] == "first_tool")
    assert (fewer["counts"], fewer["total"]) == ({"memory": 3}, 4)


async def test_steps_carry_metrics_rewards_facts_and_verdicts_and_make_series(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    run = await builders.add_run(database)
    for number in (1, 2):
        group, rollouts = await builders.add_group(database, run, number)
        for rollout, reward in zip(rollouts, (0.0, float(number)), strict=True):
            await finish(database, rollout, reward, {"reward": reward, "memory_first": reward > 0})
        await add_step(database, run, number, {group.id: "trained"}, loss=0.5 / number)
    steps = (await get(api_http, f"/v1/runs/{run.id}/steps"))["items"]
    assert [(s["number"], s["reward_mean"], s["rollouts"]) for s in steps] == [(1, 0.5, 2), (2, 1.0, 2)]
    assert (steps[1]["facts"], steps[1]["groups"]) == ({"memory_first": 0.5}, {"trained": 1})
    assert steps[1]["reward_std"] == pytest.approx(2**0.5)
    metrics = await get(api_http, f"/v1/runs/{run.id}/metrics", names=["loss", "reward_mean"])
    assert metrics["names"] == [
        "fact.memory_first", "groups_stale", "loss", "queued_rollouts", "reward_mean", "reward_std", "wait_seconds"
    ]  # fmt: skip
    assert metrics["series"][0] == {"name": "loss", "points": [[1, 30.0, 0.5], [2, 90.0, 0.25]]}
    assert (await get(api_http, f"/v1/runs/{run.id}"))["progress"] == {
        "step": 2,
        "steps": 100,
        "policy_version": None,
        "rollouts": {"finished": 4},
        "reward_mean": 1.0,
        "next_step": {"number": 3, "rollouts": 2, "ended": 0, "graded": 0, "credited": 0},
        # The third step is late, and 97 more take 60 seconds each.
        "seconds_left": 97 * 60.0,
    }


async def test_a_run_with_roles_has_a_learning_curve_for_each(api_http: httpx.AsyncClient, database: Database) -> None:
    run = await builders.add_run(database, config=builders.run_document(roles=[{"name": "writer"}]))
    for number in (1, 2):
        group, rollouts = await builders.add_group(database, run, number)
        for sibling, rollout in enumerate(rollouts):
            for role in ("writer", None):
                call = await builders.add_call(database, rollout, role=role)
                await add_credit(database, call, float(number + sibling))
            await finish(database, rollout, 1.0, {})
        await add_step(database, run, number, {group.id: "trained"})
    metrics = await get(api_http, f"/v1/runs/{run.id}/metrics", names=["role.writer.return_mean", "role.writer.calls"])
    points = {series["name"]: [point[2] for point in series["points"]] for series in metrics["series"]}
    assert points == {"role.writer.return_mean": [1.5, 2.5], "role.writer.calls": [2.0, 2.0]}


async def test_each_policy_has_the_learning_curves_of_its_own_roles(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    roles = [{"name": "writer", "model": "w"}, {"name": "checker", "policy": "second"}]
    document = builders.run_document(roles=roles, policies={"second": {"pool": "second"}})
    lead = await builders.add_run(database, config=document)
    config = RunConfig.model_validate(document).policy_document("second").model_dump(mode="json")
    second = await builders.add_run(database, config=config, **policy_columns(lead.id, "second"))
    for number in (1, 2):
        group, rollouts = await builders.add_group(database, lead, number)
        for rollout in rollouts:
            for role, value in (("writer", 1.0), ("checker", 10.0), (None, 100.0)):
                await add_credit(database, await builders.add_call(database, rollout, role=role), number * value)
            await finish(database, rollout, 1.0, {})
        # The trainers of the policies take the groups into steps of other numbers.
        await add_step(database, lead, number, {group.id: "trained"})
        await add_step(database, second, 3 - number, {group.id: "trained"})
    assert await role_curves(api_http, lead) == {
        "role.writer.return_mean": [(1, 1.0), (2, 2.0)],
        "role.writer.calls": [(1, 2.0), (2, 2.0)],
    }
    assert await role_curves(api_http, lead, policy="second") == {
        "role.checker.return_mean": [(1, 20.0), (2, 10.0)],
        "role.checker.calls": [(1, 2.0), (2, 2.0)],
    }


async def test_a_rollout_with_more_calls_of_a_role_weighs_no_more_in_its_curve(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    """Losers take more turns: 4 rollouts, 3 of them right, one of which took 8 calls to be wrong."""
    run = await builders.add_run(database, config=builders.run_document(roles=[{"name": "writer"}]))
    group, rollouts = await builders.add_group(database, run, size=4)
    for rollout, reward, calls in zip(rollouts, (1.0, 1.0, 0.0, 1.0), (1, 1, 8, 2), strict=True):
        for _ in range(calls):
            await add_credit(database, await builders.add_call(database, rollout, role="writer"), reward)
        await finish(database, rollout, reward, {})
    await add_step(database, run, 1, {group.id: "trained"})
    assert await role_curves(api_http, run) == {
        "role.writer.return_mean": [(1, 0.75)],
        "role.writer.calls": [(1, 12.0)],
    }


async def role_curves(
    http: httpx.AsyncClient, run: tables.Run, **parameters: str
) -> dict[str, list[tuple[int, float]]]:
    """The series of roles, each point as step and value."""
    series = (await get(http, f"/v1/runs/{run.id}/metrics", **parameters))["series"]
    curves = {one["name"]: one["points"] for one in series if one["name"].startswith("role.")}
    return {name: [(step, value) for step, _, value in points] for name, points in curves.items()}


async def test_every_view_counts_rewards_beside_the_outcome(api_http: httpx.AsyncClient, database: Database) -> None:
    run = await builders.add_run(database)
    evaluation = ids.evaluation_id(run.id, 1)
    async with database.session() as session:
        columns = {"dataset_id": run.dataset_id, "policy_version": 0, "rollouts_per_task": 2}
        session.add(tables.Evaluation(id=evaluation, run_id=run.id, number=1, **columns))
    trained, siblings = await builders.add_group(database, run, 1, size=3, greedy=2)
    _, evaluated = await builders.add_group(database, run, 0, evaluation_id=evaluation)
    # A greedy rollout is no part of a step's reward.
    await finish(database, siblings.pop(), 8.0, {})
    for rollout in (*siblings, *evaluated):
        call = await builders.add_call(database, rollout)
        await finish(database, rollout, 0.0, {})
        async with database.session() as session:
            for attempt, source, key in ((1, "endpoint", "a"), (1, "telemetry", "b"), (2, "endpoint", "a")):
                given = {"run_id": run.id, "name": "r", "value": 0.25, "response_id": f"chatcmpl-{call.id}"}
                session.add(tables.Reward(rollout_id=rollout.id, attempt=attempt, key=key, source=source, **given))
        body = {"key": "judge", "value": 0.5, "call_id": call.id}
        assert (await api_http.post(f"/v1/rollouts/{rollout.id}/rewards", json=body)).status_code == 201
    await add_step(database, run, 1, {trained.id: "trained"})
    listed = (await get(api_http, "/v1/rollouts", run=run.id))["items"]
    assert sorted((one["reward"], one["greedy"]) for one in listed) == [*[(1.0, False)] * 4, (8.0, True)]
    assert (await get(api_http, f"/v1/rollouts/{siblings[0].id}"))["reward"] == 1.0
    [step] = (await get(api_http, f"/v1/runs/{run.id}/steps"))["items"]
    assert (step["reward_mean"], step["reward_std"]) == (1.0, 0.0)
    assert (await get(api_http, f"/v1/runs/{run.id}"))["progress"]["reward_mean"] == 1.0
    results = (await get(api_http, f"/v1/runs/{run.id}/evaluations/1"))["results"]
    assert (results["reward"]["count"], results["reward"]["mean"]) == (2, 1.0)


async def test_progress_counts_only_training_rollouts_by_state(api_http: httpx.AsyncClient, database: Database) -> None:
    run = await builders.add_run(database)
    evaluation = ids.evaluation_id(run.id, 1)
    async with database.session() as session:
        columns = {"dataset_id": run.dataset_id, "policy_version": 0, "rollouts_per_task": 5}
        session.add(tables.Evaluation(id=evaluation, run_id=run.id, number=1, **columns))
    assert (await get(api_http, f"/v1/runs/{run.id}"))["progress"]["rollouts"] == {}
    states = ("queued", "excluded", "cancelled", "finished", "finished")
    for columns in ({}, {"evaluation_id": evaluation}):
        _, rollouts = await builders.add_group(database, run, size=len(states), **columns)
        async with database.session() as session:
            for rollout, state in zip(rollouts, states, strict=True):
                (await session.get_one(tables.Rollout, rollout.id)).state = state
    counts = {"queued": 1, "excluded": 1, "cancelled": 1, "finished": 2}
    assert (await get(api_http, f"/v1/runs/{run.id}"))["progress"]["rollouts"] == counts


async def test_a_queued_rollout_with_a_live_attempt_is_running(api_http: httpx.AsyncClient, database: Database) -> None:
    run = await builders.add_run(database)
    evaluation = ids.evaluation_id(run.id, 1)
    async with database.session() as session:
        columns = {"dataset_id": run.dataset_id, "policy_version": 0, "rollouts_per_task": 3}
        session.add(tables.Evaluation(id=evaluation, run_id=run.id, number=1, **columns))
    counts = {"queued": 2, "running": 1}
    for number, columns in enumerate(({}, {"evaluation_id": evaluation})):
        _, [waiting, running, retried] = await builders.add_group(database, run, number, size=3, **columns)
        await builders.add_attempt(database, running, state=("leased", "running")[number])
        await builders.add_attempt(database, retried, state="expired")
        assert (await get(api_http, f"/v1/rollouts/{running.id}"))["state"] == "running"
        for state, found in (("running", {running.id}), ("queued", {waiting.id, retried.id})):
            listed = (await get(api_http, "/v1/rollouts", group=running.group_id, state=state))["items"]
            assert {(item["id"], item["state"]) for item in listed} == {(one, state) for one in found}
    assert (await get(api_http, f"/v1/runs/{run.id}"))["progress"]["rollouts"] == counts
    results = (await get(api_http, f"/v1/runs/{run.id}/evaluations/1"))["results"]
    assert (results["rollouts"], results["complete"]) == (counts, False)


async def test_a_trajectory_shows_tokens_as_sampled_with_their_credit(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    run = await builders.add_run(database)
    _, [rollout, other] = await builders.add_group(database, run)
    first = await builders.add_call(database, rollout, (1, 2), (3, 4), logprobs=(-0.25, -0.5), policy_version=7)
    second = await builders.add_call(database, rollout, (1, 2, 3, 4, 5), (6,), parent_span_id="a" * 16)
    await builders.add_call(database, other)
    async with database.session() as session:
        parts = {"depth": 0, "state_key": "", "tools": {"calls": []}, "intermediate_reward": 0.25}
        numbers = {"return_": 1.5, "baseline": 0.5, "advantage": 1.0}
        session.add(tables.CallCredit(run_id=run.id, call_id=first.id, rollout_id=rollout.id, **parts, **numbers))
    await builders.add_tool_span(database, rollout, "memory", response_id=f"chatcmpl-{first.request_id}")
    calls = (await get(api_http, f"/v1/rollouts/{rollout.id}/calls", prompt=True))["items"]
    assert [call["id"] for call in calls] == [first.id, second.id]
    assert (calls[0]["prompt_ids"], calls[0]["sampled_ids"], calls[0]["policy_versions"]) == ([1, 2], [3, 4], [7, 7])
    assert [call["parent_span_id"] for call in calls] == [None, "a" * 16]
    assert (calls[0]["logprobs"], calls[0]["credit"]["return"], calls[1]["credit"]) == ([-0.25, -0.5], 1.5, None)
    page = await get(api_http, f"/v1/rollouts/{rollout.id}/calls", limit=1)
    rest = await get(api_http, f"/v1/rollouts/{rollout.id}/calls", cursor=page["next_cursor"])
    assert [call["id"] for call in rest["items"]] == [second.id]
    assert page["items"][0]["prompt_ids"] is None
    spans = (await get(api_http, f"/v1/rollouts/{rollout.id}/spans", kind="tool"))["items"]
    assert [span["response_id"] for span in spans] == [f"chatcmpl-{first.request_id}"]


async def add_chain(database: Database) -> tuple[str, list[tuple[list[int], list[Turn], list[Json]]]]:
    """Five calls that continue each other, and a fork: the rollout, and prompts, conversations and tools in full."""
    run = await builders.add_run(database)
    _, [rollout, _] = await builders.add_group(database, run)
    turns: list[Turn] = []
    tokens: list[int] = []
    tools = [{"b": 1, "a": 2}]
    expected, parent = [], None
    for number in range(5):
        columns: dict[str, Any] = {"shared_turns": len(turns), "shared_tokens": len(tokens)}
        columns |= {"tools": None if parent else tools, "prompt_tokens": len(tokens) + 1, "parent_call_id": parent}
        own = Turn("user", f"{number}")
        call = await builders.add_call(database, rollout, (number,), (10,), turns=[turn_json(own)], **columns)
        expected.append(([*tokens, number], [*turns, own], tools))
        turns, tokens, parent = [*turns, own, Turn("assistant", "4")], [*tokens, number, 10], call.id
    # This one shares three turns and three tokens with the last.
    own = Turn("user", "new")
    columns = {"parent_call_id": parent, "shared_turns": 3, "shared_tokens": 3, "prompt_tokens": 5}
    await builders.add_call(database, rollout, (7, 8), turns=[turn_json(own)], **columns)
    expected.append(([0, 10, 1, 7, 8], [*turns[:3], own], tools))
    return rollout.id, expected


async def paged(http: httpx.AsyncClient, path: str, **parameters: Any) -> list[dict[str, Any]]:
    """The items of all pages of two."""
    page = await get(http, path, limit=2, **parameters)
    found = page["items"]
    while page["next_cursor"]:
        page = await get(http, path, limit=2, cursor=page["next_cursor"], **parameters)
        found += page["items"]
    return found


async def test_calls_that_share_the_beginning_of_others_are_shown_in_full_on_every_page(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    rollout, expected = await add_chain(database)
    calls = await paged(api_http, f"/v1/rollouts/{rollout}/calls", prompt=True)
    found = [(call["prompt_ids"], list(map(parse_turn, call["turns"])), call["tools"]) for call in calls]
    assert found == expected
    assert [list(tool) for _, _, [tool] in found] == [["b", "a"]] * 6
    assert {(call["parent_call_id"], call["shared_turns"], call["shared_tokens"]) for call in calls} == {(None, 0, 0)}


async def test_calls_may_give_what_they_add_alone_and_the_client_makes_them_whole(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    rollout, expected = await add_chain(database)
    calls = await paged(api_http, f"/v1/rollouts/{rollout}/calls", prompt=True, conversation="added")
    assert [[turn["content"] for turn in call["turns"]] for call in calls] == [[str(n)] for n in (0, 1, 2, 3, 4, "new")]
    assert [call["shared_turns"] for call in calls] == [0, 2, 4, 6, 8, 3]
    assert [call["parent_call_id"] for call in calls] == [None, *(call["id"] for call in calls[:5])]
    assert [(call["tools"] is None, call["prompt_ids"]) for call in calls[3:]] == [
        (True, [3]),
        (True, [4]),
        (True, [7, 8]),
    ]
    chains = Chains()
    whole = [chains.whole(chains.add(Call.model_validate(call))) for call in calls]
    assert [(one.prompt_ids, list(one.turns or ()), list(one.tools or ())) for one in whole] == expected


async def test_a_call_is_whole_where_the_list_gives_its_parent_later(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    _, [rollout, _] = await builders.add_group(database, await builders.add_run(database))
    columns: dict[str, Any] = {"parent_call_id": "call-late", "shared_turns": 2, "shared_tokens": 2, "prompt_tokens": 3}
    await builders.add_call(database, rollout, (5,), sequence=1, turns=[turn_json(Turn("user", "go on"))], **columns)
    await builders.add_call(database, rollout, (1,), (2,), id="call-late", sequence=2)
    path = f"/v1/rollouts/{rollout.id}/calls"
    whole, added = [await get(api_http, path, prompt=True, conversation=one) for one in ("whole", "added")]
    assert whole == added
    assert (added["items"][0]["prompt_ids"], len(added["items"][0]["turns"])) == ([1, 2, 5], 3)


async def test_a_call_without_its_parent_is_listed_with_the_reason(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    _, [rollout, _] = await builders.add_group(database, await builders.add_run(database))
    complete = await builders.add_call(database, rollout, (1, 2), (3,))
    lost = await builders.add_call(database, rollout, (4,), (5,), parent_call_id="call-lost", prompt_tokens=9)
    after = await builders.add_call(database, rollout, (6,), (7,), parent_call_id=lost.id, prompt_tokens=11)
    calls = (await get(api_http, f"/v1/rollouts/{rollout.id}/calls", prompt=True))["items"]
    reason = f"call {lost.id} has the parent call-lost, which is not in the store"
    shown = ("id", "tools", "missing_parent", "prompt_ids", "sampled_ids")
    assert [tuple(call[name] for name in shown) for call in calls] == [
        (complete.id, [], None, [1, 2], [3]),
        (lost.id, None, reason, None, [5]),
        (after.id, None, reason, None, [7]),
    ]
    assert [call["turns"] is None for call in calls] == [False, True, True]
    added = (await get(api_http, f"/v1/rollouts/{rollout.id}/calls", conversation="added"))["items"]
    chains = Chains()
    whole = [chains.whole(chains.add(Call.model_validate(call))) for call in added]
    assert [(one.turns is None, one.missing_parent) for one in whole] == [(False, None), (True, reason), (True, reason)]


async def test_a_rollout_shows_its_task_attempts_outcomes_and_rewards(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    run = await builders.add_run(database)
    group, [rollout, _] = await builders.add_group(database, run, task_number=1)
    await builders.add_attempt(database, rollout, 1, state="expired")
    await builders.add_attempt(database, rollout, 2, state="settled")
    await builders.add_outcome(database, rollout, 2, facts={"calls": 3})
    path = f"/v1/rollouts/{rollout.id}"
    await api_http.post(f"{path}/rewards", json={"key": "a", "value": 0.5})
    found = await get(api_http, path)
    assert (found["task"], found["group_id"], found["step"]) == ({"question": "2+3"}, group.id, None)
    assert [(a["number"], a["state"]) for a in found["attempts"]] == [(1, "expired"), (2, "settled")]
    assert [a["outcome"] and a["outcome"]["facts"] for a in found["attempts"]] == [None, {"calls": 3}]
    assert [(r["source"], r["key"], r["value"]) for r in found["rewards"]] == [("external", "a", 0.5)]


async def test_rollouts_are_filtered_by_run_state_evaluation_step_and_version(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    run, other = await builders.add_run(database), await builders.add_run(database)
    group, [one, two] = await builders.add_group(database, run, admitted_version=3)
    await builders.add_group(database, other)
    await finish(database, one, 1.0, {})
    await add_step(database, run, 4, {group.id: "trained"})

    async def found(**query: Any) -> set[str]:
        return {item["id"] for item in (await get(api_http, "/v1/rollouts", **query))["items"]}

    assert len(await found()) == 4
    assert await found(run=run.id) == {one.id, two.id}
    assert await found(run=run.id, state="finished") == {one.id}
    assert await found(run=run.id, step=4, version=3, evaluation="none", task=0) == {one.id, two.id}
    assert await found(run=run.id, version=2) == set()
    assert await found(evaluation=f"{run.id}.e1") == set()


async def test_rollouts_are_filtered_by_reward_failure_and_text_sorted_and_counted(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    run, other = await builders.add_run(database), await builders.add_run(database)
    _, siblings = await builders.add_group(database, run, size=4)
    rewards = zip(siblings[:3], (0.5, -1.0, 0.7 + 0.2 + 0.1), ("succeeded", "agent_error", "succeeded"), strict=True)
    for rollout, reward, kind in rewards:
        await builders.finish_rollout(database, rollout, reward=reward, kind=kind, stdout_tail=f"ends 100% {reward}")
    calls = [{"id": "1", "name": "look", "arguments": '{"at": "x\ny"}'}]
    said = {"role": "assistant", "content": 'says "a_b"\nDrüben', "tool_calls": calls}
    await builders.add_call(database, siblings[3], answer=said)
    _, [stranger] = await builders.add_group(database, other, size=1)
    await builders.add_call(database, stranger, answer=said)

    async def found(**query: Any) -> list[int]:
        items = (await get(api_http, "/v1/rollouts", run=run.id, **query))["items"]
        return [item["sibling"] for item in items]

    assert await found(sort="highest") == [2, 0, 1, 3]
    assert await found(sort="lowest") == [1, 0, 2, 3]
    assert await found(sort="oldest") == [0, 1, 2, 3]
    assert await found(reward_min=0.5, sort="lowest") == [0, 2]
    assert await found(reward_max=0.5, sort="lowest") == [1, 0]
    # The sum is 0.9999999999999999.
    assert await found(reward_min=1.0) == [2]
    assert (await found(failed=True), await found(failed=False, sort="lowest")) == ([1], [0, 2])
    assert await found(text="100% -1") == [1]
    assert await found(text="100_ -1") == []
    assert await found(text='"A_B"\ndrüben') == [3]
    assert await found(text="agent_err") == [1]
    assert await found(text='"x\ny') == [3]
    assert sorted(await found(text="QUESTION")) == [0, 1, 2, 3]
    for sort in ("newest", "oldest", "highest", "lowest"):
        whole, paged, cursor = await found(sort=sort), list[int](), None
        while True:
            query = {"run": run.id, "sort": sort, "limit": 1, "count": True, **({"cursor": cursor} if cursor else {})}
            one = await get(api_http, "/v1/rollouts", **query)
            paged += [item["sibling"] for item in one["items"]]
            assert one["total"] == (None if cursor else 4)
            if (cursor := one["next_cursor"]) is None:
                break
        assert paged == whole, sort
    assert (await api_http.get("/v1/rollouts", params={"text": "a"})).json()["cause"] == "invalid"
    assert (await api_http.get("/v1/rollouts", params={"reward_min": "nan"})).status_code == 422
    assert (await api_http.get("/v1/rollouts", params={"sort": "best"})).status_code == 422


async def test_a_reward_with_the_same_key_changes_nothing_and_with_another_value_is_refused(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    run = await builders.add_run(database)
    _, [rollout, other] = await builders.add_group(database, run)
    call = await builders.add_call(database, other)
    path = f"/v1/rollouts/{rollout.id}/rewards"
    bodies: list[dict[str, Any]] = [
        {"key": "a", "value": 1.0},
        {"key": "a", "value": 1.0},
        {"key": "a", "value": 2.0},
        {"key": "b", "value": 1.0, "call_id": call.id},
    ]
    statuses = [(await api_http.post(path, json=body)).status_code for body in bodies]
    assert statuses == [201, 200, 409, 404]
    infinite = await api_http.post(
        path, content='{"key": "c", "value": Infinity}', headers={"content-type": "application/json"}
    )
    assert (infinite.status_code, infinite.json()["detail"]) == (400, "Infinity is not JSON: write null or a number")
    assert (await api_http.post("/v1/rollouts/nobody/rewards", json=bodies[0])).status_code == 404


async def test_a_reward_for_a_rollout_of_a_cancelled_run_is_refused_with_the_reason(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    run = await builders.add_run(database)
    _, [rollout, _] = await builders.add_group(database, run)
    path = f"/v1/rollouts/{rollout.id}/rewards"
    before = {"key": "before", "value": 1.0}
    assert (await api_http.post(path, json=before)).status_code == 201
    assert (await api_http.post(f"/v1/runs/{run.id}/cancel")).status_code == 200
    refused = await api_http.post(path, json={"key": "after", "value": 1.0})
    assert (refused.status_code, "was cancelled" in refused.json()["detail"]) == (409, True)
    # A repeat of one that was accepted changes nothing.
    assert (await api_http.post(path, json=before)).status_code == 200


async def test_a_reward_that_would_count_nowhere_is_refused_with_the_reason(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    run = await builders.add_run(database)
    _, [excluded, retried] = await builders.add_group(database, run)
    early, late = [await builders.add_call(database, retried, attempt=attempt) for attempt in (1, 2)]
    cancelled_group, [finished, _] = await builders.add_group(database, run, 1)
    async with database.session() as session:
        rollouts, groups = tables.Rollout, tables.Group
        ends = {"state": "excluded", "reason": "engine_lost"}
        await session.execute(update(rollouts).where(rollouts.id == excluded.id).values(ends))
        await session.execute(update(rollouts).where(rollouts.id == retried.id).values(excused_attempt=1))
        await session.execute(update(groups).where(groups.id == cancelled_group.id).values(state="cancelled"))

    async def answer(rollout: tables.Rollout, call_id: str | None = None) -> tuple[int, str]:
        body = {"key": "a", "value": 1.0, "call_id": call_id}
        found = await api_http.post(f"/v1/rollouts/{rollout.id}/rewards", json=body)
        return found.status_code, found.json().get("detail", "")

    assert await answer(excluded) == (
        409,
        f"rollout {excluded.id} was excluded (engine_lost), so a reward for it counts nowhere",
    )
    assert (await answer(finished))[1].startswith(f"the rollout's group {cancelled_group.id} was cancelled")
    assert (await answer(retried, early.id))[1].startswith(f"call {early.id} is of attempt 1, which a failure of the")
    assert (await answer(retried, late.id))[0] == 201


async def test_an_evaluation_whose_rewards_come_from_outside_is_pending_until_they_do(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    document = builders.run_document(runner={"type": "process", "stdout_reward": False})
    run = await builders.add_run(database, config=document)
    evaluation = ids.evaluation_id(run.id, 1)
    async with database.session() as session:
        columns = {"dataset_id": run.dataset_id, "policy_version": 0, "rollouts_per_task": 1, "max_tasks": 2}
        session.add(tables.Evaluation(id=evaluation, run_id=run.id, number=1, **columns))
    rollouts = []
    for number in range(2):
        _, siblings = await builders.add_group(
            database, run, number, size=1, evaluation_id=evaluation, task_number=number
        )
        rollouts += siblings
    for rollout in rollouts:
        await finish(database, rollout, None, {})
        async with database.session() as session:
            (await session.get_one(tables.Rollout, rollout.id)).reward = 0.0

    async def results() -> dict[str, Any]:
        found: dict[str, Any] = (await get(api_http, f"/v1/runs/{run.id}/evaluations/1"))["results"]
        return found

    found = await results()
    assert (found["pending"], found["complete"], found["reward"]) == (2, False, None)
    for rollout, pending in zip(rollouts, (1, 0), strict=True):
        reward = {"key": "grade", "value": 0.5}
        assert (await api_http.post(f"/v1/rollouts/{rollout.id}/rewards", json=reward)).status_code == 201
        found = await results()
        assert (found["pending"], found["complete"], found["reward"]["mean"]) == (pending, not pending, 0.5)


async def test_a_reward_that_is_still_to_come_is_no_0_of_a_step(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    run = await builders.add_run(
        database, config=builders.run_document(runner={"type": "process", "stdout_reward": False})
    )
    group, [*rollouts, reroll] = await builders.add_group(database, run, size=3)
    for rollout in rollouts:
        await finish(database, rollout, None, {})
        async with database.session() as session:
            (await session.get_one(tables.Rollout, rollout.id)).reward = 0.0
    await finish(database, reroll, 1.0, {})
    async with database.session() as session:
        (await session.get_one(tables.Rollout, reroll.id)).rerolls_of = rollouts[0].id
    # Credit counts 0 until there is a reward.
    await builders.add_credited_group(database, group, reward_mean=0.0, counted_siblings=2)
    await add_step(database, run, 1, {group.id: "trained"})

    async def shown() -> tuple[Any, ...]:
        [step] = (await get(api_http, f"/v1/runs/{run.id}/steps"))["items"]
        names = (await get(api_http, f"/v1/runs/{run.id}/metrics"))["names"]
        listed = (await get(api_http, f"/v1/rollouts?run={run.id}&sort=lowest"))["items"]
        of_run = (await get(api_http, f"/v1/runs/{run.id}"))["progress"]["reward_mean"]
        async with database.read() as session:
            reports = text("SELECT reward_mean FROM reports.steps WHERE run_id = :run")
            reported = await session.scalar(reports, {"run": run.id})
            stops = await step_rewards(session, run.id)
            judged = [one.reward for one in await made_steps(session, run.id)]
        [curve] = (await get(api_http, "/v1/curves", run=run.id))["items"]
        assert curve["points"] == [[1, step["reward_mean"]]] and judged == [step["reward_mean"]]
        rewards = {one["id"]: one["reward"] for one in listed}
        means = (step["reward_mean"], of_run, reported)
        return means, "reward_mean" in names, stops, [rewards[one.id] for one in rollouts]

    assert await shown() == ((None, None, None), False, [], [None, None])
    reward = {"key": "grade", "value": 0.5}
    async with database.session() as session:
        session.add(tables.ExternalReward(rollout_id=rollouts[0].id, name="grade", **reward))
    assert await shown() == ((0.5, 0.5, 0.5), True, [(1, 0.5)], [0.5, None])


async def test_a_reward_after_its_group_was_credited_is_refused_with_the_reason(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    run = await builders.add_run(database)
    group, [rollout, _] = await builders.add_group(database, run)
    path = f"/v1/rollouts/{rollout.id}/rewards"
    assert (await api_http.post(path, json={"key": "early", "value": 1.0})).status_code == 201
    # Credit holds the group's lock while it computes; the reward waits for its result.
    async with database.session() as session:
        await session.get_one(tables.Group, group.id, with_for_update=True)
        late = asyncio.create_task(api_http.post(path, json={"key": "late", "value": 1.0}))
        await asyncio.sleep(0.3)
        assert not late.done()
        row = {"run_id": run.id, "verdict": "credited", "credit_version": 1, "counted_siblings": 2}
        session.add(tables.GroupCredit(group_id=group.id, has_variance=True, **row))
    refused = await late
    assert (refused.status_code, "was credited before this reward came" in refused.json()["detail"]) == (409, True)
    assert (await api_http.post(path, json={"key": "early", "value": 1.0})).status_code == 200
    assert len((await get(api_http, f"/v1/rollouts/{rollout.id}"))["rewards"]) == 1


async def test_samples_and_policies_are_listed_with_the_step_that_used_them(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    run = await builders.add_run(database)
    group, [rollout, _] = await builders.add_group(database, run)
    sample = await builders.add_sample(database, rollout, (1, 2), (3,))
    for version in (0, 1):
        await builders.add_policy_version(database, run, version)
    async with database.session() as session:
        session.add(tables.StepSample(run_id=run.id, sample_id=sample.id, step=1))
    [found] = (await get(api_http, f"/v1/runs/{run.id}/samples", tokens=True))["items"]
    assert (found["id"], found["step"], found["token_ids"], found["mask"]) == (sample.id, 1, [1, 2, 3], [0, 0, 1])
    assert found["generator_logprobs"] == np.float32([0, 0, builders.LOGPROB]).tolist()
    [plain] = (await get(api_http, f"/v1/runs/{run.id}/samples", step=1))["items"]
    assert plain["token_ids"] is None
    assert plain["replayed_in"] == []
    async with database.session() as session:
        session.add(tables.StepGroup(group_id=group.id, run_id=run.id, step=1, verdict="trained"))
        await session.flush()
        session.add_all(
            tables.StepReplay(group_id=group.id, use=use, run_id=run.id, step=step) for use, step in ((1, 2), (2, 4))
        )
    for step, count in ((1, 1), (2, 1), (3, 0), (4, 1)):
        items = (await get(api_http, f"/v1/runs/{run.id}/samples", step=step))["items"]
        assert [(one["step"], one["replayed_in"]) for one in items] == [(1, [2, 4])] * count
    policies = (await get(api_http, f"/v1/runs/{run.id}/policies"))["items"]
    assert [policy["version"] for policy in policies] == [0, 1]


async def test_health_counts_work_and_names_the_schema(api_http: httpx.AsyncClient, database: Database) -> None:
    run = await builders.add_run(database)
    _, [rollout, _] = await builders.add_group(database, run)
    await builders.add_attempt(database, rollout)
    async with database.session() as session:
        session.add(tables.Engine(url="http://engine", state="serving", run_id=run.id, policy_version=2))
    found = await get(api_http, "/v1/health")
    assert (found["status"], found["queued_rollouts"], found["live_attempts"]) == ("ok", 1, 1)
    assert found["schema_revision"]
    assert [engine["policy_version"] for engine in (await get(api_http, "/v1/engines"))["items"]] == [2]


async def test_a_cursor_of_another_list_is_refused_with_the_remedy(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    runs = [await builders.add_run(database) for _ in range(2)]
    for run in runs:
        for number in range(2):
            await add_step(database, run, number, {})
            await builders.add_group(database, run, number)
    steps, rollouts = f"/v1/runs/{runs[0].id}/steps", "/v1/rollouts"
    cursors = {path: (await get(api_http, path, limit=1))["next_cursor"] for path in (steps, rollouts)}
    elsewhere = [
        (cursors[steps], f"/v1/runs/{runs[0].id}/policies"),
        (cursors[steps], f"/v1/runs/{runs[0].id}/evaluations"),
        (cursors[steps], f"/v1/runs/{runs[1].id}/steps"),
        (cursors[rollouts], "/v1/runs"),
        (cursors[rollouts], "/v1/datasets"),
    ]
    for cursor, path in elsewhere:
        answer = await api_http.get(path, params={"cursor": cursor})
        assert (answer.status_code, answer.json().get("cause")) == (400, "cursor"), path
        assert "leave it out" in answer.json()["detail"]
    assert len((await get(api_http, steps, cursor=cursors[steps]))["items"]) == 1


async def test_feedback_is_refused_in_words(api_http: httpx.AsyncClient, database: Database) -> None:
    reward = {"components": [{"name": "thumbs", "from": "feedback"}], "wait": {"seconds": 60.0}}
    run = await builders.add_run(database, config=builders.run_document(reward=reward))
    _, [rollout] = await builders.add_group(database, run, size=1)
    path, value = f"/v1/rollouts/{rollout.id}/feedback", {"key": "a", "component": "thumbs", "value": 1.0}

    async def refused(at: str, **changes: Any) -> tuple[int, str]:
        answer = await api_http.post(at, json={**value, **changes})
        return answer.status_code, answer.json()["detail"]

    assert await refused(path) == (409, f"rollout {rollout.id} takes no feedback: it has not begun")
    names = f"run {run.id} has no feedback 'stars': write one of thumbs"
    assert await refused(path, component="stars") == (422, names)
    assert (await refused("/v1/rollouts/none/feedback"))[0] == 404
    assert (await refused(path, value="1"))[0] == (await refused(path, value=1e7))[0] == 422
    _, [plain] = await builders.add_group(database, await builders.add_run(database, name="plain"), size=1)
    status, words = await refused(f"/v1/rollouts/{plain.id}/feedback")
    assert (status, words.endswith("its reward names none that is from: feedback")) == (422, True)
