"""Routing replay from engine to trainer: the gateway records the chosen experts, and a step computes with them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError
from sqlalchemy import select

from leyden.libs.contracts.config import RunConfig
from leyden.libs.contracts.samples import RoutedExperts
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.services.credit.worker import credit_pending
from leyden.services.gateway.engine import client
from leyden.services.gateway.engine.sglang import Event, read_event
from leyden.services.trainer.rows.batch import Sample, trained_tokens
from leyden.services.trainer.rows.reading import read_samples
from leyden.services.trainer.rows.routing import is_recorded
from leyden.services.trainer.state.assembly import assemble_learner, make_accelerator
from leyden.services.trainer.step.gradients import batch_logprobs, plan_batch
from leyden.services.trainer.step.step import optimizer_step
from tests.fakes.gateway import GatewayUnderTest, running_gateway
from tests.fakes.tiny_engine import served_engine
from tests.support import builders

HI: list[Any] = [{"role": "user", "content": "hi"}]
REPLAY = builders.run_document(
    training={"routing_replay": True, "steps": 1}, optimizer={"learning_rate": 1e-3}, sampling={"group_size": 2}
)


@asynccontextmanager
async def playing(
    database: Database, folder: Path, model: Path, document: dict[str, Any]
) -> AsyncIterator[tuple[GatewayUnderTest, tables.Group, list[tables.Rollout]]]:
    """A gateway before an engine of the model, and a group of the run whose attempts have begun."""
    run = await builders.add_run(database, config=document)
    group, rollouts = await builders.add_group(database, run)
    for rollout in rollouts:
        await builders.add_attempt(database, rollout)
    async with served_engine(model, weight_version=f"{run.id}:0") as engine:
        options: dict[str, Any] = {"engine_urls": [str(engine.http.base_url)]}
        where = {"model_path": model, "database_url": database.dsn, "run_id": run.id}
        async with running_gateway(folder, **where, **options) as gateway:
            yield gateway, group, rollouts


async def converse(gateway: GatewayUnderTest, rollout: tables.Rollout, turns: int = 2) -> None:
    messages = [*HI]
    async with gateway.client(rollout.id) as client:
        for _ in range(turns):
            answer = await client.chat.completions.create(model="m", messages=messages, max_tokens=12)
            messages += [{"role": "assistant", "content": answer.choices[0].message.content}, *HI]


async def calls_of(database: Database, rollout: tables.Rollout) -> list[Any]:
    table = tables.ModelCall
    columns = table.shared_tokens, table.prompt_tokens, table.completion_tokens, table.routed_experts
    async with database.read() as session:
        query = select(*columns).where(table.rollout_id == rollout.id).order_by(table.sequence)
        return list(await session.execute(query))


async def samples_of(database: Database, group: tables.Group, document: dict[str, Any]) -> list[Sample]:
    async with database.read() as session:
        config = RunConfig.model_validate(document)
        samples, _ = await read_samples(session, group.run_id, [group.id], {group.id}, config)
    return samples


async def test_a_step_replays_the_experts_that_the_engine_chose_in_every_turn(
    database: Database, tmp_path: Path, tiny_experts: Path
) -> None:
    async with playing(database, tmp_path, tiny_experts, REPLAY) as (gateway, group, rollouts):
        for reward, rollout in enumerate(rollouts):
            await converse(gateway, rollout)
            await builders.settle_rollout(database, rollout, reward=float(reward))
    first, second = await calls_of(database, rollouts[0])
    assert second.shared_tokens == first.prompt_tokens + first.completion_tokens
    for call in (first, second):
        experts = RoutedExperts.parse(call.routed_experts)
        assert (experts.start, experts.width, experts.item_bytes) == (max(0, call.shared_tokens - 1), 6, 1)
        assert len(experts.ids) == 6 * (call.prompt_tokens + call.completion_tokens - 1 - experts.start)
    await complete(database, group)
    assert await credit_pending(database, 8) == [group.id]
    samples = await samples_of(database, group, REPLAY)
    assert len(samples) == 2
    for sample in samples:
        assert sample.experts is not None
        assert is_recorded(sample.experts).tolist() == [True] * (len(sample.token_ids) - 1) + [False]
    config = RunConfig.model_validate(REPLAY)
    learner, tokens = (
        assemble_learner(tiny_experts, config, make_accelerator("cpu", "float32")),
        trained_tokens(samples),
    )
    plan = plan_batch(samples, tokens, 64)
    assert all(pack.experts_M_S is not None for pack in plan.forest.packs)
    found_K = batch_logprobs(learner.policy, plan, len(tokens), learner.accelerator)
    assert found_K == pytest.approx(tokens.generator_logprobs_K, abs=1e-4)
    assert optimizer_step(learner, samples, config)["routing_unrecorded_tokens"] == 0


async def test_a_long_event_is_read_beside_the_loop_which_goes_on_meanwhile(
    database: Database, tmp_path: Path, tiny_experts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound, read = 1000, list[tuple[bool, bool]]()
    answered, loop = threading.Event(), asyncio.get_running_loop()

    def reading(data: bytes) -> Event:
        with suppress(RuntimeError):
            asyncio.get_running_loop()
            read.append((len(data) > bound, True))
            return read_event(data)
        # The loop answers while this thread has not read the event.
        loop.call_soon_threadsafe(answered.set)
        read.append((len(data) > bound, not answered.wait(30)))
        return read_event(data)

    monkeypatch.setattr(client, "LONG_EVENT_BYTES", bound)
    monkeypatch.setattr(client, "read_event", reading)
    async with playing(database, tmp_path, tiny_experts, REPLAY) as (gateway, _, rollouts):
        await converse(gateway, rollouts[0], 1)
    # A busy engine sends all tokens in one long event.
    assert (True, False) in read and set(read) <= {(False, True), (True, False)}
    [call] = await calls_of(database, rollouts[0])
    experts = RoutedExperts.parse(call.routed_experts)
    assert len(experts.ids) == 6 * (call.prompt_tokens + call.completion_tokens - 1)


async def test_a_run_without_replay_records_no_experts(database: Database, tmp_path: Path, tiny_experts: Path) -> None:
    async with playing(database, tmp_path, tiny_experts, builders.run_document()) as (gateway, _, rollouts):
        await converse(gateway, rollouts[0], 1)
    [call] = await calls_of(database, rollouts[0])
    assert call.routed_experts is None


async def test_rerolls_which_never_train_record_no_experts(
    database: Database, tmp_path: Path, tiny_experts: Path
) -> None:
    baseline = {"type": "monte_carlo", "calls": 1, "samples": 2}
    document = {**REPLAY, "credit": {"rule": {"type": "identical"}, "baseline": baseline}}
    async with playing(database, tmp_path, tiny_experts, document) as (gateway, _, (first, reroll)):
        await converse(gateway, first)
        async with database.session() as session:
            (await session.get_one(tables.Rollout, first.id)).attempt = 1
            row = await session.get_one(tables.Rollout, reroll.id)
            row.rerolls_of, row.from_call = first.id, 1
        await converse(gateway, reroll)
    assert [call.routed_experts is None for call in await calls_of(database, first)] == [False, False]
    assert [call.routed_experts is None for call in await calls_of(database, reroll)] == [True, True]


async def test_a_run_with_replay_fails_calls_where_the_engine_returns_no_experts(
    database: Database, tmp_path: Path, tiny_model: Path
) -> None:
    async with playing(database, tmp_path, tiny_model, REPLAY) as (gateway, _, rollouts):
        with pytest.raises(APIStatusError, match="--enable-return-routed-experts") as error:
            await converse(gateway, rollouts[0], 1)
    assert error.value.status_code == 503


async def complete(database: Database, group: tables.Group) -> None:
    async with database.session() as session:
        row = await session.get_one(tables.Group, group.id)
        row.state, row.finished_at = "complete", datetime.now(tz=UTC)
