"""Figures of steps that the API computes from groups, calls and times; an unknown one is no point."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from leyden.libs.contracts import ids
from leyden.libs.contracts.call_counts import CallCounts, total
from leyden.libs.contracts.config import RunConfig
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.libs.store.policies import policy_columns
from tests.support import builders

START = datetime(2026, 1, 1, tzinfo=UTC)
LEASE = {"state": "running", "lease_id": "lease", "owner": "test", "lease_expires_at": START}
COUNTS = CallCounts(calls=4, cut=1).model_dump()


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


async def series(http: httpx.AsyncClient, run: tables.Run, **query: Any) -> dict[str, dict[int, float]]:
    answer = await http.get(f"/v1/runs/{run.id}/metrics", params=query)
    assert answer.status_code == 200, answer.text
    return {one["name"]: {step: value for step, _, value in one["points"]} for one in answer.json()["series"]}


async def add_step(database: Database, run: tables.Run, number: int, group: tables.Group, **metrics: float) -> None:
    """The step begins at 100 seconds times its number, and takes 40. It trains all samples of the group."""
    async with database.session() as session:
        row = tables.Step(run_id=run.id, number=number, metrics=metrics, checkpoint="", started_at=at(100 * number))
        row.created_at = at(100 * number + 40)
        session.add(row)
        session.add(tables.StepGroup(group_id=group.id, run_id=run.id, step=number, verdict="trained"))


async def trained_group(database: Database, run: tables.Run, number: int) -> tables.Group:
    """Two siblings: admitted at 10 seconds, sampled from 12 to 20 and 22, complete at 25, credited at 26."""
    group, rollouts = await builders.add_group(
        database, run, number, state="complete", created_at=at(10), finished_at=at(25)
    )
    for rollout, end in zip(rollouts, (20, 22), strict=True):
        await builders.finish_rollout(database, rollout, reward=end - 20.0)
        async with database.session() as session:
            tried = await session.get_one(tables.Attempt, (rollout.id, 1))
            tried.created_at, tried.started_at, tried.finished_at = at(11), at(12), at(end)
            (await session.get_one(tables.Rollout, rollout.id)).created_at = at(10)
    await builders.add_credited_group(
        database, group, has_variance=number != 1, reward_std=number / 2, calls=COUNTS, created_at=at(26)
    )
    return group


async def test_a_step_has_figures_of_its_groups_and_of_their_way_to_it(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    run = await builders.add_run(database)
    for number in (1, 2):
        group = await trained_group(database, run, number)
        await add_step(database, run, number, group, trained_tokens=80, step_seconds=20)
    refused, _ = await builders.add_group(database, run, 9)
    async with database.session() as session:
        session.add(tables.StepGroup(group_id=refused.id, run_id=run.id, verdict="stale", created_at=at(150)))
        for number, version, seconds in ((1, 0, 9.0), (1, 1, 2.0), (2, 1, 4.0)):
            swap = {"policy_version": version, "url": f"http://engine-{number}", "seconds": seconds}
            session.add(tables.WeightSwap(run_id=run.id, **swap))
        # One waits from before the second step on; the attempt of the other began in that step.
        waiting, begun = [await session.get_one(tables.Rollout, f"{refused.id}.{number}") for number in range(2)]
        waiting.created_at = begun.created_at = at(120)
        session.add(tables.Attempt(rollout_id=begun.id, number=1, run_id=run.id, **LEASE, created_at=at(230)))
    found = await series(api_http, run)
    assert {name: points for name, points in found.items() if not name.startswith("reward")} == {
        "trained_tokens": {1: 80, 2: 80},
        "step_seconds": {1: 20, 2: 20},
        "trained_tokens_per_second": {1: 4, 2: 4},
        "trained_tokens_total": {1: 80, 2: 160},
        "wait_seconds": {2: 60},
        "groups_stale": {1: 0, 2: 1},
        "group_reward_std": {1: 0.5, 2: 1},
        "groups_with_variance_share": {1: 0, 2: 1},
        "untrainable_calls": {1: 0, 2: 0},
        "context_overflows": {1: 0, 2: 0},
        "cut_share": {1: 0.25, 2: 0.25},
        "calls_per_rollout": {1: 2, 2: 2},
        "queue_seconds": {1: 2, 2: 2},
        "queued_rollouts": {1: 2, 2: 1},
        "swap_seconds_mean": {1: 3},
        "swap_seconds_max": {1: 4},
        "sample_seconds": {1: 9, 2: 9},
        "siblings_seconds": {1: 4, 2: 4},
        "credit_seconds": {1: 1, 2: 1},
        "ready_seconds": {1: 74, 2: 174},
    }


async def test_the_sum_of_trained_tokens_ends_where_those_of_a_step_are_unknown(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    run = await builders.add_run(database)
    for number, metrics in enumerate(
        ({"trained_tokens": 30}, {"trained_tokens": 0}, {}, {"trained_tokens": 5}), start=1
    ):
        group, _ = await builders.add_group(database, run, number)
        await add_step(database, run, number, group, **metrics)
    assert await series(api_http, run, names=["trained_tokens_total"]) == {"trained_tokens_total": {1: 30, 2: 30}}
    async with database.read() as session:
        summed = text("SELECT sum((metrics->>'trained_tokens')::float) FROM steps WHERE run_id = :run AND number <= 2")
        assert await session.scalar(summed, {"run": run.id}) == 30


async def test_a_step_has_the_tokens_of_its_policys_calls_and_the_lags_of_its_samples(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    roles = [{"name": "writer", "model": "w"}, {"name": "checker", "policy": "second"}]
    document = builders.run_document(roles=roles, policies={"second": {"pool": "second"}})
    lead = await builders.add_run(database, config=document)
    config = RunConfig.model_validate(document).policy_document("second").model_dump(mode="json")
    second = await builders.add_run(database, config=config, **policy_columns(lead.id, "second"))
    for number, versions in ((1, [0, 0]), (2, [1, 0])):
        group = await trained_group(database, lead, number)
        for sibling, version in enumerate(versions):
            rollout = tables.Rollout(id=f"{group.id}.{sibling}", run_id=lead.id, group_id=group.id)
            for role in ("writer", "checker", None):
                await builders.add_call(database, rollout, (1, 2, 3, 4), (5, 6), role=role, cached_tokens=3)
            sample = await builders.add_sample(database, rollout, policy_version=version)
            async with database.session() as session:
                session.add(tables.StepSample(run_id=lead.id, sample_id=sample.id, step=number))
        await add_step(database, lead, number, group)
        await builders.add_credited_group(database, group, run_id=second.id)
        await add_step(database, second, 3 - number, group)
    names = ["prompt_tokens", "cached_tokens", "sampled_tokens", "cached_share", "answer_tokens_mean"]
    own = [16, 12, 8, 0.75, 2]
    assert await series(api_http, lead, names=names) == {name: {1: n, 2: n} for name, n in zip(names, own, strict=True)}
    checked = await series(api_http, lead, names=names, policy="second")
    assert checked["prompt_tokens"] == {1: 8, 2: 8}
    lags = ["lag.0.tokens", "lag.1.tokens", "sampled_tokens_per_second"]
    assert await series(api_http, lead, names=lags) == {
        "lag.0.tokens": {1: 4, 2: 2},
        "lag.1.tokens": {1: 0, 2: 2},
        "sampled_tokens_per_second": {2: 0.08},
    }


@pytest.mark.parametrize(("coefficient", "tokens", "shown"), [(0.0, 5, []), (0.1, 5, [0.0]), (0.1, 0, [])])
async def test_what_a_trainer_did_not_measure_is_no_point(
    api_http: httpx.AsyncClient, database: Database, coefficient: float, tokens: int, shown: list[float]
) -> None:
    document = builders.run_document(algorithm={"type": "ppo_clip", "kl_coefficient": coefficient})
    run = await builders.add_run(database, config=document)
    group, _ = await builders.add_group(database, run)
    measured = {"computed_tokens": tokens, "trainable_tokens": tokens}
    await add_step(database, run, 1, group, kl_reference=0.0, entropy=0.0, policy_lag_mean=0.0, **measured)
    found = await series(api_http, run, names=["kl_reference", "entropy", "policy_lag_mean"])
    assert list(found["kl_reference"].values()) == shown
    assert list(found["entropy"].values()) == list(found["policy_lag_mean"].values()) == ([0.0] if tokens else [])


async def test_a_step_without_variance_has_the_entropy_of_its_tokens(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    run = await builders.add_run(database)
    group, _ = await builders.add_group(database, run)
    await add_step(database, run, 1, group, entropy=0.25, loss=0.0, computed_tokens=0, trainable_tokens=5)
    assert await series(api_http, run, names=["entropy", "loss"]) == {"entropy": {1: 0.25}, "loss": {}}


async def test_a_run_tells_why_rollouts_left_it_and_what_judges_used(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    run = await builders.add_run(database)
    _, rollouts = await builders.add_group(database, run, size=3)
    async with database.session() as session:
        for rollout, reason in zip(rollouts, ("infra_error", "infra_error", "tests: no verdict"), strict=True):
            row = await session.get_one(tables.Rollout, rollout.id)
            row.state, row.reason = "excluded", reason
        session.add(tables.JudgeUsage(run_id=run.id, tokens=77, cost=0.5, unpriced_tokens=7))
    found = (await api_http.get(f"/v1/runs/{run.id}")).json()
    assert (found["excluded"], found["judge_tokens"]) == ({"infra_error": 2, "tests: no verdict": 1}, 77)
    assert (found["judge_cost"], found["judge_unpriced_tokens"]) == (0.5, 7)


async def add_made_step(database: Database, run: tables.Run, number: int, minutes_ago: float) -> None:
    made = datetime.now(tz=UTC) - timedelta(minutes=minutes_ago)
    async with database.session() as session:
        session.add(
            tables.Step(run_id=run.id, number=number, metrics={}, checkpoint="", started_at=made, created_at=made)
        )


async def progress_of(http: httpx.AsyncClient, run: tables.Run) -> dict[str, Any]:
    answer = await http.get(f"/v1/runs/{run.id}")
    assert answer.status_code == 200, answer.text
    progress: dict[str, Any] = answer.json()["progress"]
    return progress


async def test_the_next_step_tells_how_many_of_its_rollouts_have_ended_are_graded_and_credited(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    sampling = {"group_size": 3, "groups_per_step": 4}
    document = builders.run_document(sampling=sampling, training={"steps": 5})
    run = await builders.add_run(database, config=document)
    assert (await progress_of(api_http, run))["next_step"] == {
        "number": 1, "rollouts": 12, "ended": 0, "graded": 0, "credited": 0,
    }  # fmt: skip
    used, excluded, cancelled, credited, graded, begun = [
        await builders.add_group(database, run, number, size=3) for number in range(6)
    ]
    for _, rollouts in (used, excluded, cancelled, credited, graded):
        for rollout in rollouts:
            await builders.finish_rollout(database, rollout)
    # The first ended and waits for a grade, the second runs, the third waits.
    async with database.session() as session:
        (await session.get_one(tables.Rollout, begun[1][0].id)).grading_attempt = 1
    await builders.add_attempt(database, begun[1][1])
    for group, _ in (used, credited):
        await builders.add_credited_group(database, group)
    await builders.add_credited_group(database, excluded[0], verdict="excluded")
    await add_made_step(database, run, 1, 5)
    async with database.session() as session:
        session.add(tables.StepGroup(group_id=used[0].id, run_id=run.id, step=1, verdict="trained"))
        (await session.get_one(tables.Group, cancelled[0].id)).state = "cancelled"
    found = (await progress_of(api_http, run))["next_step"]
    # Three groups of four are admitted.
    assert found == {"number": 2, "rollouts": 12, "ended": 7, "graded": 6, "credited": 3}
    by_sql = text("""SELECT count(*) FILTER (WHERE r.state = 'finished') AS graded,
            count(*) FILTER (WHERE c.verdict = 'credited') AS credited
        FROM rollouts r LEFT JOIN group_credits c USING (group_id) WHERE r.group_id = ANY(:groups)""")
    async with database.read() as session:
        row = (await session.execute(by_sql, {"groups": [credited[0].id, graded[0].id, begun[0].id]})).one()
    assert tuple(row) == (found["graded"], found["credited"])
    # Re-rolls are rollouts of their group, and are not counted.
    async with database.session() as session:
        (await session.get_one(tables.Group, begun[0].id)).size = 4
        first, again = begun[1][0], ids.rollout_id(begun[0].id, 3)
        reroll = {"rerolls_of": first.id, "from_call": 1, "state": "queued"}
        session.add(tables.Rollout(id=again, run_id=run.id, group_id=begun[0].id, sibling=3, **reroll))
    assert (await progress_of(api_http, run))["next_step"] == found
    await builders.end_run(database, run)
    assert (await progress_of(api_http, run))["next_step"] is None


async def test_the_time_left_is_unknown_until_a_step_ended_and_then_by_the_median_of_the_last(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    document = builders.run_document(training={"steps": 10})
    run = await builders.add_run(database, config=document)
    assert (await progress_of(api_http, run))["seconds_left"] is None
    async with database.session() as session:
        status = await session.get_one(tables.RunStatus, run.id)
        status.started_at = datetime.now(tz=UTC) - timedelta(minutes=1000)
    await add_made_step(database, run, 1, 700)
    # From the start to the only step 300 minutes, and the second one is late by 400: eight more.
    assert (await progress_of(api_http, run))["seconds_left"] == pytest.approx(60 * 8 * 300, abs=600)
    for number, ago in ((2, 600), (3, 100), (4, 40)):
        await add_made_step(database, run, number, ago)
    # Steps took 100, 500 and 60 minutes: six are left, and the next one has had 40.
    found = [await progress_of(api_http, run)]
    found += [one["progress"] for one in (await api_http.get("/v1/runs")).json()["items"]]
    assert [one["seconds_left"] for one in found] == pytest.approx([60 * (5 * 100 + 60)] * 2, abs=600)
    await builders.end_run(database, run)
    assert (await progress_of(api_http, run))["seconds_left"] is None


async def test_a_run_has_the_sums_of_all_counts_of_its_groups(api_http: httpx.AsyncClient, database: Database) -> None:
    run = await builders.add_run(database)
    counts = CallCounts(
        calls=4, untrainable={"a": 1}, malformed=1, empty=2, cut=3, overflows=1, tools={"sql": {"ok": 2}},
        states=3, unmeasured=1, roles={},
    )  # fmt: skip
    for number in range(2):
        group, _ = await builders.add_group(database, run, number)
        await builders.add_credited_group(database, group, calls=counts.model_dump())
    found = (await api_http.get(f"/v1/runs/{run.id}")).json()["calls"]
    assert found == {**total([counts, counts]).model_dump(), "roles": None}
