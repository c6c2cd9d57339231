"""New weights on their way: from the end of an optimiser step to the first token that they sample, and who waits.

A real controller with its trainer and a real engine serve and train SmolLM2-135M-Instruct while agents stream answers
all the time. Each repeat gives the trainer one credited group, and stands beside the plain way by hand: export,
optimiser state and a load of the paused engine, one after another. Tokens of the new version are scored again by a
plain forward pass over the exported weights.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch
from sqlalchemy import select

from leyden.libs.cli.platform import Options, Platform
from leyden.libs.queue.notifications import Notifications, Topic
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.services.engine.convert import convert
from leyden.services.trainer.checkpoint import Progress, export_weights, optimizer_state, save_checkpoint
from leyden.services.trainer.model import load_model
from tests import builders
from tests.bench.rows import Goal, Growth, Row

STREAMS = (1, 4, 16)
MEASURED = 4
SHARED_TOKENS, OWN_TOKENS, NEW_TOKENS = 200, 40, 48
STEP_SECONDS = 120.0
SETTLE_SECONDS = 3.0
# Ours float32 against float32 of another implementation.
TOLERANCE = 2e-3


def rows(repeats: int) -> list[Row]:
    """The delay and the hold, with agents streaming all the time."""
    with tempfile.TemporaryDirectory(prefix="bench-handover-", ignore_cleanup_errors=True) as folder:
        options = Options(
            model_path=convert(),
            free_ports=True,
            services=("engine", "controller"),
        )
        platform = Platform(Path(folder) / "home", options)
        platform.start()
        try:
            platform.ready(300)
            return asyncio.run(_measure(platform, repeats))
        finally:
            platform.stop()


@dataclass(frozen=True)
class Change:
    """One change of weights: seconds from the step's end to the first new token, and the longest extra wait."""

    delay: float
    hold: float


async def _measure(platform: Platform, repeats: int) -> list[Row]:
    database = Database(platform.facts.database_url)
    notifications = Notifications(platform.facts.redis_url)
    try:
        async with _Agents.at(platform) as agents:
            # One more than are made: nobody waits for the last version of a run.
            steps = 1 + repeats + len(STREAMS)
            stage = await _Stage.opened(platform, database, notifications, agents, steps)
            await stage.change_by_step(MEASURED)
            plain = _ByHand(stage)
            ours, theirs = [], []
            for _ in range(repeats):
                ours.append(await stage.change_by_step(MEASURED))
                theirs.append(await plain.change(MEASURED))
            by_streams = {MEASURED: statistics.median(one.hold for one in ours)}
            for streams in set(STREAMS) - {MEASURED}:
                by_streams[streams] = (await stage.change_by_step(streams)).hold
            await stage.check_rows()
    finally:
        await notifications.close()
        await database.close()
    checked = f"Tokens of each new version score within {TOLERANCE} nats under its exported weights."
    return [
        Row(
            part="handover",
            name=f"135M: step's end to a new token, {MEASURED} streams",
            unit="s",
            repeats=[one.delay for one in ours],
            baseline_name="one after another",
            baseline=[one.delay for one in theirs],
            goal=Goal(at_most=2.0),
            note=checked,
        ),
        Row(
            part="handover",
            name=f"135M: longest extra wait of a call, {MEASURED} streams",
            unit="s",
            repeats=[one.hold for one in ours],
            baseline_name="load while paused",
            baseline=[one.hold for one in theirs],
            goal=Goal(at_most=1.0),
            growth=Growth("streams", "s", STREAMS, [by_streams[n] for n in STREAMS]),
            note=f"Calls of {SHARED_TOKENS + OWN_TOKENS} + {NEW_TOKENS} tokens, one after another in each stream.",
        ),
    ]


@dataclass
class Call:
    """What a streamed call got: when anything came, which weights sampled each token, and how likely it was."""

    prompt: list[int]
    times: list[float]
    versions: list[str] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass
class _Agents:
    """Streams that ask for one answer after another until they are told to end."""

    http: aiohttp.ClientSession
    url: str
    calls: list[Call] = field(default_factory=list)

    @classmethod
    @asynccontextmanager
    async def at(cls, platform: Platform) -> AsyncIterator[_Agents]:
        key = platform.facts.engine_key_file.read_text().strip()
        timeout = aiohttp.ClientTimeout(total=300)
        async with aiohttp.ClientSession(headers={"authorization": f"Bearer {key}"}, timeout=timeout) as http:
            yield cls(http, platform.facts.url("engine"))

    @asynccontextmanager
    async def streaming(self, streams: int) -> AsyncIterator[None]:
        self.calls = []
        rng = np.random.default_rng(streams)
        shared = rng.integers(10, 40000, SHARED_TOKENS).tolist()
        ended = asyncio.Event()
        tasks = [asyncio.create_task(self._stream(shared, seed, ended)) for seed in range(streams)]
        try:
            yield
        finally:
            ended.set()
            await asyncio.gather(*tasks)

    async def _stream(self, shared: list[int], seed: int, ended: asyncio.Event) -> None:
        rng = np.random.default_rng(seed)
        # Not all in step.
        await asyncio.sleep(rng.random())
        while not ended.is_set():
            await self.ask(shared + rng.integers(10, 40000, OWN_TOKENS).tolist())

    async def ask(self, prompt: list[int]) -> None:
        call = Call(prompt, [time.time()])
        self.calls.append(call)
        sampling = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True, "temperature": 1.0}
        body = {"input_ids": prompt, "sampling_params": sampling, "stream": True, "return_logprob": True}
        async with self.http.post(f"{self.url}/generate", json=body) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    _take(call, json.loads(line[6:]))
        assert len(call.sampled) == NEW_TOKENS, "a call was cut"

    def first_token_of(self, version: str) -> float | None:
        times = [
            one for call in self.calls for one, by in zip(call.times[1:], call.versions, strict=True) if by == version
        ]
        return min(times, default=None)

    def longest_extra_wait(self, begin: float, end: float) -> float:
        """The longest wait for a token that fell into this time, beyond what is usual at other times."""
        inside, outside = [], []
        for call in self.calls:
            for before, after in zip(call.times, call.times[1:], strict=False):
                (inside if before < end and after > begin else outside).append(after - before)
        return max(inside) - statistics.median(outside)


def _take(call: Call, answer: dict[str, Any]) -> None:
    """Every token of a stream comes as all that came so far."""
    meta, now = answer["meta_info"], time.time()
    new = len(answer["output_ids"]) - len(call.sampled)
    call.times += [now] * new
    call.sampled = answer["output_ids"]
    call.logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
    call.versions = [span["version"] for span in meta["weight_versions"] for _ in range(span["start"], span["end"])]


@dataclass
class _Stage:
    """A run whose samples are written here, and whose steps and versions are made by a real trainer and controller."""

    platform: Platform
    database: Database
    notifications: Notifications
    agents: _Agents
    run: tables.Run
    version: int = 0

    @classmethod
    async def opened(
        cls, platform: Platform, database: Database, notifications: Notifications, agents: _Agents, steps: int
    ) -> _Stage:
        document = builders.run_document(
            sampling={"group_size": 2, "groups_per_step": 1, "max_policy_lag": 0},
            optimizer={"learning_rate": 1e-4},
            training={"steps": steps, "max_logprob_gap": 100.0},
        )
        stage = cls(platform, database, notifications, agents, await builders.add_run(database, config=document))
        await notifications.notify(Topic.RUNS)
        await stage._until(lambda: stage._served(0), "the base model is not served")
        return stage

    async def change_by_step(self, streams: int) -> Change:
        """Gives the trainer one group and waits until the weights of its step sample."""
        version = f"{self.run.id}:{self.version + 1}"
        async with self.agents.streaming(streams):
            await asyncio.sleep(SETTLE_SECONDS)
            await self._add_group(self.version)
            self.version += 1

            async def sampled() -> bool:
                return self.agents.first_token_of(version) is not None

            await self._until(sampled, f"{version} never sampled")
            await asyncio.sleep(SETTLE_SECONDS)
        first = self.agents.first_token_of(version)
        assert first is not None
        ended = await self._step_ended(self.version)
        await self._check_tokens(version)
        return Change(first - ended, self.agents.longest_extra_wait(ended, first + 0.5))

    async def _add_group(self, version: int) -> None:
        rng = np.random.default_rng(version)
        number = 1000 + version
        group, rollouts = await builders.add_group(self.database, self.run, number, admitted_version=version)
        for sibling, rollout in enumerate(rollouts):
            prompt, sampled = (rng.integers(10, 40000, size).tolist() for size in (64, 16))
            columns = {"advantage": (-1.0) ** sibling, "policy_version": version}
            await builders.add_sample(self.database, rollout, prompt, sampled, **columns)
        await builders.add_credited_group(self.database, group, min_policy_version=version)
        await self.notifications.notify(Topic.SAMPLES)

    async def _step_ended(self, number: int) -> float:
        async with self.database.read() as session:
            step = await session.get_one(tables.Step, (self.run.id, number))
        phases = ("load_seconds", "gradients_seconds", "optimizer_seconds")
        return step.started_at.timestamp() + sum(step.metrics[phase] for phase in phases)

    async def path(self, version: int) -> Path:
        async with self.database.read() as session:
            return Path((await session.get_one(tables.PolicyVersion, (self.run.id, version))).path)

    async def _check_tokens(self, version: str) -> None:
        """Scores what one call got by these weights, with a plain forward pass over the exported ones."""
        call = max(self.agents.calls, key=lambda one: one.versions.count(version))
        gaps = {}
        for number in (self.version, self.version - 1):
            model = await asyncio.to_thread(load_model, await self.path(number))
            gaps[number] = await asyncio.to_thread(_largest_gap, model, call, version)
        assert gaps[self.version] < TOLERANCE < gaps[self.version - 1], gaps

    async def _served(self, version: int) -> bool:
        async with self.database.read() as session:
            engines = (await session.scalars(select(tables.Engine))).all()
        return any((one.run_id, one.policy_version) == (self.run.id, version) for one in engines)

    async def check_rows(self) -> None:
        """Every step and version once, and each sample in its step."""
        async with self.database.read() as session:
            found = await session.execute(select(tables.StepSample.step).where(tables.StepSample.run_id == self.run.id))
        assert sorted(found.scalars()) == sorted([*range(1, self.version + 1)] * 2)

    async def _until(self, condition: Callable[[], Awaitable[bool]], trouble: str) -> None:
        deadline = time.monotonic() + STEP_SECONDS
        while not await condition():
            assert time.monotonic() < deadline, trouble
            await asyncio.sleep(0.02)


class _ByHand:
    """The plain way: export and optimiser state, then pause, load and continue, one after another."""

    def __init__(self, stage: _Stage) -> None:
        self._stage = stage
        self._model = load_model(convert())
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-5, fused=True)
        for parameter in self._model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self._optimizer.step()
        key = stage.platform.facts.engine_admin_key_file.read_text().strip()
        self._headers = {"authorization": f"Bearer {key}"}

    async def change(self, streams: int) -> Change:
        agents = self._stage.agents
        async with agents.streaming(streams):
            await asyncio.sleep(SETTLE_SECONDS)
            began = time.time()
            path = await asyncio.to_thread(self._write)
            paused = time.time()
            await self._reload(path)
            loaded = time.time()
            await asyncio.sleep(SETTLE_SECONDS)
        first = min(one for call in agents.calls for one in call.times[1:] if one > loaded)
        return Change(first - began, agents.longest_extra_wait(paused, first))

    def _write(self) -> Path:
        folder = self._stage.platform.home / "by-hand"
        export = export_weights(self._model, convert(), folder / "version")
        save_checkpoint(
            optimizer_state(self._optimizer), Progress("plain", 1, export.content_sha256), folder / "checkpoint"
        )
        return export.path

    async def _reload(self, path: Path) -> None:
        """The label stays, so that the controller finds nothing to correct."""
        label = f"{self._stage.run.id}:{self._stage.version}"
        await self._post("/pause_generation", mode="retract")
        await self._post("/update_weights_from_disk", model_path=str(path), weight_version=label, flush_cache=True)
        await self._post("/continue_generation")

    async def _post(self, path: str, **body: Any) -> None:
        agents = self._stage.agents
        async with agents.http.post(agents.url + path, json=body, headers=self._headers) as response:
            assert response.status == 200, await response.text()


def _largest_gap(model: torch.nn.Module, call: Call, version: str) -> float:
    """Between the engine's log-probability of each token that this version sampled and the model's."""
    with torch.no_grad():
        logits = model(torch.tensor([call.prompt + call.sampled])).logits[0, len(call.prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits, -1)[torch.arange(NEW_TOKENS), torch.tensor(call.sampled)]
    sampled = torch.tensor([one == version for one in call.versions])
    return float((logprobs - torch.tensor(call.logprobs)).abs()[sampled].max())
