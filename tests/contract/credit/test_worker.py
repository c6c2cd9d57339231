"""The credit worker on Postgres: its input and output rows, concurrent workers, and kills."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import numpy as np
import pytest
from sqlalchemy import select, text, update

from leyden.libs.contracts.api.rollouts import RewardRequest
from leyden.libs.contracts.config import RunConfig
from leyden.libs.contracts.states import GATEWAY_SCOPE
from leyden.libs.service import Checks
from leyden.libs.store import samples as store
from leyden.libs.store import tables
from leyden.libs.store.database import Database, Refused, StoreAway
from leyden.libs.store.read import views
from leyden.libs.store.runs.actions import create_run
from leyden.services.credit import worker
from leyden.services.credit.settings import Settings
from leyden.services.credit.worker import credit_pending, work
from leyden.services.trainer.rows.batch import decode_sample
from tests.support.builders import (
    add_attempt,
    add_call,
    add_credited_group,
    add_dataset,
    add_delivery,
    add_group,
    add_outcome,
    add_run,
    add_tool_span,
    finish_rollout,
    run_document,
)
from tests.support.waiting import eventually

CREDIT = {
    "rule": {"type": "discounted", "gamma": 0.5},
    "air": {"weights": {"search": 0.2}, "failure": 0.0},
    "baseline": {"type": "mean"},
}


async def add_run_with_credit(database: Database, **credit: Any) -> tables.Run:
    return await add_run(database, config=run_document(credit={**CREDIT, **credit}))


async def complete(database: Database, group: tables.Group) -> None:
    async with database.session() as session:
        row = await session.get_one(tables.Group, group.id)
        row.state, row.finished_at = "complete", datetime.now(tz=UTC)


async def add_complete_group(
    database: Database, run: tables.Run, number: int = 0, rewards: Sequence[float] = (1.0, 0.0)
) -> tables.Group:
    """Rollouts of two calls each; the first used a search, which worked for the first sibling alone."""
    group, rollouts = await add_group(database, run, number, size=len(rewards))
    for sibling, (rollout, reward) in enumerate(zip(rollouts, rewards, strict=True)):
        asked = {"tool_calls": [{"id": "call_1", "name": "search", "arguments": "{}"}]}
        answer = {"role": "assistant", "content": "", **asked}
        first = await add_call(database, rollout, [1, 2], [3, 4], policy_version=1, temperature=0.8, answer=answer)
        status = "error" if sibling else "ok"
        await add_tool_span(database, rollout, "search", status=status, response_id=f"chatcmpl-{first.id}")
        await add_call(database, rollout, [1, 2, 3, 4, 5], [6], policy_version=2, temperature=0.8)
        await finish_rollout(database, rollout, reward=reward)
    await complete(database, group)
    return group


async def rows(database: Database, table: Any, *order: Any) -> Sequence[Any]:
    async with database.read() as session:
        return (await session.scalars(select(table).order_by(*order))).all()


async def test_a_complete_group_becomes_credits_and_samples(database: Database) -> None:
    run = await add_run_with_credit(database)
    group = await add_complete_group(database, run)
    assert await credit_pending(database, 8) == [group.id]
    assert await credit_pending(database, 8) == []
    (verdict,) = await rows(database, tables.GroupCredit)
    assert (verdict.verdict, verdict.has_variance, verdict.counted_siblings) == ("credited", True, 2)
    assert (verdict.min_policy_version, verdict.reward_mean, verdict.reward_std) == (1, 0.5, 0.5)
    # Sibling 0: G2 = 1, G1 = 0.2 + 0.5; sibling 1: 0 and 0. Values 0.85 and 0, mean 0.425.
    found = await rows(database, tables.CallCredit, tables.CallCredit.rollout_id, tables.CallCredit.depth)
    assert [one.return_ for one in found] == pytest.approx([0.7, 1.0, 0.0, 0.0])
    assert [one.advantage for one in found] == pytest.approx([0.275, 0.575, -0.425, -0.425])
    assert [one.tools["calls"] for one in found] == [
        [{"tool": "search", "status": "ok", "source": "response_id"}],
        [],
        [{"tool": "search", "status": "error", "source": "response_id"}],
        [],
    ]
    assert [one.state_key for one in found] == ["", "search:ok", "", "search:error"]
    first, second = await rows(database, tables.Sample, tables.Sample.id)
    assert (first.id, first.group_id, first.length, first.trained_tokens) == (f"{group.id}.0:0", group.id, 6, 3)
    assert np.frombuffer(first.token_ids, "<i4").tolist() == [1, 2, 3, 4, 5, 6]
    assert np.frombuffer(first.mask, np.uint8).tolist() == [0, 0, 1, 1, 0, 1]
    assert np.frombuffer(first.policy_versions, "<i4").tolist() == [-1, -1, 1, 1, -1, 2]
    expected = np.array([0, 0, 0.275, 0.275, 0, 0.575])
    np.testing.assert_allclose(np.frombuffer(first.advantages, "<f4"), expected, rtol=1e-6)
    np.testing.assert_allclose(
        np.frombuffer(second.advantages, "<f4"), np.array([0, 0, 1, 1, 0, 1]) * -0.425, rtol=1e-6
    )


async def test_a_reward_for_a_call_of_another_attempt_trains_nothing(
    database: Database, api_http: httpx.AsyncClient
) -> None:
    """A judge rewards a call, its attempt is lost, and the next attempt does something else."""
    run = await add_run_with_credit(database, rule={"type": "identical"}, air=None)
    group, (retried, other) = await add_group(database, run)
    await add_attempt(database, retried, 1, state="expired")
    lost = await add_call(database, retried, [1], [2])
    body = {"key": "judge", "value": 1.0, "call_id": lost.id}
    response = await api_http.post(f"/v1/rollouts/{retried.id}/rewards", json=body)
    assert (response.status_code, response.json()["attempt"]) == (201, 1)
    await add_attempt(database, retried, 2, state="settled")
    await add_outcome(database, retried, 2, reward=0.0)
    await add_call(database, retried, [1], [3], attempt=2)
    async with database.session() as session:
        row = await session.get_one(tables.Rollout, retried.id)
        row.state, row.attempt, row.reward, row.reason = "finished", 2, 0.0, "succeeded"
    await add_call(database, other, [1], [4])
    await finish_rollout(database, other, reward=0.0)
    await complete(database, group)
    await credit_pending(database, 8)
    assert [one.return_ for one in await rows(database, tables.CallCredit)] == [0.0, 0.0]
    assert (await api_http.get(f"/v1/rollouts/{retried.id}")).json()["reward"] == 0.0


async def test_a_group_is_credited_though_one_that_does_not_count_was_rewarded(database: Database) -> None:
    run = await add_run_with_credit(database)
    group, rollouts = await add_group(database, run, size=3)
    for rollout in rollouts[:2]:
        await add_call(database, rollout)
        await finish_rollout(database, rollout)
    async with database.session() as session:
        (await session.get_one(tables.Rollout, rollouts[2].id)).state = "excluded"
        session.add(tables.ExternalReward(rollout_id=rollouts[2].id, key="judge", name="judge", value=1.0))
    await complete(database, group)
    assert await credit_pending(database, 8) == [group.id]


async def test_samples_of_a_run_with_a_critic_hold_the_rewards_of_their_calls(database: Database) -> None:
    document = run_document(
        credit={"air": {"weights": {"search": 0.2}, "failure": 0.0}, "baseline": {"type": "value"}},
        algorithm={"type": "ppo_clip", "critic": {}},
    )
    run = await add_run(database, config=document)
    await add_complete_group(database, run)
    await credit_pending(database, 8)
    first, other = await rows(database, tables.Sample, tables.Sample.rollout_id)
    calls = [call.id for call in await rows(database, tables.ModelCall, tables.ModelCall.sequence)]
    assert first.calls == [
        {"id": calls[0], "parent": None, "reward": 0.2, "share": 1.0, "begin": 2, "end": 3},
        {"id": calls[1], "parent": calls[0], "reward": 1.0, "share": 1.0, "begin": 5, "end": 5},
    ]
    assert decode_sample(first).calls[1].reward == 1.0
    assert [call["reward"] for call in other.calls] == [0.0, 0.0]


@pytest.mark.parametrize("shape", ["chat_completions", "responses", "messages", "smolagents"])
async def test_a_run_without_telemetry_earns_rewards_from_the_results_that_agents_send_back(
    database: Database, shape: str
) -> None:
    run = await add_run_with_credit(database, air={"weights": {"search": 0.2}, "null": "nothing"})
    group, rollouts = await add_group(database, run, size=3)
    texts = ['{"hits": 3}', "Error executing tool 'search' with arguments {}: ValueError: no index", "None"]
    for rollout, shown in zip(rollouts, texts, strict=True):
        asked = {"tool_calls": [{"id": "call_1", "name": "search", "arguments": "{}"}]}
        answer = {"role": "assistant", "content": "", **asked}
        await add_call(database, rollout, [1, 2], [3, 4], answer=answer)
        heading = "Error:\n" if shown.startswith("Error") else "Observation:\n"
        result: dict[str, Any] = {"role": "tool", "content": shown, "tool_call_id": "call_1"}
        if shape == "smolagents":
            result = {"role": "user", "content": f"Find it. Observation: none\n{heading}{shown}"}
        if shape == "messages" and heading == "Error:\n":
            result |= {"content": "no index", "is_error": True}
        turns = [{"role": "user", "content": "Find it."}, answer, result]
        await add_call(database, rollout, [1, 2, 3, 4, 5], [6], turns=turns)
        await finish_rollout(database, rollout, reward=0.0)
    await complete(database, group)
    assert await credit_pending(database, 8) == [group.id]
    found = await rows(database, tables.CallCredit, tables.CallCredit.rollout_id, tables.CallCredit.depth)
    uses = [(one.tools["calls"][0]["status"], one.tools["calls"][0]["source"]) for one in found[::2]]
    assert uses == [("ok", "result"), ("error", "result"), ("unset", "result")]
    assert [one.intermediate_reward for one in found[::2]] == pytest.approx([0.2, -0.2, 0.0])


async def test_a_tool_hangs_where_its_result_comes_too_late_after_the_answer(database: Database) -> None:
    run = await add_run_with_credit(database, air={"weights": {"search": 0.2}, "tool_seconds": 2.0})
    group, rollouts = await add_group(database, run, size=2)
    answer = {"role": "assistant", "content": "", "tool_calls": [{"id": "call_1", "name": "search", "arguments": "{}"}]}
    turns = [{"role": "user", "content": "?"}, answer, {"role": "tool", "content": "7", "tool_call_id": "call_1"}]
    for rollout, seconds in zip(rollouts, (2.0, 2.5), strict=True):
        first = await add_call(database, rollout, [1, 2], [3, 4], answer=answer, sequence=10**9)
        await add_call(database, rollout, [1, 2, 3, 4, 5], [6], turns=turns, sequence=int(10**9 * (2.0 + seconds)))
        await add_delivery(database, first, delivered=True)
        await finish_rollout(database, rollout, reward=0.0)
    await complete(database, group)
    assert await credit_pending(database, 8) == [group.id]
    found = await rows(database, tables.CallCredit, tables.CallCredit.rollout_id, tables.CallCredit.depth)
    uses = [(one.tools["calls"][0]["status"], one.tools["calls"][0]["source"]) for one in found[::2]]
    assert uses == [("ok", "result"), ("error", "hung")]


async def test_only_complete_training_groups_of_active_runs_are_processed(database: Database) -> None:
    run = await add_run_with_credit(database)
    await add_group(database, run, 0)
    cancelled, _ = await add_group(database, run, 1)
    ended = await add_run_with_credit(database)
    await add_complete_group(database, ended)
    async with database.session() as session:
        (await session.get_one(tables.Group, cancelled.id)).state = "cancelled"
        (await session.get_one(tables.RunStatus, ended.id)).phase = "failed"
        session.add(
            tables.Evaluation(
                id=f"{run.id}.e0", run_id=run.id, number=0, dataset_id=run.dataset_id, rollouts_per_task=1
            )
        )
    group, rollouts = await add_group(database, run, 0, evaluation_id=f"{run.id}.e0")
    for rollout in rollouts:
        await finish_rollout(database, rollout)
    await complete(database, group)
    assert await credit_pending(database, 8) == []


async def test_excluded_rollouts_are_left_out_and_never_count_as_zero(database: Database) -> None:
    run = await add_run_with_credit(database, rule={"type": "identical"}, air=None)
    group, rollouts = await add_group(database, run, size=3)
    for rollout, reward in zip(rollouts, (1.0, 0.5, None), strict=True):
        await add_call(database, rollout)
        if reward is not None:
            await finish_rollout(database, rollout, reward=reward)
    async with database.session() as session:
        (await session.get_one(tables.Rollout, rollouts[2].id)).state = "excluded"
    await complete(database, group)
    await credit_pending(database, 8)
    (verdict,) = await rows(database, tables.GroupCredit)
    assert (verdict.counted_siblings, verdict.reward_mean) == (2, 0.75)
    found = await rows(database, tables.CallCredit, tables.CallCredit.rollout_id)
    assert [(one.rollout_id, one.advantage) for one in found] == [(rollouts[0].id, 0.25), (rollouts[1].id, -0.25)]


@pytest.mark.parametrize("counts", [True, False])
async def test_a_greedy_rollout_is_the_baseline_of_its_siblings(database: Database, counts: bool) -> None:
    run = await add_run_with_credit(database, rule={"type": "identical"}, air=None, baseline={"type": "remax"})
    group, rollouts = await add_group(database, run, size=3, greedy=2)
    for rollout, reward in zip(rollouts, (1.0, 0.0, 0.25 if counts else None), strict=True):
        await add_call(database, rollout)
        if reward is not None:
            await finish_rollout(database, rollout, reward=reward)
    if not counts:
        async with database.session() as session:
            (await session.get_one(tables.Rollout, rollouts[2].id)).state = "excluded"
    await complete(database, group)
    await credit_pending(database, 8)
    (verdict,) = await rows(database, tables.GroupCredit)
    found = await rows(database, tables.CallCredit, tables.CallCredit.rollout_id)
    samples = await rows(database, tables.Sample, tables.Sample.rollout_id)
    if counts:
        assert (verdict.counted_siblings, verdict.reward_mean) == (2, 0.5)
        assert [(one.rollout_id, one.advantage) for one in found] == [(rollouts[0].id, 0.75), (rollouts[1].id, -0.25)]
        assert [one.rollout_id for one in samples] == [rollouts[0].id, rollouts[1].id]
    else:
        assert (verdict.verdict, found, samples) == ("excluded", [], [])
        assert verdict.reason == "its greedy rollout, the baseline of the others, does not count"


async def test_a_group_with_too_few_siblings_is_excluded(database: Database) -> None:
    run = await add_run_with_credit(database)
    await add_complete_group(database, run, rewards=(1.0,))
    await credit_pending(database, 8)
    (verdict,) = await rows(database, tables.GroupCredit)
    assert (verdict.verdict, verdict.min_policy_version) == ("excluded", None)
    assert "min_siblings" in verdict.reason
    assert await rows(database, tables.Sample) == []


async def test_only_the_counted_attempt_is_seen(database: Database) -> None:
    run = await add_run_with_credit(database, rule={"type": "identical"}, air=None)
    group, rollouts = await add_group(database, run)
    for rollout, reward in zip(rollouts, (1.0, 0.0), strict=True):
        await add_call(database, rollout, attempt=2)
        await add_call(database, rollout)
        await finish_rollout(database, rollout, reward=reward)
        async with database.session() as session:
            for attempt, value in ((1, 0.5), (2, 100.0)):
                given = {"key": "k", "run_id": run.id, "source": "endpoint", "name": "r", "value": value}
                session.add(tables.Reward(rollout_id=rollout.id, attempt=attempt, **given))
            session.add(tables.ExternalReward(rollout_id=rollout.id, key="k", name="human", value=0.25))
    await complete(database, group)
    await credit_pending(database, 8)
    (verdict,) = await rows(database, tables.GroupCredit)
    assert verdict.reward_mean == 1.25
    assert len(await rows(database, tables.CallCredit)) == 2


async def test_the_full_scan_finds_groups_that_were_skipped(database: Database) -> None:
    run = await add_run_with_credit(database)
    left, fresh = [await add_complete_group(database, run, number) for number in range(2)]
    async with database.session() as session:
        for group, ago in ((left, 86_400), (fresh, 0)):
            row = await session.get_one(tables.Group, group.id)
            row.finished_at = datetime.now(tz=UTC) - timedelta(seconds=ago)
    assert await credit_pending(database, 8, recent=True) == [fresh.id]
    assert await credit_pending(database, 8, recent=True) == []
    assert await credit_pending(database, 8) == [left.id]


async def test_two_workers_credit_every_group_once(database: Database) -> None:
    run = await add_run_with_credit(database)
    groups = [(await add_complete_group(database, run, number)).id for number in range(6)]
    found: list[str] = []

    async def drain() -> None:
        while batch := await credit_pending(database, 1):
            found.extend(batch)

    await asyncio.gather(drain(), drain(), drain())
    assert sorted(found) == sorted(groups)
    assert len(await rows(database, tables.GroupCredit)) == 6
    assert len(await rows(database, tables.Sample)) == 12


async def test_a_second_verdict_is_refused_with_all_it_brings(database: Database) -> None:
    run = await add_run_with_credit(database)
    await add_complete_group(database, run)
    async with database.session() as session:
        groups = await store.pending_groups(session, await store.claim_groups(session, 1))
        results = worker.compute(groups, await store.load_siblings(session, groups))
        await worker._write(session, results)
    before = await rows(database, tables.Sample, tables.Sample.id)
    with pytest.raises(Refused):
        async with database.session() as session:
            await worker._write(session, results)
    assert [row.token_ids for row in await rows(database, tables.Sample, tables.Sample.id)] == [
        row.token_ids for row in before
    ]


async def test_a_worker_killed_before_the_commit_leaves_the_group_to_another(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await add_run_with_credit(database)
    group = await add_complete_group(database, run)
    written = worker.write_credit

    async def dies(*arguments: Any) -> None:
        await written(*arguments)
        raise StoreAway("gone")

    with monkeypatch.context() as patch:
        patch.setattr(worker, "write_credit", dies)
        with pytest.raises(StoreAway):
            await credit_pending(database, 1)
    assert await rows(database, tables.Sample) == []
    assert await credit_pending(database, 1) == [group.id]


async def test_a_broken_record_excludes_its_group_and_no_other(database: Database) -> None:
    run = await add_run_with_credit(database)
    broken, rollouts = await add_group(database, run, 0)
    for rollout in rollouts:
        await add_call(database, rollout, generator_logprobs=b"\0\0\0\0")
        await finish_rollout(database, rollout)
    await complete(database, broken)
    good = await add_complete_group(database, run, 1)
    assert set(await credit_pending(database, 8)) == {broken.id, good.id}
    verdicts = {row.group_id: row.verdict for row in await rows(database, tables.GroupCredit)}
    assert verdicts == {broken.id: "excluded", good.id: "credited"}


@pytest.mark.parametrize("shared", [4, 3])
async def test_calls_that_share_tokens_of_others_are_credited_like_complete_ones(
    database: Database, shared: int
) -> None:
    run = await add_run_with_credit(database)
    groups, samples = [], []
    for number, is_complete in enumerate((True, False)):
        group, rollouts = await add_group(database, run, number)
        for rollout, reward in zip(rollouts, (1.0, 0.0), strict=True):
            first = await add_call(database, rollout, (1, 2), (3, 4))
            prompt, columns = (1, 2, 3, 4, 5), dict[str, Any]()
            if not is_complete:
                columns = {"parent_call_id": first.id, "shared_tokens": shared, "prompt_tokens": 5}
            await add_call(database, rollout, prompt if is_complete else prompt[shared:], (6,), **columns)
            await finish_rollout(database, rollout, reward=reward)
        await complete(database, group)
        groups.append(group.id)
    assert set(await credit_pending(database, 8)) == set(groups)
    for group_id in groups:
        made = [row for row in await rows(database, tables.Sample, tables.Sample.id) if row.group_id == group_id]
        samples.append([(row.length, row.token_ids, row.mask, row.advantages, row.generator_logprobs) for row in made])
    assert samples[0] == samples[1]
    assert [len(row[1]) for row in samples[1]] == [24, 24]


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"parent_call_id": "c" * 25}, "which is not in the store"),
        ({"prompt_tokens": 4}, "its prompt has another length than its row says"),
    ],
)
async def test_a_group_with_a_call_that_cannot_be_read_in_full_is_excluded(
    database: Database, columns: dict[str, Any], reason: str
) -> None:
    run = await add_run_with_credit(database)
    group, rollouts = await add_group(database, run, 0)
    for rollout in rollouts:
        await add_call(database, rollout, **columns)
        await finish_rollout(database, rollout)
    await complete(database, group)
    await credit_pending(database, 8)
    (verdict,) = await rows(database, tables.GroupCredit)
    assert (verdict.verdict, reason in verdict.reason) == ("excluded", True)


async def test_the_worker_processes_groups_as_they_complete_and_stops(database: Database, redis_url: str) -> None:
    run = await add_run_with_credit(database)
    stop, checks = asyncio.Event(), Checks()
    settings = Settings(port=0, database_url=database.dsn, redis_url=redis_url, poll_seconds=0.05)
    task = asyncio.create_task(work(settings, stop, checks))
    try:
        await add_complete_group(database, run)
        await eventually(lambda: rows(database, tables.GroupCredit))
        assert await checks.run() == {"database": "ok", "schema": "ok"}
    finally:
        stop.set()
        async with asyncio.timeout(60):
            await task


async def test_a_moving_average_counts_each_earlier_group_once(database: Database) -> None:
    ema = {"rule": {"type": "identical"}, "air": None, "baseline": {"type": "ema", "ema_decay": 0.5}}
    config = run_document(credit=ema, sampling={"group_size": 1, "min_siblings": 1})
    run, other = await add_run(database, config=config), await add_run_with_credit(database)
    for number, reward in enumerate((1.0, 0.0, 0.0)):
        await add_complete_group(database, run, number, [reward])
    await add_complete_group(database, other)
    # One transaction with three groups of two runs, then one with the last: the same numbers as in one.
    assert len(await credit_pending(database, 2)) == 2
    assert len(await credit_pending(database, 8)) == 2
    found = [
        row for row in await rows(database, tables.CallCredit, tables.CallCredit.rollout_id) if row.run_id == run.id
    ]
    # 1 has nothing before it; 0 against 1; 0 against 0.5 · 1 + 0.5 · 0.
    assert [(one.baseline, one.advantage) for one in found] == [(1, 0)] * 2 + [(1, -1)] * 2 + [(0.5, -0.5)] * 2
    last = (await rows(database, tables.GroupCredit, tables.GroupCredit.created_at))[-2:]
    assert last[0].created_at < last[1].created_at


async def test_each_role_has_a_moving_average_of_its_own(database: Database) -> None:
    ema = {"rule": {"type": "identical"}, "air": None, "baseline": {"type": "ema", "per": "role", "ema_decay": 0.5}}
    roles = [{"name": "writer", "model": "w"}, {"name": "critic", "model": "c"}]
    config = run_document(credit=ema, roles=roles, sampling={"group_size": 1, "min_siblings": 1})
    run, expected = await add_run(database, config=config), {}
    played = [(1.0, ["writer", "critic"]), (0.0, ["writer"]), (0.0, ["critic", None]), (1.0, ["writer", "critic"])]
    for number, (reward, players) in enumerate(played):
        group, (rollout,) = await add_group(database, run, number, size=1)
        for place, player in enumerate(players):
            call = await add_call(database, rollout, [1, place], [3], policy_version=1, temperature=0.8, role=player)
            expected[call.id] = number, player
        await finish_rollout(database, rollout, reward=reward)
        await complete(database, group)
    # In transactions of two groups: the averages of the second come from the store.
    assert len(await credit_pending(database, 2)) == len(await credit_pending(database, 2)) == 2
    found = {expected[one.call_id]: (one.baseline, one.advantage) for one in await rows(database, tables.CallCredit)}
    assert found == {
        (0, "writer"): (1, 0),
        (0, "critic"): (1, 0),
        (1, "writer"): (1, -1),
        (2, "critic"): (1, -1),
        (2, None): (0, 0),
        (3, "writer"): (0.5, 0.5),
        (3, "critic"): (0.5, 0.5),
    }


async def test_a_role_that_plays_rarely_continues_its_average(database: Database) -> None:
    ema = {"rule": {"type": "identical"}, "air": None, "baseline": {"type": "ema", "per": "role", "ema_decay": 0.5}}
    roles = [{"name": "writer", "model": "w"}, {"name": "critic", "model": "c"}, {"name": "never", "model": "n"}]
    config = run_document(credit=ema, roles=roles, sampling={"group_size": 1, "min_siblings": 1})
    run = await add_run(database, config=config)

    async def play(number: int, reward: float, player: str | None) -> tuple[Any, list[float]]:
        """The averages after a group with one call, or none, and the baseline of the call."""
        group, (rollout,) = await add_group(database, run, number, size=1)
        if player is not None:
            await add_call(database, rollout, role=player)
        await finish_rollout(database, rollout, reward=reward)
        await complete(database, group)
        assert await credit_pending(database, 8) == [group.id]
        async with database.read() as session:
            averages = (await session.get_one(tables.GroupCredit, (group.id, run.id))).averages
            query = select(tables.CallCredit.baseline).where(tables.CallCredit.rollout_id == rollout.id)
            return averages, list(await session.scalars(query))

    assert await play(0, 1.0, "critic") == ({"critic": 1.0}, [1.0])
    async with database.session() as session:
        await session.execute(OTHER_GROUPS, {"run": run.id, "dataset": run.dataset_id})
    assert await play(2000, 0.0, "critic") == ({"critic": 0.5, "writer": 0.25}, [1.0])
    # A group that the version before credited has no averages; one without calls changes none.
    group, _ = await add_group(database, run, 2001, size=1)
    await add_credited_group(database, group)
    assert await play(2002, 1.0, None) == ({"critic": 0.5, "writer": 0.25}, [])
    assert await play(2003, 1.0, "writer") == ({"critic": 0.5, "writer": 0.625}, [0.25])


OTHER_GROUPS = text("""
    WITH others AS (
        INSERT INTO groups (id, run_id, number, dataset_id, task_number, size, admitted_version, state)
        SELECT :run || '.' || number, :run, number, :dataset, 0, 1, 0, 'complete'
        FROM generate_series(1, 1500) AS number RETURNING id, number
    )
    INSERT INTO group_credits (group_id, run_id, verdict, credit_version, counted_siblings, has_variance, averages,
                               created_at)
    SELECT id, :run, 'credited', 1, 1, false, '{"critic": 1.0, "writer": 0.25}', clock_timestamp() FROM others
""")
"""1500 groups in which the critic made no call."""


async def test_two_workers_at_once_move_the_average_by_every_group(database: Database) -> None:
    ema = {"rule": {"type": "identical"}, "air": None, "baseline": {"type": "ema", "ema_decay": 0.5}}
    run = await add_run(database, config=run_document(credit=ema, sampling={"group_size": 1, "min_siblings": 1}))
    for number in range(6):
        await add_complete_group(database, run, number, [float(number)])

    async def drain() -> None:
        while len(await rows(database, tables.GroupCredit)) < 6:
            await credit_pending(database, 1)

    await asyncio.gather(*(drain() for _ in range(6)))
    assert len(await rows(database, tables.GroupCredit)) == 6
    value = {f"{run.id}.{number}.0": float(number) for number in range(6)}
    average = None
    for verdict in await rows(database, tables.GroupCredit, tables.GroupCredit.created_at):
        calls = [one for one in await rows(database, tables.CallCredit) if one.rollout_id.startswith(verdict.group_id)]
        assert {one.baseline for one in calls} == {value[calls[0].rollout_id] if average is None else average}
        average = 0.5 * calls[0].baseline + 0.5 * value[calls[0].rollout_id]


async def test_an_agent_gets_the_first_name_that_its_calls_or_their_spans_show(database: Database) -> None:
    """OpenAI's Agents SDK names its agents in spans alone, LangChain in the answers that it sends back."""
    document = run_document(credit=CREDIT, roles=[{"name": "writer", "agent_name": "writer"}])
    run = await add_run(database, config=document)
    for number, name in enumerate(("writer", "renamed")):
        group, rollouts = await add_group(database, run, number)
        for rollout in rollouts:
            call = await add_call(database, rollout, agent="a" * 16)
            around = {"trace_id": "f" * 32, "span_id": "1" * 16, "attributes": {"gen_ai.agent.name": name}}
            within = {"trace_id": "f" * 32, "span_id": "2" * 16, "parent_span_id": "1" * 16}
            await add_tool_span(database, rollout, "", kind="agent", **around)
            await add_tool_span(database, rollout, "", kind="model", response_id=f"resp_{call.id}", **within)
            await add_call(database, rollout, agent="b" * 16)
            await add_call(database, rollout, agent="b" * 16, agent_name=f"{name} of calls")
            await add_call(database, rollout, agent="c" * 16)
            await finish_rollout(database, rollout, reward=1.0)
        await complete(database, group)
        await credit_pending(database, 8)
    names = await rows(database, tables.AgentName, tables.AgentName.agent)
    assert [(one.run_id, one.agent, one.name) for one in names] == [
        (run.id, "a" * 16, "writer"),
        (run.id, "b" * 16, "writer of calls"),
    ]


async def test_each_policy_trains_on_its_own_calls_of_a_group(database: Database) -> None:
    document = run_document(
        credit=CREDIT,
        roles=[{"name": "checker", "agent_name": "checker", "policy": "checker"}],
        policies={"checker": {"pool": "second"}},
    )
    await add_dataset(database)
    async with database.session() as session:
        made = await create_run(session, RunConfig.model_validate(document))
        run = await session.get_one(tables.Run, made.id)
        session.add(tables.RunStatus(run_id=run.id, phase="running"))
    checker = made.policies["checker"].id
    group, rollouts = await add_group(database, run)
    for rollout, reward in zip(rollouts, (1.0, 0.0), strict=True):
        await add_call(database, rollout, [1, 2], [3], policy_version=4)
        # It begins with the tokens of the call before, which another policy sampled.
        await add_call(database, rollout, [1, 2, 3, 4], [5, 6], policy_version=1, role="checker")
        await finish_rollout(database, rollout, reward=reward)
    await complete(database, group)
    await credit_pending(database, 8)
    verdicts = await rows(database, tables.GroupCredit, tables.GroupCredit.min_policy_version)
    assert [(one.run_id, one.min_policy_version, one.has_variance) for one in verdicts] == [
        (checker, 1, True),
        (run.id, 4, True),
    ]
    assert [one.averages for one in verdicts] == [None, None]
    samples = await rows(database, tables.Sample, tables.Sample.rollout_id, tables.Sample.branch)
    trained = [(one.run_id, list(one.mask), np.frombuffer(one.token_ids, "<i4").tolist()) for one in samples]
    assert trained == [(run.id, [0, 0, 1], [1, 2, 3]), (checker, [0, 0, 0, 0, 1, 1], [1, 2, 3, 4, 5, 6])] * 2
    assert {one.run_id for one in await rows(database, tables.CallCredit)} == {run.id}


async def add_spans(database: Database, rollout_id: str, run_id: str, count: int) -> None:
    """Tool spans of an attempt, as many as the collector would refuse: from before it did, or written by hand."""
    async with database.session() as session:
        await session.execute(
            text("""
                INSERT INTO spans (run_id, rollout_id, attempt, trace_id, span_id, name, kind, tool, status, start_ns,
                                   end_ns, attributes)
                SELECT :run, :rollout, 1, repeat('a', 32), lpad(to_hex(n), 16, '0'), 'x', 'tool', 'x', 'ok', n,
                       2000000000000000000, '{}'
                FROM generate_series(1, :count) AS n
            """),
            {"run": run_id, "rollout": rollout_id, "count": count},
        )


async def test_an_attempt_with_a_hundred_thousand_spans_is_excluded_and_nobody_waits_for_it(database: Database) -> None:
    flooded, other = await add_run_with_credit(database), await add_run_with_credit(database)
    large = await add_complete_group(database, flooded)
    await add_spans(database, f"{large.id}.0", flooded.id, 100_000)
    small = await add_complete_group(database, other)
    assert await credit_pending(database, 8) == [large.id, small.id]
    verdicts = {row.group_id: row for row in await rows(database, tables.GroupCredit)}
    assert verdicts[small.id].verdict == "credited"
    assert verdicts[large.id].verdict == "excluded"
    assert verdicts[large.id].reason == (
        "it has more than 50000 model calls, tool spans and rewards (CREDIT_MAX_GROUP_RECORDS)"
    )


async def test_the_spans_of_embeddings_are_no_tool_call_of_the_model(database: Database) -> None:
    run = await add_run_with_credit(database, air={"weights": {"embeddings": 0.2}, "failure": -1.0})
    group, rollouts = await add_group(database, run, size=2)
    for rollout, reward in zip(rollouts, (1.0, 0.0), strict=True):
        # The agent has a tool of that name.
        asked = {"tool_calls": [{"id": "call_1", "name": "embeddings", "arguments": "{}"}]}
        answer = {"role": "assistant", "content": "", **asked}
        await add_call(database, rollout, [1, 2], [3, 4], temperature=0.8, answer=answer)
        for _ in range(5):
            await add_tool_span(database, rollout, "embeddings", status="error", scope=GATEWAY_SCOPE)
        await add_call(database, rollout, [1, 2, 3, 4, 5], [6], temperature=0.8)
        await finish_rollout(database, rollout, reward=reward)
    await complete(database, group)
    # The four calls alone.
    await credit_pending(database, 8, limits=worker.GroupLimits(4, 1000))
    assert [row.verdict for row in await rows(database, tables.GroupCredit)] == ["credited"]
    found = [row.tools["calls"] for row in await rows(database, tables.CallCredit)]
    unknown = [{"tool": "embeddings", "status": "unset", "source": "answer"}]
    assert sorted(found, key=len) == [[], [], unknown, unknown]


async def test_long_prompts_exclude_their_group_with_the_setting(database: Database) -> None:
    run = await add_run_with_credit(database)
    await add_complete_group(database, run)
    await credit_pending(database, 8, limits=worker.GroupLimits(100, 13))
    assert [row.reason for row in await rows(database, tables.GroupCredit)] == [
        "the prompts of its calls have more than 13 tokens (CREDIT_MAX_GROUP_TOKENS)"
    ]


async def test_a_group_that_takes_long_stops_no_other_group_and_no_reward(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, other = await add_run_with_credit(database), await add_run_with_credit(database)
    slow, quick = await add_complete_group(database, run), await add_complete_group(database, other)
    computing, released = threading.Event(), threading.Event()
    compute = worker.compute

    def computes(groups: list[store.PendingGroup], *arguments: Any) -> Any:
        if groups[0].id == slow.id and not computing.is_set():
            computing.set()
            assert released.wait(30)
        return compute(groups, *arguments)

    monkeypatch.setattr(worker, "compute", computes)
    first = asyncio.create_task(credit_pending(database, 1))
    await asyncio.to_thread(computing.wait, 30)
    # Neither another group nor a reward for a rollout of this one waits.
    assert await credit_pending(database, 8) == [quick.id]
    async with database.session() as session:
        await views.add_external_reward(session, f"{slow.id}.1", RewardRequest(key="late", name="late", value=1.0))
    released.set()
    # The reward is not in what was computed: the group is computed again.
    assert await first == []
    assert await credit_pending(database, 8) == [slow.id]
    verdicts = {row.group_id: row for row in await rows(database, tables.GroupCredit)}
    assert (verdicts[slow.id].reward_mean, verdicts[quick.id].reward_mean) == (1.0, 0.5)


@pytest.mark.parametrize(
    ("damage", "field"),
    [({"credit": {"rule": {"type": "of another version"}}}, "credit.rule"), ({"roles": ["a"]}, "roles.0")],
)
async def test_a_document_that_does_not_parse_excludes_its_own_groups_alone(
    database: Database, damage: dict[str, Any], field: str
) -> None:
    broken, other = await add_run_with_credit(database), await add_run_with_credit(database)
    lost, good = await add_complete_group(database, broken), await add_complete_group(database, other)
    async with database.session() as session:
        config = {**broken.config, **damage}
        await session.execute(update(tables.Run).where(tables.Run.id == broken.id).values(config=config))
    assert await credit_pending(database, 8) == [lost.id, good.id]
    verdicts = {row.group_id: row for row in await rows(database, tables.GroupCredit)}
    assert [verdicts[one.id].verdict for one in (lost, good)] == ["excluded", "credited"]
    assert str(verdicts[lost.id].reason).startswith(f"the stored document does not parse: {field}: Input")
