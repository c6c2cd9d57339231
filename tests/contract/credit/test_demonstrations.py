"""Demonstrations on Postgres: which stored rollouts become samples of a run of supervised fine-tuning, once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from sqlalchemy import text, update

from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.services.credit.worker import credit_pending, demonstrate_pending
from tests.contract.credit.test_worker import complete, rows
from tests.support.builders import add_call, add_group, add_run, finish_rollout, run_document

Earned = Sequence[tuple[float, tuple[int, ...]]]
"""By sibling the reward, and the tokens sampled after the prompt 1, 2."""


async def add_source(database: Database, groups: Sequence[Earned], **document: Any) -> tables.Run:
    """A run with a complete group for each task."""
    run = await add_run(database, config=run_document(**document))
    for number, siblings in enumerate(groups):
        group, rollouts = await add_group(database, run, number, size=len(siblings), task_number=number)
        for rollout, (reward, sampled) in zip(rollouts, siblings, strict=True):
            # Such parameters make a call untrainable for the run that sampled it, and for no demonstration.
            await add_call(
                database, rollout, [1, 2], sampled, policy_version=3, temperature=0.0,
                trainable=False, untrainable_reason="sampled with temperature",
            )  # fmt: skip
            await finish_rollout(database, rollout, reward=reward)
        await complete(database, group)
    return run


async def add_supervised(database: Database, source: tables.Run, **changes: Any) -> tables.Run:
    algorithm = {"type": "sft", "runs": [source.id], **changes.pop("algorithm", {})}
    document = run_document(algorithm=algorithm, **changes)
    return await add_run(database, config=document, dataset_id=source.dataset_id)


async def samples_of(database: Database, run: tables.Run) -> list[tables.Sample]:
    return [one for one in await rows(database, tables.Sample, tables.Sample.id) if one.run_id == run.id]


async def verdicts_of(database: Database, run: tables.Run) -> list[tables.GroupCredit]:
    found = await rows(database, tables.GroupCredit, tables.GroupCredit.group_id)
    return [one for one in found if one.run_id == run.id]


async def test_rollouts_that_earned_enough_train_all_their_sampled_tokens(database: Database) -> None:
    source = await add_source(database, [[(1.0, (3, 4)), (0.5, (5,))], [(0.0, (6,))]])
    run = await add_supervised(database, source)
    assert await demonstrate_pending(database) == 1
    (sample,) = await samples_of(database, run)
    assert (sample.rollout_id, sample.min_policy_version) == (f"{source.id}.0.0", -1)
    assert np.frombuffer(sample.token_ids, "<i4").tolist() == [1, 2, 3, 4]
    assert np.frombuffer(sample.mask, np.uint8).tolist() == [0, 0, 1, 1]
    assert np.frombuffer(sample.advantages, "<f4").tolist() == [0, 0, 1, 1]
    assert np.frombuffer(sample.temperatures, "<f4").tolist() == [1, 1, 1, 1]
    assert np.frombuffer(sample.policy_versions, "<i4").tolist() == [-1] * 4
    (verdict,) = await verdicts_of(database, run)
    assert (verdict.verdict, verdict.counted_siblings, verdict.reward_mean) == ("credited", 1, 1.0)
    # Nothing of the source changed, and it gets its own credit.
    assert await verdicts_of(database, source) == []
    assert len(await credit_pending(database, 8)) == 2
    assert len(await verdicts_of(database, source)) == 2


async def test_rounding_makes_no_rollout_less_than_a_demonstration(database: Database) -> None:
    source = await add_source(database, [[(0.7 + 0.2 + 0.1, (3,)), (0.99, (4,))]])
    run = await add_supervised(database, source)
    assert await demonstrate_pending(database) == 1
    assert [one.rollout_id for one in await samples_of(database, run)] == [f"{source.id}.0.0"]


async def test_a_task_has_at_most_so_many_demonstrations_the_best_ones(database: Database) -> None:
    source = await add_source(database, [[(1.0, (3,)), (3.0, (4,)), (2.0, (5,))], [(1.0, (6,))]])
    run = await add_supervised(database, source, algorithm={"per_task": 2})
    assert await demonstrate_pending(database) == 2
    found = [one.rollout_id.removeprefix(source.id) for one in await samples_of(database, run)]
    assert found == [".0.1", ".0.2", ".1.0"]


async def test_demonstrations_are_selected_once_by_one_of_several_workers(database: Database) -> None:
    source = await add_source(database, [[(1.0, (3,))]] * 3)
    run = await add_supervised(database, source)
    counts = await asyncio.gather(*(demonstrate_pending(database) for _ in range(4)))
    assert sorted(counts) == [0, 0, 0, 3]
    assert await demonstrate_pending(database) == 0
    assert len(await samples_of(database, run)) == 3


async def test_rollouts_on_other_tasks_and_of_other_runs_are_none(database: Database) -> None:
    source, other = [await add_source(database, [[(1.0, (3,))]]) for _ in range(2)]
    run = await add_supervised(database, source, algorithm={"runs": [source.id, other.id]})
    await add_source(database, [[(1.0, (3,))]])
    assert await demonstrate_pending(database) == 1
    assert [one.rollout_id for one in await samples_of(database, run)] == [f"{source.id}.0.0"]


async def test_calls_of_other_roles_and_of_models_of_other_pools_are_context(database: Database) -> None:
    roles = [
        {"name": "writer", "agent_name": "w"},
        {"name": "judge", "agent_name": "j"},
        {"name": "checker", "policy": "checker"},
    ]
    source = await add_run(
        database, config=run_document(roles=roles, policies={"checker": {"pool": "second", "frozen": True}})
    )
    group, (rollout,) = await add_group(database, source, size=1)
    for number, role in enumerate(("writer", "judge", "checker")):
        await add_call(database, rollout, [1, 2], [3 + number], role=role)
    await finish_rollout(database, rollout, reward=1.0)
    await complete(database, group)
    run = await add_supervised(database, source, roles=roles[:2], train=["writer"])
    assert await demonstrate_pending(database) == 1
    (sample,) = await samples_of(database, run)
    assert np.frombuffer(sample.token_ids, "<i4").tolist() == [1, 2, 3]
    (verdict,) = await verdicts_of(database, run)
    assert verdict.calls is not None
    assert verdict.calls["untrainable"] == {"role judge does not train": 1, "policy checker has another model": 1}


async def test_a_providers_answer_trains_as_the_runs_own_model_would_write_it(database: Database) -> None:
    roles = [{"name": "writer", "policy": "teacher"}]
    source = await add_run(
        database,
        config=run_document(roles=roles, policies={"teacher": {"provider": "elsewhere"}}, training={"steps": 0}),
    )
    group, (rollout,) = await add_group(database, source, size=1)
    nothing = {"generator_logprobs": b"", "policy_versions": b"", "min_policy_version": None}
    for prompt, answer in (([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6])):
        written = np.asarray(answer, "<i4").tobytes()
        await add_call(database, rollout, prompt, [], role="writer", trainable=False, written_ids=written, **nothing)
    await finish_rollout(database, rollout, reward=1.0)
    await complete(database, group)
    run = await add_supervised(database, source)
    assert await demonstrate_pending(database) == 1
    (sample,) = await samples_of(database, run)
    assert np.frombuffer(sample.token_ids, "<i4").tolist() == [1, 2, 3, 4, 5, 6]
    assert np.frombuffer(sample.mask, np.uint8).tolist() == [0, 0, 1, 1, 0, 1]


@pytest.mark.parametrize("phase", ["completed", "failed", "cancelled"])
async def test_a_run_that_is_over_gets_no_demonstrations(database: Database, phase: str) -> None:
    source = await add_source(database, [[(1.0, (3,))]])
    run = await add_supervised(database, source)
    async with database.session() as session:
        await session.execute(
            text("UPDATE run_status SET phase = :phase WHERE run_id = :run"), {"phase": phase, "run": run.id}
        )
    assert await demonstrate_pending(database) == 0


async def test_a_group_without_a_token_to_train_says_why(database: Database) -> None:
    source = await add_source(database, [[(1.0, (3,))]])
    run = await add_supervised(database, source, roles=[{"name": "a"}], train=["a"])
    assert await demonstrate_pending(database) == 1
    (verdict,) = await verdicts_of(database, run)
    assert (verdict.min_policy_version, verdict.has_variance) == (None, False)
    assert verdict.reason is not None
    assert "no role, and the run's train names those that train" in verdict.reason


async def breaks(database: Database, run: tables.Run) -> None:
    async with database.session() as session:
        config = {**run.config, "credit": {"rule": {"type": "of another version"}}}
        await session.execute(update(tables.Run).where(tables.Run.id == run.id).values(config=config))


async def test_a_run_whose_document_does_not_parse_keeps_no_other_waiting(database: Database) -> None:
    source = await add_source(database, [[(1.0, (3, 4))]])
    broken, good = await add_supervised(database, source), await add_supervised(database, source)
    await breaks(database, broken)
    assert await demonstrate_pending(database) == 1
    assert await verdicts_of(database, broken) == []
    assert [one.verdict for one in await verdicts_of(database, good)] == ["credited"]
    assert await demonstrate_pending(database) == 0


async def test_a_source_whose_document_does_not_parse_gives_no_demonstration(database: Database) -> None:
    broken = await add_source(database, [[(1.0, (3, 4))]])
    good = await add_source(database, [[(1.0, (5,))]], dataset=broken.config["dataset"])
    async with database.session() as session:
        for table in (tables.Run, tables.Group):
            of_run = table.id if table is tables.Run else table.run_id
            await session.execute(update(table).where(of_run == good.id).values(dataset_id=broken.dataset_id))
    run = await add_supervised(database, broken, algorithm={"runs": [broken.id, good.id]})
    await breaks(database, broken)
    assert await demonstrate_pending(database) == 2
    verdicts = {one.group_id: one for one in await verdicts_of(database, run)}
    assert [verdicts[f"{one.id}.0"].verdict for one in (broken, good)] == ["excluded", "credited"]
    reason = str(verdicts[f"{broken.id}.0"].reason)
    assert reason.startswith(f"run {broken.id}: the stored document does not parse: credit.rule: Input")
