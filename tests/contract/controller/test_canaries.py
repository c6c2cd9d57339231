"""Engines are compared with the trainer after each delivery: real exports of a tiny model, and the CPU engine.

`Versions` makes the versions with the trainer's own functions, `Fleet` delivers them, and the engine loads them.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from sqlalchemy import select

from leyden.libs.contracts.config import RunConfig
from leyden.libs.contracts.weights import ADAPTER_FOLDER, weights_sha256
from leyden.libs.faults import FaultInjector
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.libs.store.runs.canaries import add_canary
from leyden.services.controller.engines.client import EngineClient
from leyden.services.controller.engines.targets import TargetVersion
from leyden.services.trainer.state.assembly import assemble_learner, make_accelerator
from leyden.services.trainer.state.canaries import canary_tokens, compute_canary
from leyden.services.trainer.state.versions import describe, export_version
from leyden.services.trainer.step.step import optimizer_step
from tests.contract.controller.test_engines import fleet_of, rows
from tests.contract.controller.test_leader import start
from tests.contract.trainer.test_engine import as_sample
from tests.fakes.scripted_engine import ScriptedEngine, running
from tests.fakes.tiny_engine import Client, served_engine
from tests.support import builders
from tests.support.alarms import alarms
from tests.support.waiting import eventually

POINTS = ("controller.canary_begun",)
TOLERANCE = 1e-4


class Versions:
    """Three versions of a run, with their canaries."""

    def __init__(self, database: Database, model: Path, folder: Path) -> None:
        self.database, self.model, self.folder = database, model, folder

    async def open(self, **training: Any) -> Versions:
        document = builders.run_document(
            training={"steps": 9, **training}, optimizer={"learning_rate": 1e-3}, sampling={"group_size": 2}
        )
        self.run = await builders.add_run(self.database, config=document)
        config = RunConfig.stored(self.run.config)
        learner = assemble_learner(self.model, config, make_accelerator("cpu", "float32"))
        tokens = canary_tokens(self.model, learner.model.config.vocab_size)
        self.targets = list[TargetVersion]()
        for number in range(3):
            path = self.model
            if number:
                optimizer_step(learner, _samples(number), config)
                path = self.folder / self.run.id / "versions" / str(number)
                export_version(learner, self.model, path)
            self.targets.append(await self._add(number, path))
            canary = compute_canary(learner, tokens, config)
            assert canary is not None
            async with self.database.session() as session:
                await add_canary(session, self.run.id, number, canary)
        return self

    async def _add(self, number: int, path: Path) -> TargetVersion:
        sha256 = describe(path).content_sha256
        columns = {"path": str(path), "content_sha256": sha256}
        await builders.add_policy_version(self.database, self.run, number, **columns)
        return TargetVersion(self.run.id, number, str(path), sha256)

    async def answers(self) -> dict[str, tables.CanaryAnswer]:
        async with self.database.read() as session:
            query = select(tables.CanaryAnswer).where(tables.CanaryAnswer.run_id == self.run.id)
            return {row.url: row for row in await session.scalars(query)}

    async def verdicts(self) -> list[tuple[int, str]]:
        return [(row.policy_version, row.verdict) for _, row in sorted((await self.answers()).items())]

    def with_a_flipped_tensor(self, number: int) -> TargetVersion:
        """The version with the sign of one matrix changed, under a hash that is right."""
        target, name = self.targets[number], "model.layers.1.mlp.down_proj.weight"
        folder = self.folder / "flipped"
        shutil.copytree(target.path, folder)
        tensors = load_file(folder / "model.safetensors")
        save_file({**tensors, name: -tensors[name]}, folder / "model.safetensors", metadata={"format": "pt"})
        return target._replace(path=str(folder), content_sha256=weights_sha256(folder))


def _samples(seed: int) -> list[Any]:
    random = np.random.default_rng(seed)
    found = []
    for number in range(4):
        sampled = random.integers(0, 250, 12).tolist()
        logprobs = [[-5.5, token, None] for token in sampled]
        answer = {"output_ids": sampled, "meta_info": {"output_token_logprobs": logprobs}}
        found.append(as_sample(number, [72, 69, 76], 1.0, answer, seed - 1))
    return found


@pytest.fixture
async def versions(database: Database, tiny_model: Path, tmp_path: Path) -> Versions:
    return await Versions(database, tiny_model, tmp_path).open()


@pytest.fixture
async def engine(tiny_model: Path) -> AsyncIterator[Client]:
    async with served_engine(tiny_model) as client:
        yield client


def url_of(engine: Client) -> str:
    return str(engine.http.base_url).rstrip("/")


def lets_it_keep_its_weights(engine: Client, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The engine answers that it loaded a version, reports its label, and loads nothing. Returns what it was given."""
    given = list[str]()

    async def update(folder: Path, version: str | None, flush_cache: bool) -> bool:
        given.append(str(folder))
        await engine.engine.rename_weights(version or "")
        return flush_cache

    monkeypatch.setattr(engine.engine, "update_weights", update)
    return given


async def test_every_delivered_version_equals_the_trainers(
    versions: Versions, engine: Client, database: Database, redis_url: str, tiny_model: Path
) -> None:
    run_id = versions.run.id
    async with (
        served_engine(tiny_model) as second,
        fleet_of(database, redis_url, *map(url_of, (engine, second))) as fleet,
    ):
        for target in versions.targets:
            fleet.set_target(target)
            await eventually(lambda wanted=target.version: fleet.served_version(run_id) == wanted)
            await eventually(lambda: len(fleet.trouble(run_id) or "") == 0)
        await eventually(lambda: _are(versions, [(2, "equal")] * 2))
        for row in (await versions.answers()).values():
            assert row.gap is not None and row.largest is not None and row.moved is not None
            assert row.tokens == 252 and row.largest < TOLERANCE and row.gap_limit == pytest.approx(0.01)
            assert row.moved == pytest.approx(1, abs=1e-2)


async def _are(versions: Versions, verdicts: list[tuple[int, str]]) -> bool:
    return await versions.verdicts() == verdicts


@pytest.mark.parametrize("version", [1, 2])
async def test_an_engine_that_keeps_its_weights_and_says_otherwise_serves_nothing(
    versions: Versions,
    engine: Client,
    database: Database,
    redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
    version: int,
) -> None:
    run_id, (before, target) = versions.run.id, versions.targets[version - 1 : version + 1]
    async with fleet_of(database, redis_url, url_of(engine)) as fleet:
        fleet.set_target(before)
        await eventually(lambda: fleet.served_version(run_id) == before.version)
        with monkeypatch.context() as patch:
            given = lets_it_keep_its_weights(engine, patch)
            fleet.set_target(target)
            await eventually(lambda: fleet.trouble(run_id) is not None)
            reason = fleet.trouble(run_id) or ""
            assert f"given version {version}" in reason and "fixed tokens" in reason
            assert fleet.served_version(run_id) is None
            assert (await rows(database))[url_of(engine)][0] == "unreachable"
            # Calls in flight sample nothing that is trained.
            assert engine.engine.weight_version == "other"
            found = (await alarms(database, run_id))[f"engine_differs {url_of(engine)}"]
            assert (found.severity, found.evidence["version"]) == ("critical", version)
            assert "restart the engine" in found.remedy
            await eventually(lambda: len(given) >= 2 and "2 tries" in (fleet.trouble(run_id) or ""))
        await eventually(lambda: fleet.served_version(run_id) == version)
        assert await versions.verdicts() == [(version, "equal")]
        assert not any(name.startswith("engine_differs") for name in await alarms(database, run_id))


async def test_one_wrong_tensor_is_seen_on_the_engine_that_has_it(
    versions: Versions, engine: Client, database: Database, redis_url: str
) -> None:
    run_id = versions.run.id
    async with fleet_of(database, redis_url, url_of(engine), refusal_seconds=60) as fleet:
        fleet.set_target(versions.with_a_flipped_tensor(1))
        await eventually(lambda: "other weights or precision" in (fleet.trouble(run_id) or ""))
        assert await versions.verdicts() == [(1, "other")]
        row = (await versions.answers())[url_of(engine)]
        assert row.gap is not None and row.gap_limit is not None and row.gap > 3 * row.gap_limit
        # Another target is offered at once.
        fleet.set_target(versions.targets[1])
        await eventually(lambda: fleet.served_version(run_id) == 1)


async def test_version_0_serves_before_its_canary_and_is_compared_once_there_is_one(
    versions: Versions, engine: Client, database: Database, redis_url: str
) -> None:
    async with database.session() as session:
        row = await session.get_one(tables.VersionCanary, (versions.run.id, 0))
        canary = row.canary
        await session.delete(row)
    async with fleet_of(database, redis_url, url_of(engine)) as fleet:
        fleet.set_target(versions.targets[0])
        await eventually(lambda: fleet.served_version(versions.run.id) == 0)
        assert await versions.verdicts() == []
        async with database.session() as session:
            session.add(tables.VersionCanary(run_id=versions.run.id, version=0, canary=canary))
        await eventually(lambda: _are(versions, [(0, "equal")]))
        assert fleet.served_version(versions.run.id) == 0


async def test_a_restarted_engine_is_compared_again(
    versions: Versions, engine: Client, database: Database, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = versions.run.id
    async with fleet_of(database, redis_url, url_of(engine)) as fleet:
        fleet.set_target(versions.targets[1])
        await eventually(lambda: fleet.served_version(run_id) == 1)
        given = lets_it_keep_its_weights(engine, monkeypatch)
        # As it was started: with the model, and a label of its own.
        engine.engine._scheduler.replace_model(engine.engine._load(Path(versions.targets[0].path)), "default")
        await engine.engine.rename_weights("default")
        await eventually(lambda: bool(given) and fleet.trouble(run_id) is not None)
        assert "fixed tokens" in (fleet.trouble(run_id) or "")


async def test_an_engine_that_cannot_answer_serves_and_is_named_once(
    versions: Versions, database: Database, redis_url: str
) -> None:
    engine, run_id = ScriptedEngine(refuses=(404, {"error": "no such route"})), versions.run.id
    async with running(engine), fleet_of(database, redis_url, engine.url) as fleet:
        for target in versions.targets[1:]:
            fleet.set_target(target)
            await eventually(lambda wanted=target.version: fleet.served_version(run_id) == wanted)
        assert len(engine.requests) == 2
        assert await versions.verdicts() == [(2, "unanswered")]
        found = (await alarms(database, run_id))[f"not_compared {engine.url}"]
        assert "404" in found.reason and "return_logprob" in found.remedy


async def test_an_engine_whose_log_probabilities_are_null_gets_no_calls_and_is_named(
    versions: Versions, engine: Client, database: Database, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id, generate = versions.run.id, EngineClient.generate

    async def broken(client: EngineClient, body: dict[str, object]) -> Any:
        answers = await generate(client, body)
        for one in answers:
            for entry in one["meta_info"]["input_token_logprobs"]:
                entry[0] = None
        return answers

    monkeypatch.setattr(EngineClient, "generate", broken)
    async with fleet_of(database, redis_url, url_of(engine)) as fleet:
        fleet.set_target(versions.targets[1])
        await eventually(lambda: fleet.trouble(run_id) is not None)
        assert "are null or no finite numbers" in (fleet.trouble(run_id) or "")
        assert fleet.served_version(run_id) is None
        assert await versions.verdicts() == [(1, "other")]
        found = (await alarms(database, run_id))[f"engine_differs {url_of(engine)}"]
        assert url_of(engine) in found.reason and "gap" not in found.evidence


async def test_an_engine_that_answers_late_serves_meanwhile_and_is_asked_again(
    versions: Versions, engine: Client, database: Database, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id, prepare = versions.run.id, engine.engine.submit
    async with fleet_of(database, redis_url, url_of(engine), answer_seconds=0.5) as fleet:
        with monkeypatch.context() as patch:

            async def never(*_: Any) -> None:
                await asyncio.sleep(5)

            patch.setattr(engine.engine, "submit", never)
            fleet.set_target(versions.targets[1])
            await eventually(lambda: fleet.served_version(run_id) == 1)
            assert await versions.verdicts() == []
        assert prepare is not None
        await eventually(lambda: _are(versions, [(1, "equal")]))


async def test_adapters_are_compared_by_their_name_and_others_go_on(
    database: Database,
    redis_url: str,
    tiny_model: Path,
    tmp_path: Path,
    engine: Client,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    versions = await Versions(database, tiny_model, tmp_path).open(lora={"rank": 4})
    run_id, load = versions.run.id, engine.engine.load_adapter

    async def load_the_one_before(name: str, folder: Path) -> None:
        await load(name, Path(versions.targets[1].path) / ADAPTER_FOLDER)

    async with fleet_of(database, redis_url, url_of(engine), adapters=2) as fleet:
        for target in versions.targets[:2]:
            fleet.set_target(target)
            await eventually(lambda wanted=target.version: fleet.served_version(run_id) == wanted)
            await eventually(lambda wanted=target.version: _are(versions, [(wanted, "equal")]))
        with monkeypatch.context() as patch:
            patch.setattr(engine.engine, "load_adapter", load_the_one_before)
            fleet.set_target(versions.targets[2])
            await eventually(lambda: "fixed tokens" in (fleet.trouble(run_id) or ""))
            # The version before goes on, and the wrong adapter is gone.
            assert fleet.served_version(run_id) == 1
            assert await versions.verdicts() == [(2, "other")]
            assert set(engine.engine.adapters) == {f"{run_id}:1"}
        await eventually(lambda: fleet.served_version(run_id) == 2)
        assert await versions.verdicts() == [(2, "equal")]


@pytest.mark.parametrize("keeps", [False, True])
async def test_a_controller_killed_before_the_canary_leaves_the_question_to_the_next_one(
    versions: Versions,
    engine: Client,
    database: Database,
    redis_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    keeps: bool,
) -> None:
    injector = FaultInjector(tmp_path / "faults")
    injector.arm(POINTS[0])
    patch = monkeypatch
    given = lets_it_keep_its_weights(engine, patch) if keeps else []
    command = (database.dsn, redis_url, url_of(engine), tmp_path)
    process = await start(*command, **injector.environment)
    async with asyncio.timeout(120):
        assert await process.wait() == -signal.SIGKILL
    url, label = url_of(engine), versions.targets[2].label
    # It has the version, and no gateway sends it a call.
    assert (engine.engine.weight_version, await versions.verdicts()) == (label, [])
    assert (await rows(database))[url][0] == "updating"
    process = await start(*command)
    try:
        if keeps:
            await eventually(lambda: _are(versions, [(2, "other")]))
            assert len(given) == 1 and (await rows(database))[url][0] != "serving"
        else:
            await eventually(lambda: _is_serving(database, url))
            assert await versions.verdicts() == [(2, "equal")]
    finally:
        process.kill()
        await process.wait()


async def _is_serving(database: Database, url: str) -> bool:
    return (await rows(database))[url][0] == "serving"
