"""A group in the API: each sibling with the parts of its reward, its calls and their credit."""

from __future__ import annotations

from datetime import UTC, datetime

import httpx
import pytest

from leyden.libs.contracts import ids
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from tests.support import builders


async def add_credit(database: Database, call: tables.ModelCall, advantage: float) -> None:
    async with database.session() as session:
        session.add(
            tables.CallCredit(
                run_id=call.run_id,
                call_id=call.id,
                rollout_id=call.rollout_id,
                depth=0,
                state_key="",
                tools={"calls": []},
                intermediate_reward=0.0,
                return_=1.0,
                baseline=1.0 - advantage,
                advantage=advantage,
            )
        )


async def add_component(database: Database, rollout: tables.Rollout, value: float, *, revision: int = 1) -> None:
    async with database.session() as session:
        lease = {"tries": 1, "lease_id": rollout.id, "owner": "test", "lease_expires_at": datetime.now(tz=UTC)}
        if revision == 1:
            session.add(tables.Grading(rollout_id=rollout.id, attempt=1, run_id=rollout.run_id, **lease))
        await session.flush()
        session.add(
            tables.RolloutReward(
                rollout_id=rollout.id,
                attempt=1,
                component="right",
                revision=revision,
                run_id=rollout.run_id,
                position=0,
                state="scored",
                weight=0.5,
                value=value,
                contribution=0.5 * value,
                extracted="4",
                explanation="equal",
                source="exact",
                duration_seconds=0.0,
            )
        )


async def test_siblings_come_with_the_parts_of_their_rewards_their_calls_and_credit(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    run = await builders.add_run(database)
    group, siblings = await builders.add_group(database, run, size=3)
    answer = {
        "role": "assistant",
        "content": "x" * 1000,
        "tool_calls": [{"id": "1", "name": "search", "arguments": "{}"}],
    }
    for sibling, second in ((siblings[0], (6, 7)), (siblings[1], (6, 8))):
        first = await builders.add_call(database, sibling, answer=answer)
        later = await builders.add_call(
            database, sibling, (9,), second, parent_call_id=first.id, shared_tokens=5, trainable=False
        )
        await add_credit(database, later, 0.25)
        await builders.finish_rollout(database, sibling, reward=0.5)
        await add_component(database, sibling, 1.0)
    # The calls of an attempt that failed and was repeated are not those of the reward.
    await builders.add_attempt(database, siblings[2], state="expired")
    await builders.add_call(database, siblings[2])
    await builders.add_attempt(database, siblings[2], 2)
    await builders.add_credited_group(database, group, has_variance=False)

    answered = await api_http.get(f"/v1/groups/{group.id}", params={"calls": 1})
    assert answered.status_code == 200, answered.text
    found = answered.json()
    assert (found["verdict"], found["has_variance"], found["step"]) == ("credited", False, None)
    assert [one["sibling"] for one in found["siblings"]] == [0, 1, 2]
    assert [(one["reward"], one["call_count"], one["sampled_tokens"]) for one in found["siblings"]] == [
        (0.5, 2, 4),
        (0.5, 2, 4),
        (None, 0, 0),
    ]
    assert [len(one["calls"]) for one in found["siblings"]] == [1, 1, 0]
    assert [(one["attempt"], one["shown_attempt"]) for one in found["siblings"]] == [(1, 1), (1, 1), (None, 2)]
    [call] = found["siblings"][0]["calls"]
    assert (call["text"], call["tools"], call["credit"]) == ("x" * 300, ["search"], None)
    [component] = found["siblings"][0]["components"]
    assert (component["component"], component["value"], component["contribution"]) == ("right", 1.0, 0.5)

    whole = (await api_http.get(f"/v1/groups/{group.id}")).json()
    one, other = (sibling["calls"] for sibling in whole["siblings"][:2])
    assert [a["asked"] == b["asked"] for a, b in zip(one, other, strict=True)] == [True, True]
    assert [a["answered"] == b["answered"] for a, b in zip(one, other, strict=True)] == [True, False]
    assert (one[1]["credit"]["advantage"], one[1]["credit"]["return"], one[1]["trainable"]) == (0.25, 1.0, False)


@pytest.mark.parametrize("of_evaluation", [False, True])
async def test_siblings_have_the_components_of_the_reward_that_they_show(
    api_http: httpx.AsyncClient, database: Database, of_evaluation: bool
) -> None:
    run, columns = await builders.add_run(database), dict[str, str]()
    if of_evaluation:
        columns["evaluation_id"] = ids.evaluation_id(run.id, 1)
        async with database.session() as session:
            values = {"dataset_id": run.dataset_id, "policy_version": 0, "rollouts_per_task": 1}
            session.add(tables.Evaluation(id=columns["evaluation_id"], run_id=run.id, number=1, **values))
    group, (graded, excluded) = await builders.add_group(database, run, size=2, **columns)
    await builders.finish_rollout(database, graded, reward=0.5)
    await builders.add_attempt(database, excluded, state="settled")
    for rollout in (graded, excluded):
        await add_component(database, rollout, 1.0)
    async with database.session() as session:
        (await session.get_one(tables.Rollout, excluded.id)).state = "excluded"
        keys = {"rollout_id": graded.id, "attempt": 1, "run_id": run.id, "token_name": "a"}
        session.add(tables.Regrade(**keys, revision=2, reward={}, total=0.25))
    await add_component(database, graded, 0.5, revision=2)
    shown = (await api_http.get(f"/v1/groups/{group.id}")).json()["siblings"]
    newest = (0.25, [0.5]) if of_evaluation else (0.5, [1.0])
    found = [(one["reward"], [part["value"] for part in one["components"]]) for one in shown]
    assert found == [newest, (None, [1.0])]


async def test_a_complete_group_awaits_credit_until_its_verdict_or_the_end_of_its_run(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    async def awaits(group: tables.Group) -> object:
        return (await api_http.get(f"/v1/groups/{group.id}", params={"calls": 0})).json()["awaits_credit"]

    run = await builders.add_run(database)
    groups = [(await builders.add_group(database, run, number, state="complete"))[0] for number in range(2)]
    assert await awaits((await builders.add_group(database, run, 2))[0]) is False
    await builders.add_credited_group(database, groups[0])
    assert [await awaits(group) for group in groups] == [False, True]
    await builders.end_run(database, run)
    assert await awaits(groups[1]) is False


async def test_each_further_policy_has_a_verdict_of_its_own(api_http: httpx.AsyncClient, database: Database) -> None:
    run = await builders.add_run(database)
    group, _ = await builders.add_group(database, run)
    others = [await builders.add_run(database, lead_run_id=run.id, policy=name) for name in ("critic", "writer")]
    await builders.add_credited_group(database, group, has_variance=False, reason="nothing trains")
    await builders.add_credited_group(database, group, run_id=others[0].id)
    async with database.session() as session:
        session.add(tables.Step(run_id=others[0].id, number=3, metrics={}, checkpoint="", started_at=run.created_at))
        session.add(tables.StepGroup(group_id=group.id, run_id=others[0].id, step=3, verdict="trained"))
    found = (await api_http.get(f"/v1/groups/{group.id}")).json()
    assert (found["reason"], found["step"], found["consumption"]) == ("nothing trains", None, None)
    nothing = dict.fromkeys(("verdict", "reason", "has_variance", "step", "consumption"))
    credited = {"verdict": "credited", "has_variance": True, "step": 3, "consumption": "trained"}
    assert found["policies"] == [{**nothing, "name": "critic", **credited}, {**nothing, "name": "writer"}]


async def test_an_unknown_group_is_named_with_the_remedy(api_http: httpx.AsyncClient) -> None:
    answer = await api_http.get("/v1/groups/nowhere")
    assert answer.status_code == 404 and "names its group" in answer.json()["detail"]
