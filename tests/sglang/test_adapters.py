"""Two runs share a real SGLang, each with a LoRA adapter of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psycopg
import pytest
import torch
from sqlalchemy import select

from leyden.libs.cli.local.platform import Options, Platform
from leyden.libs.cli.local.services import SERVICES
from leyden.libs.client import Client
from leyden.libs.contracts.config import RunConfig
from leyden.libs.contracts.weights import ADAPTER_FOLDER, weights_sha256
from leyden.libs.queue.notifications import Notifications
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.libs.store.records.chains import FullCall, full_calls
from leyden.services.controller.engines.discovery import StaticEngines
from leyden.services.controller.engines.fleet import Fleet
from leyden.services.controller.engines.targets import TargetVersion
from leyden.services.controller.settings import Settings
from leyden.services.controller.worker import make_fleet
from leyden.services.trainer.model.load import read_model
from leyden.services.trainer.state.assembly import assemble_learner, make_accelerator
from leyden.services.trainer.state.folders import version_folder
from leyden.services.trainer.state.versions import export_version
from leyden.services.trainer.step.step import optimizer_step
from tests.campaigns.soak import QUICK, bandit_run, running_platform
from tests.fakes import real_sglang
from tests.fakes.engine_client import ADMIN_KEY, KEY
from tests.invariants import lost_calls, violations
from tests.support.shared import free_port
from tests.support.tiny_model import make_tiny_model
from tests.support.waiting import eventually, until
from tests.unit.trainer.cases import agent_samples

RUNS = 2
STEPS = 3
TOKENS = 24
CALL_TOKENS = 1500
"""Length of a call that lasts longer than the controller waits for an engine's answer."""
LARGEST_GAP = 1e-3
"""Bound on the largest gap of log-probabilities between engine and trainer, natural logarithm."""
ADAPTERS = (
    *("--enable-lora", "--lora-backend", "torch_native", "--max-lora-rank", "16", "--lora-target-modules", "all"),
    *("--max-loaded-loras", str(3 * RUNS), "--max-loras-per-batch", str(2 * RUNS + 1)),
    "--incremental-streaming-output",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine_url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("sglang") / "server.log"
    with real_sglang.serving_sglang(model, free_port(), log, *ADAPTERS) as url:
        yield url


@pytest.fixture
def platform(engine_url: str, model: Path, tmp_path: Path) -> Iterator[Platform]:
    pool = {"model_path": str(model), "engine_urls": [engine_url], "adapters": RUNS, "max_adapter_rank": 16}
    keys = {"CONTROLLER_ENGINE_API_KEY": KEY, "CONTROLLER_ENGINE_ADMIN_KEY": ADMIN_KEY}
    options = Options(
        environment={
            "controller": {"CONTROLLER_POOLS": json.dumps({"default": pool}), **keys},
            "gateway": {"GATEWAY_ENGINE_API_KEY": KEY},
            "trainer": {"OMP_NUM_THREADS": "1"},
        },
        model_path=model,
        free_ports=True,
        services=tuple(name for name in SERVICES if name != "engine"),
        engine_urls=(engine_url,),
    )
    with running_platform(tmp_path / "home", options) as running:
        yield running


@pytest.fixture
def client(platform: Platform) -> Iterator[Client]:
    with Client(platform.facts.url("api"), platform.token, patience_seconds=60) as client:
        client.upload_dataset("bandit", [{"number": number} for number in range(16)])
        yield client


def bandit(log: Path) -> dict[str, Any]:
    training = {"steps": STEPS, "keep_checkpoints": STEPS + 1, "lora": {"rank": 4}}
    document = bandit_run(log, log.stem, STEPS, training=training, **QUICK)
    document["agent"]["environment"]["BANDIT_TOKENS"] = str(TOKENS)
    return document


def loaded_adapters(engine_url: str) -> set[str]:
    headers = {"authorization": f"Bearer {KEY}"}
    models = httpx.get(f"{engine_url}/v1/models", headers=headers, timeout=30).json()["data"]
    return {one["id"] for one in models if one.get("parent")}


@pytest.mark.timeout(600)
def test_two_runs_share_sglang_with_an_adapter_each_on_sglang(
    platform: Platform, client: Client, engine_url: str, tmp_path: Path
) -> None:
    dsn, logs = platform.facts.database_url, [tmp_path / f"{name}.log" for name in "ab"]
    runs = [client.create_run(bandit(log)).id for log in logs]
    seen = set[frozenset[str]]()

    def have_completed() -> bool:
        seen.add(frozenset(loaded_adapters(engine_url)))
        return all(client.run(run).phase == "completed" for run in runs)

    until(have_completed, "the end of both runs", 300)
    for run, log in zip(runs, logs, strict=True):
        assert [version.version for version in client.policies(run)] == list(range(STEPS + 1))
        assert violations(dsn, run) == {}
        assert lost_calls(dsn, run, log) == []
        assert len(each_token_has_the_probability_of_its_version(dsn, run)) > 1, "no call had an adapter"
    assert any({name.partition(":")[0] for name in names} == set(runs) for names in seen)
    # A version loads beside the two before, of which the older one then goes.
    assert max(sum(name.startswith(run) for name in names) for names in seen for run in runs) <= 3
    until(lambda: not loaded_adapters(engine_url), "the adapters of runs that ended to go")


def each_token_has_the_probability_of_its_version(dsn: str, run_id: str) -> set[int]:
    """Checks that other versions give a run's tokens other probabilities; returns the versions that sampled them."""
    with psycopg.connect(dsn) as connection:
        statement = "SELECT version, path, content_sha256 FROM policy_versions WHERE run_id = %s"
        made = {version: rest for version, *rest in connection.execute(statement, (run_id,))}
    models = {version: read_model(Path(path)).eval() for version, (path, _) in made.items()}
    gaps: dict[tuple[int, int], float] = {}
    for row, full in asyncio.run(_calls(dsn, run_id)):
        # No call mixes adapters.
        (own,) = set(np.frombuffer(row.policy_versions, "<i4").tolist())
        prompt, sampled = (np.frombuffer(ids, "<i4").astype(np.int64) for ids in (full.prompt_ids, row.sampled_ids))
        tokens = torch.from_numpy(np.concatenate([prompt, sampled]))[None]
        for version, model in models.items():
            with torch.no_grad():
                logprobs = model(tokens).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            computed = logprobs[range(len(sampled)), sampled].numpy()
            gap = float(np.abs(computed - np.frombuffer(row.generator_logprobs, "<f4")).max())
            gaps[own, version] = max(gap, gaps.get((own, version), 0.0))
    for (own, version), gap in gaps.items():
        # A step of groups that all have nothing to learn makes a version of the same weights.
        is_alike = made[own][1] == made[version][1]
        assert gap < LARGEST_GAP if is_alike else gap > 10 * LARGEST_GAP, gaps
    return {own for own, _ in gaps}


async def _calls(dsn: str, run_id: str) -> list[tuple[tables.ModelCall, FullCall]]:
    table, database = tables.ModelCall, Database(dsn)
    async with database.read() as session:
        completed = (table.run_id == run_id) & (table.status == "completed")
        rows = (await session.scalars(select(table).where(completed))).all()
        full = await full_calls(session, rows)
    await database.close()
    return [(row, one) for row, one in zip(rows, full, strict=True) if isinstance(one, FullCall)]


@pytest.mark.timeout(600)
async def test_an_adapter_that_fails_to_load_leaves_the_version_before_on_sglang(
    database: Database, redis_url: str, engine_url: str, model: Path, tmp_path: Path
) -> None:
    weights = tmp_path / "weights"
    targets = {name: version_of(model, weights, *name) for name in [("run-b", 1), *(("run-a", n) for n in range(1, 5))]}
    config = Path(targets["run-a", 1].path) / ADAPTER_FOLDER / "adapter_config.json"
    spared = config.rename(tmp_path / "config.json")
    async with fleet_of(database, redis_url, engine_url) as fleet:
        fleet.set_target(TargetVersion("run-a", 0, str(model), weights_sha256(model)))
        fleet.set_target(targets["run-b", 1])
        fleet.retain_targets({"run-a", "run-b"})
        await eventually(lambda: (fleet.served_version("run-a"), fleet.served_version("run-b")) == (0, 1))
    # A controller that starts anew.
    async with fleet_of(database, redis_url, engine_url) as fleet:
        for target in (targets["run-a", 1], targets["run-b", 1]):
            fleet.set_target(target)
        fleet.retain_targets({"run-a", "run-b"})
        await eventually(lambda: "adapter_config.json" in (fleet.trouble("run-a") or ""))
        assert (fleet.served_version("run-a"), fleet.served_version("run-b")) == (0, 1)
        assert fleet.trouble("run-b") is None
        spared.rename(config)
        await eventually(lambda: fleet.served_version("run-a") == 1 and fleet.trouble("run-a") is None)
        for version in (2, 3):
            fleet.set_target(targets["run-a", version])
            await eventually(lambda wanted=version: fleet.served_version("run-a") == wanted)
        await eventually(lambda: loaded_adapters(engine_url) == {"run-a:2", "run-a:3", "run-b:1"})
        # SGLang loads an adapter again for a call that comes late.
        await generate(engine_url, "run-a:1", tokens=4)
        await eventually(lambda: loaded_adapters(engine_url) == {"run-a:2", "run-a:3", "run-b:1"})
        # A call in flight ends on its adapter, though its run has left; SGLang frees that, then loads another one.
        call = asyncio.create_task(generate(engine_url, "run-b:1", tokens=CALL_TOKENS))
        await asyncio.sleep(0.5)
        fleet.retain_targets({"run-a"})
        await eventually(lambda: loaded_adapters(engine_url) == {"run-a:2", "run-a:3"})
        fleet.set_target(targets["run-a", 4])
        assert not call.done()
        await eventually(lambda: fleet.served_version("run-a") == 4)
        assert len(await call) == CALL_TOKENS
        await eventually(lambda: loaded_adapters(engine_url) == {"run-a:3", "run-a:4"})
        fleet.retain_targets(())
        await eventually(lambda: not loaded_adapters(engine_url))


def version_of(base: Path, weights: Path, run_id: str, version: int) -> TargetVersion:
    """A version whose adapter changes the model; `version` seeds it."""
    document = {"name": "n", "dataset": "d", "agent": {"command": ["x"]}, "training": {"lora": {"rank": 4}}}
    config = RunConfig.model_validate({**document, "optimizer": {"learning_rate": 1e-2}})
    learner = assemble_learner(base, config, make_accelerator("cpu", "float32"))
    optimizer_step(learner, agent_samples(version), config)
    export = export_version(learner, base, version_folder(weights, run_id, version))
    return TargetVersion(run_id, version, str(export.path), export.content_sha256)


@asynccontextmanager
async def fleet_of(database: Database, redis_url: str, url: str) -> AsyncIterator[Fleet]:
    notifications = Notifications(redis_url)
    settings = Settings(
        engine_api_key=KEY,
        engine_admin_key=ADMIN_KEY,
        engine_poll_seconds=0.2,
        engine_answer_seconds=1,
        engine_refusal_seconds=0.3,
    )
    fleet = make_fleet(settings, StaticEngines(frozenset({url})), database, notifications, adapters=RUNS)
    task = asyncio.create_task(fleet.run())
    try:
        yield fleet
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await notifications.close()


async def generate(engine_url: str, adapter: str, tokens: int) -> list[int]:
    body = {
        "input_ids": list(range(3, 20)),
        "lora_path": adapter,
        "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True},
    }
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {KEY}"}, timeout=120) as http:
        answer = await http.post(f"{engine_url}/generate", json=body)
    ids: list[int] = answer.raise_for_status().json()["output_ids"]
    return ids
