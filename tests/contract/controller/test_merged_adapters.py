"""Settings that the trainer's device resolved decide on warnings: a tight gap in bfloat16, and adapters that engines
have merged into bfloat16 weights, so that small updates are lost."""

from __future__ import annotations

import pytest

from leyden.libs.contracts.config import RunConfig
from leyden.libs.contracts.config.computation import CPU, Device
from leyden.libs.store import tables, training
from leyden.libs.store.database import Database
from tests.support import builders
from tests.support.alarms import alarms

CUDA = Device("cuda", flex=True)
SUBJECT = "setting training.lora"


@pytest.mark.parametrize(
    ("device", "lora", "adapters", "is_told"),
    [(CUDA, {}, None, True), (CUDA, {}, 2, False), (CPU, {}, None, False), (CUDA, None, None, False)],
)
async def test_merged_adapters_in_bfloat16_are_told(
    database: Database, device: Device, lora: dict[str, int] | None, adapters: int | None, is_told: bool
) -> None:
    # A rate of its own: the document alone has no warning.
    document = builders.run_document(training={"steps": 3, "lora": lora}, optimizer={"learning_rate": 1e-5})
    run = await builders.add_run(database, config=document)
    config = RunConfig.stored(run.config)
    assert SUBJECT not in await alarms(database, run.id)
    async with database.session() as session:
        await session.merge(tables.Pool(name=config.pool, adapters=adapters))
        await training.keep_computation(session, run.id, config.computation(device))
    found = await alarms(database, run.id)
    assert (SUBJECT in found) == is_told
    if is_told:
        assert found[SUBJECT].remedy == "give the pool `adapters` (docs/gpu.md)"


@pytest.mark.parametrize(("device", "is_told"), [(CUDA, True), (CPU, False)])
async def test_a_gap_that_is_too_tight_for_the_resolved_precision_is_told(
    database: Database, device: Device, is_told: bool
) -> None:
    run = await builders.add_run(database, config=builders.run_document(training={"max_logprob_gap": 0.02}))
    async with database.session() as session:
        await training.keep_computation(session, run.id, RunConfig.stored(run.config).computation(device))
    assert ("setting training.max_logprob_gap" in await alarms(database, run.id)) == is_told
