"""Windows of a call's tokens in the API: text, log-probability, mask and advantage of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tokenizers import Tokenizer

from leyden.libs.contracts import ids
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from tests.support import builders


async def tokens(http: httpx.AsyncClient, call: tables.ModelCall, **query: Any) -> Any:
    answer = await http.get(f"/v1/rollouts/{call.rollout_id}/calls/{call.id}/tokens", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_each_token_has_its_numbers_and_the_mask_and_advantage_of_the_row_that_trains_it(
    api_http: httpx.AsyncClient, database: Database, tiny_model: Path
) -> None:
    run = await builders.add_run(database)
    group, [rollout, _] = await builders.add_group(database, run)
    first = await builders.add_call(database, rollout, (40, 41, 42), (50, 51, 52), logprobs=(-0.5, -1.5, 0.0))
    later = await builders.add_call(
        database, rollout, (60,), (61,), parent_call_id=first.id, shared_tokens=6, prompt_tokens=7, policy_version=3
    )
    found = await tokens(api_http, first)
    assert (found["reason"], {one["trains"] for one in found["tokens"]}) == (
        "credit has not computed its group yet",
        {None},
    )
    assert [one["text"] for one in found["tokens"]] == [None] * 3

    await builders.add_policy_version(database, run, 0, path=str(tiny_model))
    await builders.finish_rollout(database, rollout)
    await builders.add_credited_group(database, group)
    # One row trains both calls; a grammar forced the third token of the first.
    mask = np.array([0, 0, 0, 1, 1, 0, 0, 1], np.uint8)
    sample = await builders.add_sample(
        database,
        rollout,
        (40, 41, 42, 50, 51, 52, 60),
        (61,),
        mask=mask.tobytes(),
        advantages=np.where(mask, [0, 0, 0, 0.5, 0.25, 9, 0, -1], 0).astype("<f4").tobytes(),
    )
    async with database.session() as session:
        moment = sample.created_at
        session.add(tables.Step(run_id=run.id, number=2, metrics={}, checkpoint="", started_at=moment))
        # One for each trained token of the row; the step did not compute the second one.
        logprobs = np.asarray([-0.75, np.nan, -2.5], "<f4").tobytes()
        names = {"run_id": run.id, "sample_id": ids.sample_id(rollout.id, 0)}
        entropies = np.asarray([1.5, np.nan, 0.25], "<f4").tobytes()
        session.add(tables.StepSample(**names, step=2, trainer_logprobs=logprobs, trainer_entropies=entropies))

    found = await tokens(api_http, first, start=2, limit=3)
    assert (found["start"], found["prompt_tokens"], found["completion_tokens"]) == (2, 3, 3)
    assert (found["reason"], found["step"]) == (None, 2)
    shown = [
        (one["position"], one["id"], one["sampled"], one["logprob"], one["trains"], one["advantage"])
        for one in found["tokens"]
    ]
    assert shown == [
        (2, 42, False, None, False, None),
        (3, 50, True, -0.5, True, 0.5),
        (4, 51, True, -1.5, True, 0.25),
    ]
    assert [one["trainer_logprob"] for one in found["tokens"]] == [None, -0.75, None]
    assert [one["trainer_entropy"] for one in found["tokens"]] == [None, 1.5, None]
    texts = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    assert [one["text"] for one in found["tokens"]] == [texts.decode([one]) for one in (42, 50, 51)]

    [forced] = (await tokens(api_http, first, start=5))["tokens"]
    assert (forced["trains"], forced["advantage"]) == (False, None)
    [last] = (await tokens(api_http, later))["tokens"]
    assert (last["position"], last["policy_version"], last["trains"], last["advantage"]) == (7, 3, True, -1.0)
    assert (last["trainer_logprob"], last["trainer_entropy"]) == (-2.5, 0.25)
    assert [one["id"] for one in (await tokens(api_http, later, start=0))["tokens"]] == [
        *range(40, 43),
        50,
        51,
        52,
        60,
        61,
    ]
    beyond = await tokens(api_http, later, start=2**31 - 1)
    assert (beyond["start"], beyond["tokens"], beyond["step"]) == (8, [], 2)


async def test_a_call_with_the_answer_of_another_one_has_its_own_row(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    run = await builders.add_run(database)
    group, [rollout, _] = await builders.add_group(database, run)
    # Two agents of one rollout gave the same answer to other questions of the same length.
    calls = [await builders.add_call(database, rollout, prompt, (50, 51)) for prompt in ((40, 41), (42, 43))]
    await builders.finish_rollout(database, rollout)
    await builders.add_credited_group(database, group)
    for branch, (prompt, advantage) in enumerate((((40, 41), 0.5), ((42, 43), -0.5))):
        await builders.add_sample(database, rollout, prompt, (50, 51), branch=branch, advantage=advantage)
    shown = [(await tokens(api_http, call))["tokens"] for call in calls]
    assert [[one["advantage"] for one in row] for row in shown] == [[0.5, 0.5], [-0.5, -0.5]]


CAUSES = ["untrainable", "evaluation", "greedy", "reroll", "attempt", "lost", "excluded", "verdict", "trained"]


@pytest.mark.parametrize("cause", CAUSES)
async def test_a_call_that_does_not_train_says_why(api_http: httpx.AsyncClient, database: Database, cause: str) -> None:
    run = await builders.add_run(database)
    columns: dict[str, Any] = {}
    if cause == "evaluation":
        columns["evaluation_id"] = ids.evaluation_id(run.id, 1)
        async with database.session() as session:
            values = {"dataset_id": run.dataset_id, "policy_version": 0, "rollouts_per_task": 1}
            session.add(tables.Evaluation(id=columns["evaluation_id"], run_id=run.id, number=1, **values))
    greedy = 0 if cause == "greedy" else None
    group, [rollout, other] = await builders.add_group(database, run, greedy=greedy, **columns)
    if cause == "attempt":
        await builders.add_attempt(database, rollout, 2, state="expired")
    untrainable = {"trainable": False, "untrainable_reason": "temperature"} if cause == "untrainable" else {}
    call = await builders.add_call(database, rollout, attempt=2 if cause == "attempt" else 1, **untrainable)
    if cause != "lost":
        await builders.finish_rollout(database, rollout)
    if cause == "excluded":
        await builders.add_credited_group(database, group, verdict="excluded", reason="it broke")
    verdicts = {"verdict": "no_variance", "trained": "trained", "reroll": "trained", "lost": "trained"}
    if cause in verdicts:
        await builders.add_credited_group(database, group)
        async with database.session() as session:
            session.add(tables.StepGroup(group_id=group.id, run_id=run.id, step=1, verdict=verdicts[cause]))
            row = await session.get_one(tables.Rollout, rollout.id)
            if cause == "reroll":
                row.rerolls_of = other.id
            if cause == "lost":
                row.state, row.reason = "excluded", "its pod was lost"
    found = await tokens(api_http, call)
    words = {
        "untrainable": "temperature",
        "evaluation": "evaluation",
        "greedy": "greedy",
        "attempt": "attempt 1",
        "excluded": "it broke",
        "verdict": "no_variance",
        "trained": "credit made no row of it",
        "reroll": f"its rollout is a re-roll: a sample of what {other.id} was worth",
        "lost": "its rollout was excluded: its pod was lost",
    }
    assert words[cause] in found["reason"]
    assert [one["trains"] for one in found["tokens"]] == [False, False]


async def test_a_call_has_the_verdict_of_the_policy_that_answered_it(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    names = ("critic", "frozen")
    config = builders.run_document(
        roles=[{"name": f"a {name}", "agent_name": name, "policy": name} for name in names],
        policies={"critic": {"pool": "second"}, "frozen": {"pool": "third", "frozen": True}},
    )
    run = await builders.add_run(database, config=config)
    shared = {"dataset_id": run.dataset_id, "lead_run_id": run.id}
    critic = await builders.add_run(database, policy="critic", **shared)
    still = builders.run_document(training={"steps": 0})
    await builders.add_run(database, policy="frozen", config=still, **shared)
    group, [rollout, _] = await builders.add_group(database, run)
    calls = [await builders.add_call(database, rollout, role=role) for role in (None, "a critic", "a frozen")]
    await builders.finish_rollout(database, rollout)

    async def reasons() -> list[str]:
        return [(await tokens(api_http, call))["reason"] for call in calls]

    pending = "credit has not computed its group yet"
    assert await reasons() == [pending, pending, "its policy 'frozen' does not train"]
    await builders.add_credited_group(database, group)
    await builders.add_credited_group(database, group, run_id=critic.id)
    async with database.session() as session:
        session.add(tables.StepGroup(group_id=group.id, run_id=critic.id, step=1, verdict="no_variance"))
    assert await reasons() == [
        "credit made no row of it: its agent did not use the answer, or it trains nothing",
        "the verdict on its group: no_variance",
        "its policy 'frozen' does not train",
    ]


async def test_an_unknown_call_is_named(api_http: httpx.AsyncClient, database: Database) -> None:
    _, [rollout, _] = await builders.add_group(database, await builders.add_run(database))
    answer = await api_http.get(f"/v1/rollouts/{rollout.id}/calls/none/tokens")
    assert answer.status_code == 404 and "list its calls" in answer.json()["detail"]
