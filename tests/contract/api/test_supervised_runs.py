"""Runs of supervised fine-tuning over HTTP: refusals with their path, and deletion of the runs that they train on."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from leyden.libs.contracts import ids
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.libs.store.engines import Pool, write_pools
from leyden.libs.store.runs.retention import prune_run
from leyden.services.controller.runs.stopping import idle_runs
from leyden.services.credit.worker import demonstrate_pending
from tests.contract.api.test_runs import create, row_of, set_phase
from tests.contract.credit.test_worker import complete
from tests.support import builders


async def ended_source(http: httpx.AsyncClient, database: Database, **changes: Any) -> str:
    """An ended run with one rollout, which earned 1."""
    run = await create(http, **changes)
    row = await row_of(database, run["id"])
    group, (rollout,) = await builders.add_group(database, row, size=1)
    await builders.add_call(database, rollout, [1, 2], [3])
    await builders.finish_rollout(database, rollout, reward=1.0)
    await complete(database, group)
    await set_phase(database, row.id, "completed")
    return row.id


def document(run_id: str, **changes: Any) -> dict[str, Any]:
    return builders.run_document(algorithm={"type": "sft", "runs": [run_id]} | changes)


async def test_a_run_on_demonstrations_keeps_the_runs_that_they_are_of(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    source = await ended_source(api_http, database)
    made = await api_http.post("/v1/runs", json=document(source))
    assert made.status_code == 201, made.text
    run_id = made.json()["id"]
    assert await demonstrate_pending(database) == 1
    refused = await api_http.delete(f"/v1/runs/{source}")
    assert refused.status_code == 409
    assert f"its rollouts are demonstrations of run {run_id}, delete that one first" in refused.json()["detail"]
    (sample,) = (await api_http.get(f"/v1/runs/{run_id}/samples")).json()["items"]
    assert sample["rollout_id"] == f"{source}.0.0"


async def test_steps_show_the_rewards_of_the_demonstrations_alone(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    source = await row_of(database, (await create(api_http))["id"])
    group, rollouts = await builders.add_group(database, source, size=3)
    for rollout, reward in zip(rollouts, (1.0, 0.5, 0.0), strict=True):
        await builders.add_call(database, rollout, [1, 2], [3])
        await builders.finish_rollout(database, rollout, reward=reward, facts={"right": reward})
    await complete(database, group)
    await set_phase(database, source.id, "completed")
    made = await api_http.post("/v1/runs", json=document(source.id))
    run_id = made.json()["id"]
    assert await demonstrate_pending(database) == 1
    async with database.session() as session:
        now = datetime.now(tz=UTC)
        session.add(tables.Step(run_id=run_id, number=1, metrics={}, checkpoint="", started_at=now))
        session.add(tables.StepGroup(group_id=group.id, run_id=run_id, step=1, verdict="trained"))
        session.add(tables.StepSample(run_id=run_id, sample_id=ids.sample_id(rollouts[0].id, 0), step=1))
    [step] = (await api_http.get(f"/v1/runs/{run_id}/steps")).json()["items"]
    assert (step["rollouts"], step["reward_mean"], step["facts"]) == (1, 1.0, {"right": 1.0})
    [curve] = (await api_http.get("/v1/curves", params={"run": run_id})).json()["items"]
    assert curve["points"] == [[1, 1.0]]
    assert (await api_http.get(f"/v1/runs/{run_id}")).json()["progress"]["reward_mean"] == 1.0
    names = (await api_http.get(f"/v1/runs/{run_id}/metrics")).json()["names"]
    # Another run waited for them, and no version of this one sampled them.
    assert "reward_mean" in names and not {"queue_seconds", "credit_seconds", "lag.1.tokens"} & set(names)


async def test_a_run_that_gets_no_demonstration_fails_with_the_cause(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    async def causes() -> dict[str, str]:
        async with database.read() as session:
            return await idle_runs(session, 10)

    source = await ended_source(api_http, database)
    excluded, lost = [(await api_http.post("/v1/runs", json=document(source))).json()["id"] for _ in range(2)]
    for run_id in (excluded, lost):
        await set_phase(database, run_id, "running")
    assert await causes() == {}
    async with database.read() as session:
        group = await session.get_one(tables.Group, f"{source}.0")
    await prune_run(database, source)
    broken = {"verdict": "excluded", "reason": "a record is broken"}
    await builders.add_credited_group(database, group, run_id=excluded, **broken)
    found = await causes()
    assert found[excluded] == "credit excluded every group, so that nothing trains: a record is broken"
    assert found[lost].startswith(f"none of the rollouts of {source} is a demonstration any more")


async def test_a_run_with_one_good_demonstration_goes_on_though_credit_excluded_the_newest(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    source, other = [await ended_source(api_http, database) for _ in range(2)]
    run_id = (await api_http.post("/v1/runs", json=document(source, runs=[source, other]))).json()["id"]
    await set_phase(database, run_id, "running")
    async with database.read() as session:
        good, bad = [await session.get_one(tables.Group, f"{one}.0") for one in (source, other)]
    await builders.add_credited_group(database, good, run_id=run_id)
    await builders.add_credited_group(database, bad, run_id=run_id, verdict="excluded", reason="a record is broken")
    async with database.read() as session:
        assert await idle_runs(session, 1) == {}


async def test_a_run_none_of_whose_demonstrations_trains_fails_after_its_first_step(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    """Its first step judges all that cannot train: a second one would have nothing, and wait for ever."""
    source = await ended_source(api_http, database)
    roles = {"roles": [{"name": "judge", "agent_name": "j"}], "train": ["judge"]}
    made = await api_http.post("/v1/runs", json={**document(source), **roles})
    assert made.status_code == 201, made.text
    run_id = made.json()["id"]
    assert await demonstrate_pending(database) == 1
    await set_phase(database, run_id, "running")
    async with database.session() as session:
        now = datetime.now(tz=UTC)
        session.add(tables.Step(run_id=run_id, number=1, metrics={}, checkpoint="", started_at=now))
        session.add(tables.StepGroup(group_id=f"{source}.0", run_id=run_id, step=1, verdict="untrainable"))
    async with database.read() as session:
        causes = await idle_runs(session, 10)
    assert causes[run_id].startswith("no token of step 1 can be trained: of 1 model calls")
    # Why its rollouts taught nothing is told of the source's own list, not of this run's.
    assert (await api_http.get(f"/v1/runs/{run_id}/causes")).json()["items"] == []


@pytest.mark.parametrize(
    ("changes", "place", "words"),
    [
        ({"min_reward": 2.0}, "algorithm.runs", "earned 2, or their calls are pruned"),
        ({"runs": []}, "algorithm.runs", "no finished rollout of these runs"),
        ({"runs": ["run-unknown"]}, "algorithm.runs.0", "no run has the id 'run-unknown'"),
    ],
)
async def test_a_run_without_demonstrations_is_refused(
    api_http: httpx.AsyncClient, database: Database, changes: dict[str, Any], place: str, words: str
) -> None:
    source = await ended_source(api_http, database)
    refused = await api_http.post("/v1/runs", json=document(source, **changes))
    assert refused.status_code == 422
    (error,) = refused.json()["errors"]
    assert (error["path"], words in error["message"]) == (place, True)


async def test_a_run_of_another_pool_has_other_tokens(api_http: httpx.AsyncClient, database: Database) -> None:
    source = await ended_source(api_http, database)
    async with database.session() as session:
        await write_pools(session, [Pool("default"), Pool("second", model_path="/models/other")])
    refused = await api_http.post("/v1/runs", json={**document(source), "pool": "second"})
    assert refused.json()["errors"][0]["path"] == "algorithm.runs.0"
    assert "its rollouts have the tokens of pool 'default'" in refused.json()["detail"]


async def test_a_dataset_of_conversations_with_a_bad_row_is_refused_by_its_number(api_http: httpx.AsyncClient) -> None:
    good = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello."}]}
    rows = "\n".join(json.dumps(row) for row in (good, {"messages": good["messages"][:1]}))
    await api_http.post("/v1/datasets", params={"name": "chats"}, content=rows)
    refused = await api_http.post(
        "/v1/runs",
        json=builders.run_document(
            dataset="chats",
            roles=[{"name": "writer", "policy": "shown"}],
            policies={"shown": {"provider": "conversation"}},
            training={"steps": 0},
        ),
    )
    assert refused.status_code == 422
    (error,) = refused.json()["errors"]
    assert error["path"] == "dataset"
    assert "task 1 of dataset 'chats' (row 2 of the upload) is no conversation" in error["message"]
    assert "add the answer" in error["message"]
