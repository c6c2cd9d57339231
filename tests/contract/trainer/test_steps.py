"""The trainer on Postgres: consumed samples, written versions, and recovery after a crash."""

import asyncio
import errno
import json
import math
import os
import shutil
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pytest
import torch
from prometheus_client import REGISTRY
from safetensors.torch import load_file, save_file
from sqlalchemy import func, select, update
from transformers import PreTrainedModel

from leyden.libs.contracts.config import RunConfig
from leyden.libs.contracts.states import RunIntent
from leyden.libs.service import Checks
from leyden.libs.store import tables, training
from leyden.libs.store.database import Database, Refused
from leyden.libs.store.engines import Pool, write_pools
from leyden.libs.store.locks import AdvisoryLock
from leyden.libs.store.policies import base_models, set_intent
from leyden.libs.store.runs import actions, retention
from leyden.services.trainer import loop as trainer_loop
from leyden.services.trainer import worker
from leyden.services.trainer.model.families import UnsupportedModel
from leyden.services.trainer.model.load import read_model
from leyden.services.trainer.rows.progress import Progress
from leyden.services.trainer.settings import Settings
from leyden.services.trainer.state import resume, saving
from leyden.services.trainer.state.assembly import make_accelerator
from leyden.services.trainer.state.folders import CheckpointDamaged, LockCheck, remove_folder, version_folder
from leyden.services.trainer.state.resume import RecordedRun
from leyden.services.trainer.state.versions import copy_version, describe, export_version
from tests.faults.proxy import FaultProxy, Trouble
from tests.replay import differing_versions
from tests.support import builders
from tests.support.alarms import alarm_lines
from tests.support.long import long_only
from tests.support.waiting import eventually


class Case:
    """A run of `steps` steps of two groups, and what the tests ask about it."""

    def __init__(self, database: Database, dsn: str, model: Path, folder: Path, redis_url: str) -> None:
        self.database, self.model, self.folder = database, model, folder
        self._dsn, self._redis_url = dsn, redis_url

    async def open(
        self,
        steps: int = 2,
        algorithm: Mapping[str, object] | None = None,
        sampling: Mapping[str, object] | None = None,
        **training_changes: object,
    ) -> "Case":
        has_critic = bool(algorithm and algorithm.get("critic"))
        document = builders.run_document(
            credit={"baseline": {"type": "value" if has_critic else "mean"}},
            sampling={"group_size": 2, "groups_per_step": 2, "max_policy_lag": 1, **(sampling or {})},
            optimizer={"learning_rate": 1e-3},
            algorithm={"type": "ppo_clip", **(algorithm or {})},
            training={"steps": steps, "max_logprob_gap": 100.0, "min_effective_share": 0.0, **training_changes},
        )
        self.run = await builders.add_run(self.database, config=document)
        return self

    def settings(self, **changes: object) -> Settings:
        values = {
            "run_id": self.run.id,
            "database_url": self._dsn,
            "redis_url": self._redis_url,
            "folder": self.folder,
            "model_path": self.model,
            "device": "cpu",
            "threads": 1,
            "poll_seconds": 0.05,
        }
        return Settings(**{**values, **changes})  # type: ignore[arg-type]

    async def add_group(
        self,
        number: int,
        *,
        version: int = 0,
        has_variance: bool = True,
        model: PreTrainedModel | None = None,
        experts: Callable[[int], bytes] | None = None,
    ) -> str:
        """Args: model: of the version, which gives the tokens their log-probabilities; any without it; experts: those
        that the engine recorded for so many tokens of a call"""
        group, rollouts = await builders.add_group(self.database, self.run, number)
        for sibling, rollout in enumerate(rollouts):
            advantage = (-1.0) ** sibling if has_variance else 0.0
            reward = float(number % 3 + sibling)
            sampled = (4 + number, 5 + sibling)
            columns: dict[str, Any] = (
                {} if model is None else {"generator_logprobs": logprobs_of(model, (1, 2, 3), sampled)}
            )
            columns["call_id"] = f"call-{rollout.id}"
            if experts is not None:
                recorded = experts(len(sampled) + 2)
                routed = await builders.add_call(self.database, rollout, sampled=sampled, routed_experts=recorded)
                columns["call_id"] = routed.id
            call = {"id": rollout.id, "parent": None, "reward": reward, "share": 1.0, "begin": 3, "end": 4}
            await builders.add_sample(
                self.database,
                rollout,
                sampled=sampled,
                advantage=advantage,
                policy_version=version,
                calls=[call] if self.run.config["credit"]["baseline"]["type"] == "value" else None,
                **columns,
            )
        await builders.add_credited_group(self.database, group, min_policy_version=version, has_variance=has_variance)
        return group.id

    async def train(self, stop: asyncio.Event | None = None, **changes: object) -> None:
        async with asyncio.timeout(240):
            await worker.run_trainer(self.settings(**changes), stop or asyncio.Event(), Checks())

    async def alarms(self) -> list[str]:
        return await alarm_lines(self.database, self.run.id)

    async def rows(self, table: type[tables.Base]) -> list[tables.Base]:
        async with self.database.read() as session:
            query = select(table).where(table.run_id == self.run.id)  # type: ignore[attr-defined]
            return list((await session.scalars(query)).all())

    async def verdicts(self) -> dict[str, tuple[int | None, str]]:
        return {row.group_id: (row.step, row.verdict) for row in await self.rows(tables.StepGroup)}  # type: ignore[attr-defined]

    async def consumed(self) -> dict[str, int]:
        return {row.sample_id: row.step for row in await self.rows(tables.StepSample)}  # type: ignore[attr-defined]

    async def replays(self) -> dict[int, list[tuple[str, int]]]:
        """The groups that each step used again, and which use of theirs it was."""
        found: dict[int, list[tuple[str, int]]] = {}
        for row in await self.rows(tables.StepReplay):
            found.setdefault(row.step, []).append((row.group_id, row.use))  # type: ignore[attr-defined]
        return {step: sorted(groups) for step, groups in sorted(found.items())}

    async def versions(self) -> dict[int, tables.PolicyVersion]:
        return {row.version: row for row in await self.rows(tables.PolicyVersion)}  # type: ignore[attr-defined,misc]


def logprobs_of(model: PreTrainedModel, prompt: Sequence[int], sampled: Sequence[int]) -> bytes:
    """The column of a sample: 0 for its prompt."""
    ids = torch.tensor([[*prompt, *sampled]])
    with torch.no_grad():
        found = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    own = found.gather(1, ids[0, len(prompt) :, None])[:, 0]
    return np.concatenate([np.zeros(len(prompt)), own.numpy()]).astype("<f4").tobytes()


def flip_a_bit(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


async def until_rows(case: Case, table: type[tables.Base], count: int) -> None:
    async with asyncio.timeout(240):
        while len(await case.rows(table)) < count:
            await asyncio.sleep(0.05)


@pytest.fixture
def case(database: Database, postgres_dsn: str, tiny_model: Path, tmp_path: Path, redis_url: str) -> Case:
    return Case(database, postgres_dsn, tiny_model, tmp_path / "runs", redis_url)


async def test_a_run_without_steps_records_version_0_of_a_model_that_no_trainer_loads(
    case: Case, tmp_path: Path
) -> None:
    await case.open(steps=0)
    model = tmp_path / "experts"
    shutil.copytree(case.model, model)
    described = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**described, "model_type": "mixtral", "num_local_experts": 4}))
    for _ in range(2):
        await case.train(model_path=model)
    assert [(number, one.path) for number, one in (await case.versions()).items()] == [(0, str(model))]


async def test_a_step_records_logprobs_and_entropies_of_its_start(case: Case) -> None:
    await case.open(steps=1)
    model = read_model(case.model)
    for number in range(2):
        await case.add_group(number, model=model)
    await case.train()
    sampled = {row.id: row.generator_logprobs for row in await case.rows(tables.Sample)}  # type: ignore[attr-defined]
    recorded: Sequence[tables.StepSample] = await case.rows(tables.StepSample)  # type: ignore[assignment]
    assert len(recorded) == 4
    for row in recorded:
        assert row.trainer_logprobs is not None and row.trainer_entropies is not None
        engine = np.frombuffer(sampled[row.sample_id], "<f4")[3:]
        np.testing.assert_allclose(np.frombuffer(row.trainer_logprobs, "<f4"), engine, atol=1e-5)
        entropies = np.frombuffer(row.trainer_entropies, "<f4")
        assert len(entropies) == len(engine) and (entropies > 0).all()


async def test_every_version_has_a_canary_of_the_same_tokens(case: Case) -> None:
    await case.open(steps=2)
    for number in range(2):
        await case.add_group(number)
    stop = asyncio.Event()
    first = asyncio.create_task(case.train(stop))
    await until_rows(case, tables.Step, 1)
    stop.set()
    await first
    # As of a release without canaries.
    async with case.database.session() as session:
        await session.delete(await session.get_one(tables.VersionCanary, (case.run.id, 1)))
    for number in range(2, 4):
        await case.add_group(number, version=1)
    await case.train()
    canaries = {row.version: row.canary for row in await case.rows(tables.VersionCanary)}  # type: ignore[attr-defined]
    assert sorted(canaries) == [0, 1, 2]
    for number, row in (await case.versions()).items():
        found = canaries[number]
        assert [len(ids) for ids in found["token_ids"]] == [12] * 4
        assert (found["token_ids"], found["dtype"], found["max_gap"]) == (canaries[0]["token_ids"], "float32", 100.0)
        model = read_model(Path(row.path))
        for ids, logprobs in zip(found["token_ids"], found["logprobs"], strict=True):
            expected = np.frombuffer(logprobs_of(model, ids[:1], ids[1:]), "<f4")[1:]
            assert logprobs == pytest.approx(expected, abs=1e-5)
    metrics = [step.metrics for step in await case.rows(tables.Step)]  # type: ignore[attr-defined]
    assert all(one["canary_seconds"] > 0 for one in metrics)


async def test_a_model_that_cannot_be_trained_is_refused_before_version_0(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[Path]()

    def refuse(folder: Path) -> None:
        asked.append(folder)
        raise UnsupportedModel("llama: choose another model")

    monkeypatch.setattr(worker, "check_family", refuse)
    await case.open(steps=1)
    with pytest.raises(UnsupportedModel):
        await case.train()
    assert (asked, await case.versions()) == ([case.model], {})


async def test_a_run_asks_once_whether_its_models_can_be_trained(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a restart, nor a critic, nor a KL reference, nor a comparison with an older version asks again."""
    asked, check = list[Path](), worker.check_family
    monkeypatch.setattr(worker, "check_family", lambda folder: (asked.append(folder), check(folder)))
    await case.open(
        steps=2, algorithm={"critic": {"trunk": "own"}, "kl_coefficient": 0.1, "kl_reference_every": 1},
    )  # fmt: skip
    for number in range(2):
        await case.add_group(number)
    stop = asyncio.Event()
    training = asyncio.create_task(case.train(stop))
    await until_rows(case, tables.Step, 1)
    stop.set()
    await training
    for number in range(2, 4):
        await case.add_group(number)
    await case.train()
    assert asked == [case.model]
    assert (await case.rows(tables.Step))[1].metrics["logprob_gap_tokens"] > 0  # type: ignore[attr-defined]


async def test_one_step_trains_each_sample_and_each_step_writes_a_version(case: Case) -> None:
    await case.open(steps=2)
    groups = [await case.add_group(number) for number in range(4)]
    await case.train()

    assert await case.verdicts() == {group: (1 + i // 2, "trained") for i, group in enumerate(groups)}
    assert await case.consumed() == {f"{group}.{s}:0": 1 + i // 2 for i, group in enumerate(groups) for s in (0, 1)}
    versions = await case.versions()
    assert sorted(versions) == [0, 1, 2]
    assert versions[0].path == str(case.model)
    assert len({version.content_sha256 for version in versions.values()}) == 3
    for version in versions.values():
        found = describe(Path(version.path))
        assert (found.content_sha256, found.size_bytes) == (version.content_sha256, version.size_bytes)
    steps = await case.rows(tables.Step)
    assert sorted(step.number for step in steps) == [1, 2]  # type: ignore[attr-defined]
    assert {"loss", "gradient_norm", "step_seconds", "policy_lag_max"} <= set(steps[0].metrics)  # type: ignore[attr-defined]


async def test_a_trainer_records_how_it_computes_and_keeps_it(case: Case) -> None:
    await case.open(steps=1)
    for number in range(2):
        await case.add_group(number)
    document = RunConfig.stored(case.run.config).training
    assert (document.precision, document.export_dtype) == (None, None)
    async with case.database.session() as session:
        # As a trainer on a GPU would have left it: one on a CPU exports in the same type.
        row = {
            "precision": "float32",
            "attention": "flex",
            "export_dtype": "bfloat16",
            "correction": {"type": "bypass"},
        }
        session.add(tables.Computation(run_id=case.run.id, device="cuda", settings=row, latest_device="cuda"))
    await case.train()
    (kept,) = await case.rows(tables.Computation)
    assert (kept.device, kept.latest_device, kept.settings) == ("cuda", "cpu", row)  # type: ignore[attr-defined]
    weights = load_file(Path((await case.versions())[1].path) / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}


async def test_stale_groups_are_refused_and_never_trained(case: Case) -> None:
    await case.open(steps=3)
    for number, version in ((0, 0), (1, 0), (2, 1), (3, 1)):
        await case.add_group(number, version=version)
    old = await case.add_group(4, version=0)
    for number in (5, 6):
        await case.add_group(number, version=1)
    await case.train()
    verdicts = await case.verdicts()
    assert verdicts.pop(old) == (None, "stale")
    assert sorted(step or 0 for step, _ in verdicts.values()) == [1, 1, 2, 2, 3, 3]
    assert not [sample for sample in await case.consumed() if sample.startswith(f"{old}.")]


async def test_a_group_without_variance_is_consumed_but_not_trained(case: Case) -> None:
    await case.open(steps=1)
    zero_variance = await case.add_group(0, has_variance=False)
    moving = await case.add_group(1)
    await case.train()
    assert await case.verdicts() == {zero_variance: (1, "no_variance"), moving: (1, "trained")}
    assert set(await case.consumed()) == {f"{moving}.0:0", f"{moving}.1:0"}


@pytest.mark.parametrize("algorithm", [{}, {"kl_coefficient": 0.1}])
async def test_groups_without_a_trainable_token_make_a_step_that_says_so(
    case: Case, algorithm: dict[str, object]
) -> None:
    await case.open(steps=2, algorithm=algorithm)
    still = await case.add_group(0, has_variance=False)
    silent = [(await builders.add_group(case.database, case.run, number))[0] for number in (1, 2, 3)]
    for group in silent:
        await builders.add_credited_group(case.database, group, has_variance=False, min_policy_version=None)
    await case.train()
    first = "trained" if algorithm else "no_variance"
    steps = {group.id: (2 if group.number > 1 else 1, "untrainable") for group in silent}
    assert await case.verdicts() == {still: (1, first), **steps}
    metrics = [step.metrics for step in sorted(await case.rows(tables.Step), key=lambda step: step.number)]  # type: ignore[attr-defined]
    assert [one["trainable_tokens"] for one in metrics] == [4, 0]
    assert [one["groups_untrainable"] for one in metrics] == [1, 2]
    versions = await case.versions()
    assert versions[2].content_sha256 == versions[1].content_sha256


async def test_a_kl_penalty_trains_groups_without_variance_too(case: Case) -> None:
    await case.open(steps=2, algorithm={"kl_coefficient": 0.1})
    moving = [await case.add_group(number) for number in (0, 1)]
    still = [await case.add_group(number, version=1, has_variance=False) for number in (2, 3)]
    await case.train()
    assert await case.verdicts() == {**dict.fromkeys(moving, (1, "trained")), **dict.fromkeys(still, (2, "trained"))}
    second = max(await case.rows(tables.Step), key=lambda step: step.number)  # type: ignore[attr-defined]
    assert second.metrics["kl_reference"] > 0  # type: ignore[attr-defined]
    assert second.metrics["gradient_norm"] > 0  # type: ignore[attr-defined]


async def test_version_0_is_the_base_model_and_is_there_before_any_group(case: Case) -> None:
    await case.open()
    stop = asyncio.Event()
    training_ = asyncio.create_task(case.train(stop))
    while not await case.versions():
        await asyncio.sleep(0.02)
    stop.set()
    await training_
    assert (await case.versions())[0].content_sha256 == describe(case.model).content_sha256


async def interrupted_once(case: Case, monkeypatch: pytest.MonkeyPatch, name: str, owner: object) -> None:
    """Trains, with one failure in place of the named function's first return."""
    real: Callable[..., object] = getattr(owner, name)

    async def failing(*arguments: object, **named: object) -> None:
        raise RuntimeError("killed here")

    def failing_now(*arguments: object, **named: object) -> None:
        raise RuntimeError("killed here")

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing if asyncio.iscoroutinefunction(real) else failing_now)
        with pytest.raises(RuntimeError, match="killed here"):
            await case.train()


@pytest.mark.parametrize(
    ("owner", "name"),
    [(training, "load_samples"), (trainer_loop, "export_version"), (training, "commit_step")],
)
async def test_a_crash_anywhere_in_a_step_changes_nothing_of_the_result(
    case: Case, monkeypatch: pytest.MonkeyPatch, owner: object, name: str
) -> None:
    await case.open(steps=2)
    for number in range(2):
        await case.add_group(number)
    other = Case(case.database, case._dsn, case.model, case.folder / "other", case._redis_url)
    await other.open(steps=2)
    for number in range(2):
        await other.add_group(number)
    await interrupted_once(case, monkeypatch, name, owner)
    assert await case.verdicts() == {}
    for subject in (case, other):
        for number in (2, 3):
            await subject.add_group(number)
        await subject.train()
    hashes = [{v: row.content_sha256 for v, row in (await s.versions()).items()} for s in (case, other)]
    assert hashes[0] == hashes[1]
    assert sorted(hashes[0]) == [0, 1, 2]


@pytest.mark.parametrize("lost_step", [1, 2])
async def test_a_step_without_a_checkpoint_is_recomputed_from_its_samples(
    case: Case, monkeypatch: pytest.MonkeyPatch, lost_step: int
) -> None:
    other = Case(case.database, case._dsn, case.model, case.folder / "other", case._redis_url)
    for subject in (case, other):
        await subject.open(steps=3, keep_checkpoints=1)
        for number in range(2 * lost_step):
            await subject.add_group(number, version=number // 2)
    real: Callable[..., None] = saving.save_checkpoint

    def failing(state: object, progress: Progress, *where: object) -> None:
        if progress.step == lost_step:
            raise RuntimeError("killed here")
        real(state, progress, *where)

    with monkeypatch.context() as patch:
        patch.setattr(saving, "save_checkpoint", failing)
        with pytest.raises(RuntimeError, match="killed here"):
            await case.train()
    assert max(await case.versions()) == lost_step
    checkpoints = case.folder / case.run.id / "checkpoints"
    assert not (checkpoints / str(lost_step)).exists()

    for subject in (case, other):
        for number in range(2 * lost_step, 6):
            await subject.add_group(number, version=number // 2)
        await subject.train()
    hashes = [{v: row.content_sha256 for v, row in (await s.versions()).items()} for s in (case, other)]
    assert hashes[0] == hashes[1]
    assert sorted(hashes[0]) == [0, 1, 2, 3]
    assert sorted((await case.consumed()).values()) == [1] * 4 + [2] * 4 + [3] * 4
    assert [file.name for file in checkpoints.iterdir()] == ["3"]


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
async def test_a_refreshed_reference_is_the_same_after_a_kill(
    case: Case, monkeypatch: pytest.MonkeyPatch, lora: dict[str, int] | None
) -> None:
    other = Case(case.database, case._dsn, case.model, case.folder / "other", case._redis_url)
    for subject in (case, other):
        algorithm = {"kl_coefficient": 2.0, "kl_reference_every": 3, "epochs": 2}
        await subject.open(steps=5, keep_checkpoints=1, algorithm=algorithm, lora=lora)
        for number in range(8):
            await subject.add_group(number, version=number // 2)
    # Step 1 is made again from the base model, and step 5 has version 3 as its reference, from the disk.
    with monkeypatch.context() as patch:
        await interrupted_once(case, patch, "save_checkpoint", saving)
    stop = asyncio.Event()
    stopped = asyncio.create_task(case.train(stop))
    while 4 not in await case.versions():
        await asyncio.sleep(0.02)
    stop.set()
    await stopped
    for subject in (case, other):
        for number in (8, 9):
            await subject.add_group(number, version=4)
        await subject.train()
    hashes = [{v: row.content_sha256 for v, row in (await s.versions()).items()} for s in (case, other)]
    assert hashes[0] == hashes[1]
    folder = case.folder / case.run.id
    assert sorted(path.name for path in (folder / "versions").iterdir()) == ["3", "5"]
    # The fourth step begins at its reference, and leaves it in its second update.
    steps = sorted(await case.rows(tables.Step), key=lambda step: step.number)  # type: ignore[attr-defined]
    away = [step.metrics["kl_reference"] for step in steps]  # type: ignore[attr-defined]
    assert 0 < away[3] < away[2]
    assert away[3] < away[4]


async def test_a_checkpoint_waits_a_while_but_not_beyond_the_next_update_or_the_end(case: Case) -> None:
    await case.open(steps=3)
    stop = asyncio.Event()
    trainer = asyncio.create_task(case.train(stop, checkpoint_delay_seconds=3600))

    async def step(number: int) -> None:
        for group in (2 * number, 2 * number + 1):
            await case.add_group(group, version=number - 1)
        async with asyncio.timeout(240):
            while len(await case.rows(tables.Step)) < number:
                await asyncio.sleep(0.02)

    checkpoints = case.folder / case.run.id / "checkpoints"
    await step(1)
    assert not (checkpoints / "1").exists()
    await step(2)
    assert [(checkpoints / name).exists() for name in ("1", "2")] == [True, False]
    stop.set()
    await trainer
    assert (checkpoints / "2").exists()


async def test_a_trainer_that_is_cancelled_while_it_saves_ends_with_a_complete_checkpoint(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    await case.open(steps=1)
    for number in range(2):
        await case.add_group(number)
    loop, real = asyncio.get_running_loop(), saving.save_checkpoint
    written, closing = asyncio.Event(), threading.Event()

    class SignallingPool(ThreadPoolExecutor):
        def shutdown(self, *arguments: bool, **named: bool) -> None:
            closing.set()
            super().shutdown(*arguments, **named)

    def slow(
        state: Mapping[str, torch.Tensor], progress: Progress, folder: Path, check_lock: LockCheck, *where: object
    ) -> None:
        asked = 0

        def late() -> None:
            nonlocal asked
            asked += 1
            if asked == 2:
                loop.call_soon_threadsafe(written.set)
                assert closing.wait(60)
                # Fails, instead of waiting for ever, if the loop waits for this thread.
                asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(20)
            check_lock()

        real(state, progress, folder, late, *where)

    monkeypatch.setattr(saving, "ThreadPoolExecutor", SignallingPool)
    monkeypatch.setattr(saving, "save_checkpoint", slow)
    trainer = asyncio.create_task(case.train())
    await asyncio.wait_for(written.wait(), 60)
    trainer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await trainer
    assert [path.name for path in (case.folder / case.run.id / "checkpoints").iterdir()] == ["1"]
    lock = AdvisoryLock(case._dsn, f"trainer:{case.run.id}")
    assert await lock.acquire()
    await lock.release()


async def test_a_recomputed_step_uses_the_recorded_weights(
    case: Case,
) -> None:
    await case.open(steps=1)
    for number in range(2):
        await case.add_group(number)
    await case.train()
    remove_folder(case.folder / case.run.id / "checkpoints" / "1")
    # Like another machine: the step made again computes other weights.
    config = RunConfig.model_validate(case.run.config | {"optimizer": {"learning_rate": 5e-3}})
    loader = RecordedRun(case.database, case.run.id, config, case.model, make_accelerator("cpu", "float32"))
    learner = await loader.restore(lambda: False)
    again = export_version(learner, case.model, case.folder / "again")
    assert (learner.step, again.content_sha256) == (1, (await case.versions())[1].content_sha256)


async def test_a_recorded_step_without_files_is_an_error(case: Case) -> None:
    await case.open(steps=2)
    for number in range(4):
        await case.add_group(number)
    await case.train()
    remove_folder(case.folder / case.run.id / "checkpoints")
    with pytest.raises(CheckpointDamaged, match="restore it from a backup"):
        await case.train()


@pytest.mark.parametrize("damage", ["weights", "no weights", "checkpoint", "bit", "adapter"])
async def test_a_restarted_trainer_makes_damaged_files_again(case: Case, damage: str) -> None:
    await case.open(steps=2, lora={"rank": 4} if damage == "adapter" else None)
    for number in range(4):
        await case.add_group(number, version=number // 2)
    await case.train()
    version, folder = (await case.versions())[2], case.folder / case.run.id
    if damage in {"weights", "adapter"}:
        name = "model.safetensors" if damage == "weights" else "adapter/adapter_model.safetensors"
        file = folder / "versions" / "2" / name
        file.write_bytes(file.read_bytes()[:-4] + b"abcd")
    elif damage == "no weights":
        remove_folder(folder / "versions" / "2")
    elif damage == "checkpoint":
        (folder / "checkpoints" / "2" / "optimizer.safetensors").write_bytes(b"PK")
    else:
        flip_a_bit(folder / "checkpoints" / "2" / "optimizer.safetensors")
    await case.train()
    assert describe(Path(version.path)).content_sha256 == version.content_sha256
    assert sorted(path.name for path in folder.glob("*/*")) == ["1", "1", "2", "2"]
    assert len(await case.rows(tables.Step)) == 2
    [warning] = await case.alarms()
    assert warning.startswith("a trainer found files of steps damaged, 1 times, and went back")


@pytest.mark.parametrize("damage", ["no weights", "bit"])
async def test_a_lost_version_in_bfloat16_is_written_from_its_checkpoint_alone(
    case: Case, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    await case.open(steps=2, export_dtype="bfloat16", algorithm={"kl_coefficient": 0.1, "kl_reference_every": 2})
    for number in range(4):
        await case.add_group(number, version=number // 2)
    await case.train()
    version = (await case.versions())[2]
    if damage == "bit":
        flip_a_bit(Path(version.path) / "model.safetensors")
    else:
        remove_folder(Path(version.path))

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a GPU need not make a step twice alike")

    monkeypatch.setattr(resume, "optimizer_step", never)
    await case.train()
    assert describe(Path(version.path)).content_sha256 == version.content_sha256
    damaged: Sequence[tables.DamagedStep] = await case.rows(tables.DamagedStep)  # type: ignore[assignment]
    assert [row.step for row in damaged] == [2]


async def test_a_trainer_goes_back_to_the_newest_checkpoint_that_is_whole(case: Case, tmp_path: Path) -> None:
    """Two of three are damaged: it makes both steps again, and the run goes on to the same weights."""
    made = {}
    for damaged in (False, True):
        await case.open(steps=4, keep_checkpoints=3)
        for number in range(6):
            await case.add_group(number, version=number // 2)
        stop = asyncio.Event()
        training = asyncio.create_task(case.train(stop))
        await until_rows(case, tables.Step, 3)
        stop.set()
        await training
        folder = case.folder / case.run.id / "checkpoints"
        for step in (2, 3) if damaged else ():
            flip_a_bit(folder / str(step) / "optimizer.safetensors")
        for number in (6, 7):
            await case.add_group(number, version=3)
        await case.train()
        made[damaged] = [(await case.versions())[step].content_sha256 for step in range(1, 5)]
        assert len(await case.alarms()) == damaged
    assert made[True] == made[False]


async def test_damaged_files_that_cannot_be_made_again_are_an_error_with_the_remedy(case: Case) -> None:
    await case.open(steps=2, keep_checkpoints=1)
    for number in range(4):
        await case.add_group(number, version=number // 2)
    await case.train()
    remove_folder(case.folder / case.run.id / "versions" / "2")
    with pytest.raises(CheckpointDamaged, match=r"versions/2 .*; step 2 cannot be made again .*: restore one, or"):
        await case.train()


async def test_a_trainer_exports_its_newest_version_again_where_the_folder_is_gone(case: Case) -> None:
    await case.open(steps=2, keep_checkpoints=1)
    for number in range(2):
        await case.add_group(number)
    stop = asyncio.Event()
    trainer = asyncio.create_task(case.train(stop))
    async with asyncio.timeout(240):
        while 1 not in await case.versions():
            await asyncio.sleep(0.02)
    version = (await case.versions())[1]
    folder = Path(version.path)
    folder.rename(folder.with_name("1.damaged-0"))
    await eventually(folder.exists)
    stop.set()
    await trainer
    assert describe(folder).content_sha256 == version.content_sha256


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
async def test_a_restarted_trainer_continues_as_if_it_had_never_stopped(
    case: Case, lora: dict[str, int] | None
) -> None:
    results = []
    for restart in (False, True):
        subject = Case(case.database, case._dsn, case.model, case.folder / str(restart), case._redis_url)
        await subject.open(steps=2, lora=lora)
        for number in range(2):
            await subject.add_group(number)
        if restart:
            stop = asyncio.Event()
            first = asyncio.create_task(subject.train(stop))
            while 1 not in await subject.versions():
                await asyncio.sleep(0.02)
            stop.set()
            await first
        for number in (2, 3):
            await subject.add_group(number)
        await subject.train()
        results.append((await subject.versions())[2].content_sha256)
    assert results[0] == results[1]


@pytest.mark.parametrize("answer_alone", [False, True])
async def test_a_trainer_with_failed_commits_repeats_the_same_steps(
    database: Database, postgres_dsn: str, tiny_model: Path, tmp_path: Path, redis_url: str, answer_alone: bool
) -> None:
    results = []
    with FaultProxy.of(postgres_dsn) as proxy:
        for name in ("quiet", "cut"):
            subject = await Case(database, postgres_dsn, tiny_model, tmp_path / name, redis_url).open(steps=2)
            for number in range(4):
                await subject.add_group(number)
            proxy.trouble = Trouble(cut_at=b"COMMIT", cut_answer=answer_alone) if name == "cut" else Trouble()
            training_on = asyncio.create_task(subject.train(database_url=proxy.url(postgres_dsn)))
            if name == "cut" and not answer_alone:
                # Nothing is ever committed like this: after a few tries it is.
                await eventually(lambda: proxy.cuts >= 3)
                proxy.heal()
            await training_on
            results.append({version: row.content_sha256 for version, row in (await subject.versions()).items()})
            assert sorted((await subject.consumed()).values()) == [1] * 4 + [2] * 4
        assert proxy.cuts >= 3
    assert results[0] == results[1]


async def test_a_file_error_is_no_store_outage_and_ends_the_trainer(case: Case, tmp_path: Path) -> None:
    await case.open(steps=1)
    for number in range(2):
        await case.add_group(number)
    (tmp_path / "a file").touch()
    with pytest.raises(NotADirectoryError):
        await case.train(folder=tmp_path / "a file")


async def test_two_trainers_of_a_run_never_work_at_once(case: Case) -> None:
    await case.open(steps=1)
    for number in range(2):
        await case.add_group(number)
    lock = AdvisoryLock(case._dsn, f"trainer:{case.run.id}")
    assert await lock.acquire()
    waiting = asyncio.create_task(case.train())
    await asyncio.sleep(0.3)
    assert await case.versions() == {}
    await lock.release()
    await waiting
    assert sorted(await case.versions()) == [0, 1]


async def test_a_trainer_that_lost_its_run_before_the_checkpoint_writes_nothing_into_its_folder(case: Case) -> None:
    other = Case(case.database, case._dsn, case.model, case.folder / "other", case._redis_url)
    for subject in (case, other):
        await subject.open(steps=2)
        for number in range(2):
            await subject.add_group(number)
    training_ = asyncio.create_task(case.train(checkpoint_delay_seconds=3600))
    async with asyncio.timeout(240):
        while 1 not in await case.versions():
            await asyncio.sleep(0.02)
    await wait_for_row(
        "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND granted", case._dsn
    )
    lock = AdvisoryLock(case._dsn, f"trainer:{case.run.id}")
    await eventually(lambda: lock.acquire())
    for number in (2, 3):
        await case.add_group(number)
    asks = "SELECT FROM pg_stat_activity WHERE application_name = 'leyden-trainer' AND query LIKE '%try_advisory%'"
    await wait_for_row(asks, case._dsn)
    folder = case.folder / case.run.id
    assert [path.name for path in folder.glob("[vc]*/*")] == ["1"]
    await lock.release()
    await training_

    for number in (2, 3):
        await other.add_group(number)
    await other.train()
    hashes = [{v: row.content_sha256 for v, row in (await s.versions()).items()} for s in (case, other)]
    assert hashes[0] == hashes[1]
    assert sorted(hashes[0]) == [0, 1, 2]
    assert sorted((await case.consumed()).values()) == [1] * 4 + [2] * 4


async def wait_for_row(query: str, dsn: str) -> None:
    """Returns when a query finds a row."""
    async with asyncio.timeout(240), await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        while await (await connection.execute(query)).fetchone() is None:
            await asyncio.sleep(0.02)


async def test_a_step_is_recorded_once(case: Case) -> None:
    await case.open()
    group = await case.add_group(0)
    await builders.add_policy_version(case.database, case.run, 0)
    version = training.Version(1, "/w", "hash", 1)
    record = training.StepRecord(case.run.id, 1, {}, "/c", datetime.now(tz=UTC), [group], [], [f"{group}.0:0"], version)
    async with case.database.session() as session:
        await training.commit_step(session, record)
    for changed in ({}, {"number": 2, "version": training.Version(2, "/w", "h", 1)}):
        with pytest.raises(Refused):
            async with case.database.session() as session:
                await training.commit_step(session, training.StepRecord(**{**vars(record), **changed}))
    assert await case.consumed() == {f"{group}.0:0": 1}
    assert sorted(await case.versions()) == [0, 1]


async def test_old_files_are_removed_and_the_newest_remain(case: Case) -> None:
    await case.open(steps=3, keep_checkpoints=1)
    for number in range(6):
        await case.add_group(number, version=min(number // 2, 1))
    await case.train()
    versions = await case.versions()
    assert {v: row.pruned_at is None for v, row in versions.items()} == {0: True, 1: False, 2: False, 3: True}
    assert {v: Path(row.path).exists() for v, row in versions.items()} == {0: True, 1: False, 2: False, 3: True}
    assert [f.name for f in (case.folder / case.run.id / "checkpoints").iterdir()] == ["3"]


async def test_a_trainer_started_after_the_last_step_removes_what_a_killed_one_left(case: Case) -> None:
    await case.open(steps=2, keep_checkpoints=1)
    for number in range(4):
        await case.add_group(number, version=number // 2)
    await case.train()
    folder = case.folder / case.run.id
    for kind in ("versions", "checkpoints"):
        # As the first step's files are until the second step's are whole.
        shutil.copytree(folder / kind / "2", folder / kind / "1")
    await case.train()
    assert sorted(path.name for path in folder.glob("*/*")) == ["2", "2"]


async def test_a_trainer_on_a_full_volume_removes_an_older_checkpoint_and_goes_on(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The volume holds the two checkpoints of `keep_checkpoints` and no third one beside them."""
    await case.open(steps=3)
    for number in range(6):
        await case.add_group(number, version=number // 2)
    refused = []

    def save_where_there_is_room(state: object, progress: Progress, folder: Path, *rest: Any) -> None:
        if len([found for found in folder.parent.glob("[0-9]*") if found != folder]) == 2:
            assert refused.count(progress.step) < 2
            refused.append(progress.step)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), folder)
        save_checkpoint(state, progress, folder, *rest)  # type: ignore[arg-type]

    save_checkpoint = saving.save_checkpoint
    for module in (saving, resume):
        monkeypatch.setattr(module, "save_checkpoint", save_where_there_is_room)
    await case.train()
    assert refused == [3, 3]
    folders = sorted(
        str(path.relative_to(case.folder / case.run.id)) for path in (case.folder / case.run.id).glob("*/*")
    )
    assert folders == ["checkpoints/2", "checkpoints/3", "versions/2", "versions/3"]


async def test_the_best_version_stays_with_its_checkpoint(case: Case) -> None:
    await case.open(steps=4, keep_checkpoints=1)
    for number in range(8):
        await case.add_group(number, version=number // 2)
    for version, reward in ((1, 1.0), (2, 2.0), (3, 0.5)):
        _, rollouts = await builders.add_group(
            case.database, case.run, 50 + version, admitted_version=version, state="complete"
        )
        await builders.finish_rollout(case.database, rollouts[0], reward=reward)
    await case.train()
    # Version 1 was the best one before there was version 2.
    folders = {path.relative_to(case.folder / case.run.id) for path in (case.folder / case.run.id).glob("*/*")}
    assert folders == {Path(kind, str(number)) for kind in ("versions", "checkpoints") for number in (2, 4)}


async def test_a_step_with_a_large_logprob_gap_is_never_committed(case: Case) -> None:
    await case.open(steps=3, max_logprob_gap=1e-12)
    for number in range(6):
        await case.add_group(number, version=number // 2)
    for _ in range(3):
        with pytest.raises(trainer_loop.PoliciesDisagree, match="log-probabilities"):
            await case.train(gap_patience=2)
        assert sorted(await case.versions()) == [0, 1]


@pytest.mark.parametrize("comparable", [True, False])
async def test_a_step_of_only_older_tokens_is_compared_at_their_version_if_possible(
    case: Case, monkeypatch: pytest.MonkeyPatch, comparable: bool
) -> None:
    if not comparable:
        monkeypatch.setattr(trainer_loop, "compare_at", lambda *_: {})
    await case.open(steps=2)
    for number in range(4):
        await case.add_group(number, version=0)
    await case.train()
    steps = {step.number: step.metrics for step in await case.rows(tables.Step)}  # type: ignore[attr-defined]
    assert [steps[number]["logprob_gap_tokens"] for number in (1, 2)] == [8, 8 if comparable else 0]
    assert ("logprob_gap_mean" in steps[2], "logprob_gap_sample_share" in steps[2]) == (comparable, comparable)
    # Gauges are the last step's: without a comparison there is none, and `optimizer_inherited` is of step 1 alone.
    gauges = {name: REGISTRY.get_sample_value("trainer_step_metric_value", {"name": name}) for name in steps[1]}
    assert gauges["logprob_gap_mean"] == steps[2].get("logprob_gap_mean")
    assert (gauges["loss"], gauges["optimizer_inherited"]) == (steps[2]["loss"], None)
    gap = REGISTRY.get_sample_value("trainer_logprob_gap_nats")
    assert gap is not None
    assert math.isnan(gap) != comparable
    assert [warning[:59] for warning in await case.alarms()] == (
        [] if comparable else ["in 1 of the last 2 steps trainer and engine were not compar"]
    )


async def test_a_run_whose_policy_drifts_within_its_lag_is_compared_at_equal_versions(case: Case) -> None:
    """The engine samples each group four versions late, with that version's own log-probabilities."""
    lag, steps = 4, 8
    await case.open(
        steps=steps,
        sampling={"max_policy_lag": lag, "replay": {"share": 0.5, "uses": 4}},
        keep_checkpoints=1,
        max_logprob_gap=1e-4,
        min_effective_share=0.999,
    )
    # Before the trainer's own: transformers loads one model at a time in a process.
    models = {0: read_model(case.model)}
    trainer = asyncio.create_task(case.train(gap_patience=1))
    for step in range(1, steps + 1):
        await until_rows(case, tables.PolicyVersion, step)
        version = max(0, step - 1 - lag)
        if version not in models:
            models[version] = read_model(Path((await case.versions())[version].path))
        for number in (2 * step, 2 * step + 1):
            await case.add_group(number - 2, version=version, model=models[version])
    await trainer
    rows = sorted(await case.rows(tables.Step), key=lambda step: step.number)  # type: ignore[attr-defined]
    metrics = [row.metrics for row in rows]  # type: ignore[attr-defined]
    assert [one["logprob_gap_tokens"] > 0 for one in metrics] == [True] * steps
    assert max(one["logprob_gap_mean"] for one in metrics) < 1e-5
    assert min(one["effective_sample_share"] for one in metrics) < 0.999
    # Nothing of the lag stays once no step follows.
    assert sorted(path.name for path in (case.folder / case.run.id).glob("*/*")) == [str(steps)] * 2


async def started(case: Case) -> asyncio.subprocess.Process:
    environment = {
        "PATH": os.environ["PATH"],
        "LEYDEN_DATABASE_URL": case._dsn,
        "LEYDEN_REDIS_URL": case._redis_url,
        "TRAINER_FOLDER": str(case.folder),
        "TRAINER_MODEL_PATH": str(case.model),
        "TRAINER_DEVICE": "cpu",
        "TRAINER_THREADS": "1",
        "TRAINER_POLL_SECONDS": "0.05",
        "OMP_WAIT_POLICY": "passive",
    }
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "leyden.services.trainer",
        "--run-id",
        case.run.id,
        env=environment,
        stdout=asyncio.subprocess.PIPE,
    )


async def until(case: Case, version: int, process: asyncio.subprocess.Process) -> None:
    async with asyncio.timeout(90):
        while version not in await case.versions():
            assert process.returncode is None
            await asyncio.sleep(0.02)


async def test_a_killed_trainer_is_replaced_and_a_stopped_one_exits_cleanly(case: Case) -> None:
    await case.open(steps=2)
    for number in range(2):
        await case.add_group(number)
    killed = await started(case)
    try:
        await until(case, 1, killed)
    finally:
        killed.kill()
        await killed.communicate()
    stopped = await started(case)
    try:
        # Ready: it has resumed and waits for groups.
        async for line in stopped.stdout or ():
            if b"learner ready" in line:
                assert b'"step":1' in line
                break
        stopped.terminate()
        async with asyncio.timeout(240):
            await stopped.communicate()
    finally:
        if stopped.returncode is None:
            stopped.kill()
    assert stopped.returncode == 0

    for number in (2, 3):
        await case.add_group(number)
    await case.train()
    assert sorted(await case.versions()) == [0, 1, 2]
    assert sorted((await case.consumed()).values()) == [1, 1, 1, 1, 2, 2, 2, 2]


@pytest.mark.parametrize(("version", "inherited"), [(2, 1.0), (1, 0.0), (0, 0.0)])
async def test_a_run_continues_another_from_any_version_with_its_optimiser_if_that_is_there(
    case: Case, version: int, inherited: float
) -> None:
    await case.open(steps=3, keep_checkpoints=3)
    for number in range(6):
        await case.add_group(number, version=number // 2)
    await case.train()
    made = {number: row.content_sha256 for number, row in (await case.versions()).items()}
    if not inherited:
        remove_folder(case.folder / case.run.id / "checkpoints" / str(version))
    parent = case.run
    document = {**parent.config, "training": {**parent.config["training"], "steps": 1}}
    case.run = await builders.add_run(case.database, config=document, parent_run_id=parent.id, parent_version=version)
    # The groups of the parent's step after that version.
    for number in (2 * version, 2 * version + 1):
        await case.add_group(number)
    await case.train()
    versions = await case.versions()
    assert versions[0].content_sha256 == made[version]
    (step,) = await case.rows(tables.Step)
    assert step.metrics["optimizer_inherited"] == inherited  # type: ignore[attr-defined]
    assert (step.number, sorted(versions)) == (1, [0, 1])  # type: ignore[attr-defined]
    # With the moments of its parent the step is the parent's own, bit for bit; without them version 1's step differs.
    assert (versions[1].content_sha256 == made[version + 1]) is (version != 1)
    # Its files outlive the parent's.
    shutil.rmtree(case.folder / parent.id)
    assert describe(Path(versions[0].path)).content_sha256 == made[version]


@pytest.mark.parametrize(
    ("algorithm", "optimizer"),
    [({"type": "sft", "runs": ["run-1"]}, {}), ({}, {"beta1": 0.8}), ({}, {"beta2": 0.999})],
    ids=["fine-tuning", "beta1", "beta2"],
)
async def test_moments_of_another_loss_or_decay_do_not_go_on(
    case: Case, algorithm: dict[str, Any], optimizer: dict[str, float]
) -> None:
    await case.open(steps=1, algorithm=algorithm)
    for number in range(2):
        await case.add_group(number, version=-1 if algorithm else 0)
    await case.train()
    parent = case.run
    changes = {"algorithm": {"type": "ppo_clip"}, "optimizer": {**parent.config["optimizer"], **optimizer}}
    case.run = await builders.add_run(
        case.database, config={**parent.config, **changes}, parent_run_id=parent.id, parent_version=1
    )
    for number in (2, 3):
        await case.add_group(number)
    await case.train()
    (step,) = await case.rows(tables.Step)
    assert step.metrics["optimizer_inherited"] == 0.0  # type: ignore[attr-defined]


async def test_a_continued_run_that_starts_again_needs_its_parent_no_more(case: Case) -> None:
    await case.open(steps=1)
    for number in range(2):
        await case.add_group(number)
    await case.train()
    parent, made = case.run, (await case.versions())[1]
    remove_folder(case.folder / parent.id / "checkpoints" / "1")
    found = []
    for is_parent_deleted in (False, True):
        case.run = await builders.add_run(
            case.database, config=parent.config, parent_run_id=parent.id, parent_version=made.version
        )
        for number in (2, 3):
            await case.add_group(number)
        if is_parent_deleted:
            # The trainer ended after it had recorded version 0.
            own = version_folder(case.folder.absolute(), case.run.id, 0)
            copy_version(Path(made.path), own, made.content_sha256)
            sha256 = made.content_sha256
            await builders.add_policy_version(case.database, case.run, 0, path=str(own), content_sha256=sha256)
            await builders.end_run(case.database, parent)
            async with case.database.session() as session:
                with pytest.raises(actions.ActionRefused, match="needs its checkpoint until its own second step"):
                    await actions.mark_deleted(session, parent.id)
                # As releases before this refusal did.
                await set_intent(session, parent.id, RunIntent.DELETED)
            await retention.delete_run(case.database, parent.id)
            shutil.rmtree(case.folder / parent.id)
        await case.train()
        found.append((await case.versions())[1].content_sha256)
    assert found[0] == found[1]


async def test_a_continued_run_whose_first_version_is_damaged_trains_nothing(case: Case) -> None:
    await case.open(steps=1)
    for number in range(2):
        await case.add_group(number)
    await case.train()
    parent, made = case.run, (await case.versions())[1]
    case.run = await builders.add_run(case.database, config=parent.config, parent_run_id=parent.id, parent_version=1)
    for number in (2, 3):
        await case.add_group(number)
    own = version_folder(case.folder.absolute(), case.run.id, 0)
    copy_version(Path(made.path), own, made.content_sha256)
    await builders.add_policy_version(case.database, case.run, 0, path=str(own), content_sha256=made.content_sha256)
    flip_a_bit(own / "model.safetensors")
    with pytest.raises(CheckpointDamaged, match="not what the store recorded of this version"):
        await case.train()
    assert sorted(await case.versions()) == [0]


@pytest.mark.parametrize("lora", [None, {"rank": 4, "target_modules": ["q_proj"]}], ids=["whole", "lora"])
async def test_the_penalty_of_a_continued_run_is_to_the_version_that_it_continues(
    case: Case, lora: dict[str, Any] | None
) -> None:
    await case.open(steps=1, **({"lora": lora} if lora else {}))
    for number in range(2):
        await case.add_group(number)
    await case.train()
    parent, made = case.run, list[list[str]]()
    penalty = {"type": "ppo_clip", "kl_coefficient": 2.0}
    document = {**parent.config, "algorithm": penalty, "training": {**parent.config["training"], "steps": 2}}
    for starts_again in (False, True):
        case.run = await builders.add_run(case.database, config=document, parent_run_id=parent.id, parent_version=1)
        for number in (2, 3):
            await case.add_group(number)
        if starts_again:
            stop = asyncio.Event()
            training = asyncio.create_task(case.train(stop))
            await until_rows(case, tables.Step, 1)
            stop.set()
            await training
        for number in (4, 5):
            await case.add_group(number)
        await case.train()
        steps = sorted(await case.rows(tables.Step), key=lambda step: step.number)  # type: ignore[attr-defined]
        first, second = (step.metrics["kl_reference"] for step in steps)  # type: ignore[attr-defined]
        assert first == pytest.approx(0.0, abs=1e-9)
        assert second > 1e-6
        made.append([row.content_sha256 for row in (await case.versions()).values()])
    assert made[0] == made[1]


@pytest.mark.parametrize("lora", [None, {"rank": 4, "target_modules": ["q_proj"]}], ids=["whole", "lora"])
async def test_a_run_and_one_that_continues_it_stay_with_the_model_with_which_they_began(
    case: Case, tmp_path: Path, lora: dict[str, Any] | None
) -> None:
    other = tmp_path / "other"
    shutil.copytree(case.model, other)
    (other / "chat_template.jinja").write_text("another template")
    weights = load_file(other / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, other / "model.safetensors", {"format": "pt"})
    made, changes = list[list[str]](), {"lora": lora} if lora else {}
    for later in (case.model, other):
        # KL to the first model: a full run needs it at each step, too.
        await case.open(steps=2, algorithm={"kl_coefficient": 0.1}, **changes)
        hashes = []
        for first, model in ((0, case.model), (2, later)):
            for number in (first, first + 1):
                await case.add_group(number)
            stop = asyncio.Event()
            training = asyncio.create_task(case.train(stop, model_path=model))
            await until_rows(case, tables.Step, first // 2 + 1)
            stop.set()
            await training
        hashes += [row.content_sha256 for row in (await case.versions()).values()]
        parent = case.run
        document = {**parent.config, "training": {**parent.config["training"], "steps": 1}}
        case.run = await builders.add_run(case.database, config=document, parent_run_id=parent.id, parent_version=2)
        for number in (4, 5):
            await case.add_group(number)
        await case.train(model_path=later)
        versions = await case.versions()
        hashes += [row.content_sha256 for row in versions.values()]
        assert (Path(versions[1].path) / "chat_template.jinja").read_text() != "another template"
        made.append(hashes)
        async with case.database.read() as session:
            ids = [parent.id, case.run.id]
            assert await base_models(session, ids) == dict.fromkeys(ids, str(case.model))
    assert made[0] == made[1]


async def test_a_run_whose_engines_serve_another_model_by_now_does_not_go_on(case: Case, tmp_path: Path) -> None:
    await case.open(steps=0)
    await case.train()
    shared = Pool("default", str(tmp_path / "other"), adapters=2)
    shutil.copytree(case.model, tmp_path / "other")
    async with case.database.session() as session:
        await write_pools(session, [shared])
    with pytest.raises(ValueError, match=rf"the run's model {case.model} cannot be served .* start the platform with"):
        await case.train()


async def test_a_policy_that_is_frozen_when_it_continues_serves_the_weights_that_it_begins_with(case: Case) -> None:
    await case.open(steps=2)
    for number in range(4):
        await case.add_group(number, version=number // 2)
    await case.train()
    made, parent = await case.versions(), case.run
    document = {**parent.config, "training": {**parent.config["training"], "steps": 0}}
    case.run = await builders.add_run(case.database, config=document, parent_run_id=parent.id, parent_version=2)
    await case.train()
    [version] = (await case.versions()).values()
    assert (version.version, version.content_sha256) == (0, made[2].content_sha256)
    assert describe(Path(version.path)).content_sha256 == made[2].content_sha256


async def test_a_step_with_replaced_groups_is_made_again_with_the_same_result(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    await case.open(steps=1)
    other = Case(case.database, case._dsn, case.model, case.folder / "other", case._redis_url)
    await other.open(steps=1)
    refilling = {**case.run.config, "sampling": {**case.run.config["sampling"], "refill_zero_variance": 1}}
    case.run = await builders.add_run(case.database, config=refilling)
    for number, has_variance in enumerate((False, True, False, False, True)):
        await case.add_group(number, has_variance=has_variance)
    # Two groups are replaced, and the third counts in the loss's denominators.
    for number, has_variance in ((1, True), (3, False)):
        await other.add_group(number, has_variance=has_variance)

    with monkeypatch.context() as patch:
        patch.setattr(saving, "save_checkpoint", failing_once := Failing())
        with pytest.raises(RuntimeError, match="killed here"):
            await case.train()
        assert failing_once.calls == 1
    await case.train()
    await other.train()
    first, second = (await case.versions())[1], (await other.versions())[1]
    assert first.content_sha256 == second.content_sha256
    names = {number: verdict for number, (_, verdict) in enumerate((await case.verdicts()).values())}
    assert sorted(names.values()) == ["no_variance"] * 3 + ["trained"]
    (step,) = await case.rows(tables.Step)
    assert step.metrics["groups_replaced"] == 2  # type: ignore[attr-defined]
    states = [
        (subject.folder / subject.run.id / "checkpoints" / "1" / "optimizer.safetensors").read_bytes()
        for subject in (case, other)
    ]
    assert states[0] == states[1]


async def test_groups_are_used_again_within_the_lag_bound_and_as_often_as_the_run_allows(case: Case) -> None:
    await case.open(steps=4, sampling={"max_policy_lag": 2, "replay": {"uses": 2, "share": 2.0}})
    groups = [await case.add_group(number, version=number // 2) for number in range(8)]
    still = await case.add_group(8, version=3, has_variance=False)
    await case.train()

    assert await case.replays() == {
        2: [(groups[0], 1), (groups[1], 1)],
        3: [(groups[0], 2), (groups[1], 2), (groups[2], 1), (groups[3], 1)],
        # Version 0 is three versions behind step 4, which improves version 3.
        4: [(groups[2], 2), (groups[3], 2), (groups[4], 1), (groups[5], 1)],
    }
    assert still not in await case.verdicts()
    steps = {step.number: step.metrics for step in await case.rows(tables.Step)}  # type: ignore[attr-defined]
    assert [(one["samples"], one["samples_replayed"], one["groups_replayed"]) for one in steps.values()] == [
        (4, 0, 0),
        (8, 4, 2),
        (12, 8, 4),
        (12, 8, 4),
    ]
    assert [one["policy_lag_max"] for one in steps.values()] == [0, 1, 2, 2]
    assert sorted((await case.consumed()).values()) == [number for number in (1, 2, 3, 4) for _ in range(4)]


def call_credit(run_id: str, rollout_id: str, call_id: str, advantage: float, **columns: Any) -> tables.CallCredit:
    values = {"intermediate_reward": 0.0, "return_": 0.0, "baseline": 0.0, "depth": 0, "state_key": ""}
    ids = {"run_id": run_id, "rollout_id": rollout_id, "call_id": call_id}
    return tables.CallCredit(**{**ids, **values, "advantage": advantage, "tools": {"calls": []}, **columns})


async def test_each_policy_prefers_the_groups_in_which_its_own_calls_have_large_advantages(case: Case) -> None:
    replay = {"priority": "advantage", "share": 0.5}
    await case.open(sampling={"max_policy_lag": 1, "replay": replay})
    run, database = case.run, case.database
    other = await builders.add_run(database, dataset_id=run.dataset_id, lead_run_id=run.id, policy="b")
    for number, large in enumerate((run, other)):
        group, (rollout, _) = await builders.add_group(database, run, number)
        for policy in (run, other):
            await builders.add_credited_group(database, group, run_id=policy.id)
            first, last = (f"{policy.id}-{number}-{place}" for place in ("first", "last"))
            await builders.add_sample(database, rollout, run_id=policy.id, call_id=last)
            async with database.session() as session:
                # The row of a policy has the call that its last one continues.
                session.add(call_credit(run.id, rollout.id, first, 3.0 if policy is large else 0.1))
                session.add(call_credit(run.id, rollout.id, last, 0.2, parent_call_id=first))
    sampling = RunConfig.stored(run.config).sampling
    for policy, chosen in ((run, 0), (other, 1)):
        async with database.session() as session:
            session.add(
                tables.Step(run_id=policy.id, number=1, metrics={}, checkpoint="", started_at=datetime.now(tz=UTC))
            )
            await session.flush()
            for number in range(2):
                session.add(
                    tables.StepGroup(group_id=f"{run.id}.{number}", run_id=policy.id, step=1, verdict="trained")
                )
        async with database.read() as session:
            assert await training.replayable_groups(session, policy.id, 2, sampling) == [f"{run.id}.{chosen}"]


@pytest.mark.parametrize(("priority", "chosen"), [("freshness", 3), ("advantage", 1), ("solve_rate", 2)])
async def test_a_step_prefers_groups_by_priority(case: Case, priority: str, chosen: int) -> None:
    await case.open(steps=3, sampling={"max_policy_lag": 2, "replay": {"uses": 2, "share": 0.5, "priority": priority}})
    for number in range(6):
        await case.add_group(number, version=number // 2)
        for sibling, (reward, advantage) in enumerate(
            {1: [(1.0, 3.0), (1.0, -3.0)], 2: [(1.0, 0.5), (0.0, -0.5)]}.get(number, [(1.0, 0.1), (1.0, -0.1)])
        ):
            rollout = f"{case.run.id}.{number}.{sibling}"
            async with case.database.session() as session:
                await session.execute(
                    update(tables.Rollout)
                    .where(tables.Rollout.id == rollout)
                    .values(state="finished", attempt=1, reward=reward, reason="succeeded", finished_at=func.now())
                )
                session.add(call_credit(case.run.id, rollout, f"call-{rollout}", advantage))
    await case.train()
    [(group, _)] = (await case.replays())[3]
    assert group == f"{case.run.id}.{chosen}"


async def test_a_step_with_replayed_groups_is_made_again_with_the_same_result(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Case(case.database, case._dsn, case.model, case.folder / "other", case._redis_url)
    for subject in (case, other):
        await subject.open(steps=2, keep_checkpoints=1, sampling={"replay": {"share": 1.0}})
        for number in range(4):
            await subject.add_group(number, version=number // 2)
    real: Callable[..., None] = saving.save_checkpoint

    def failing(state: object, progress: Progress, *where: object) -> None:
        if progress.step == 2:
            raise RuntimeError("killed here")
        real(state, progress, *where)

    with monkeypatch.context() as patch:
        patch.setattr(saving, "save_checkpoint", failing)
        with pytest.raises(RuntimeError, match="killed here"):
            await case.train()
    await case.train()
    await other.train()
    states = [
        (subject.folder / subject.run.id / "checkpoints" / "2" / "optimizer.safetensors").read_bytes()
        for subject in (case, other)
    ]
    assert states[0] == states[1]
    assert len((await case.replays())[2]) == 2


class Failing:
    """Stands for `save_checkpoint` in a trainer that is killed."""

    calls = 0

    def __call__(self, *arguments: object) -> None:
        self.calls += 1
        raise RuntimeError("killed here")


@long_only
async def test_an_undisturbed_replay_finds_the_samples_of_steps_that_used_groups_again_or_replaced_some(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    sampling = {"max_policy_lag": 2, "replay": {"uses": 1, "share": 0.5}, "refill_zero_variance": 1}
    await case.open(steps=3, sampling=sampling)
    for number, has_variance in enumerate((False, True, True, True, False, False, False, True, True)):
        await case.add_group(number, has_variance=has_variance)
    await case.train()
    steps = {step.number: step.metrics for step in await case.rows(tables.Step)}  # type: ignore[attr-defined]
    assert sum(one["groups_replaced"] for one in steps.values()) == 3
    assert sum(one["groups_replayed"] for one in steps.values()) > 0
    assert await asyncio.to_thread(differing_versions, case._dsn, case.run.id, case.model) == []
