"""The engine on a tiny model inside the test's process: as a scheduler alone, or served on a loopback port."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from leyden.libs.service import serving
from leyden.services.engine.app import create_engine_app
from leyden.services.engine.config import read_config
from leyden.services.engine.engine import Engine
from leyden.services.engine.model import Model
from leyden.services.engine.request import Prompt, SamplingParams
from leyden.services.engine.sampling import Draw, Sampler
from leyden.services.engine.scheduler import Limits, Scheduler
from leyden.services.engine.sequence import Sequence
from leyden.services.engine.settings import Settings
from leyden.services.engine.weights import load_weights
from tests.fakes.engine_client import EngineClient


def tiny_scheduler(folder: Path, **limits: int) -> Scheduler:
    """A scheduler with room for 8192 tokens, unless `limits` says otherwise."""
    torch.set_num_threads(1)
    config = read_config(folder)
    model = Model(config, load_weights(folder, config))
    return Scheduler(model, Limits(**{"max_total_tokens": 8192, **limits}), Sampler(seed=0), version="v0")


def new_sequence(scheduler: Scheduler, ids: Many[int], **options: Any) -> Sequence:
    """A sequence of 8 tokens that no end cuts short; `options` are sampling parameters, or fields of `Prompt`."""
    fields = {name: options.pop(name) for name in list(options) if name in Prompt.model_fields}
    sampling = SamplingParams(**{"max_new_tokens": 8, "ignore_eos": True, **options})
    prompt = Prompt(**{"rid": "r", "input_ids": list(ids), "sampling": sampling, **fields})
    draw = Draw(sampling, scheduler.model.config.end_ids, prompt.top_logprobs_num, prompt.token_ids_logprob)
    if sampling.sampling_seed is not None:
        draw.seed, draw.prompt_tokens = sampling.sampling_seed, len(ids)
    return Sequence(prompt, np.array(ids, np.int32), draw, None, prompt.rid, asyncio.Event())


def run(scheduler: Scheduler, *sequences: Sequence, steps: int = 10_000) -> None:
    """Submits sequences and steps until nothing is left, or `steps` times."""
    scheduler.submit(sequences)
    for _ in range(steps):
        if not scheduler.has_work:
            return
        scheduler.step()


class Client(EngineClient):
    """The CPU engine behind HTTP, and the engine itself."""

    def __init__(self, http: httpx.AsyncClient, engine: Engine) -> None:
        super().__init__(http, engine.model_path)
        self.engine = engine


@contextlib.asynccontextmanager
async def served_engine(folder: Path, **settings: Any) -> AsyncIterator[Client]:
    """An engine on a free loopback port, with a client for it."""
    chosen = Settings(**{"model_path": folder, "threads": 1, "max_total_tokens": 8192, "seed": 0, **settings})
    app = create_engine_app(chosen)
    async with (
        serving(app, shutdown_seconds=5) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http,
    ):
        if chosen.api_key is not None:
            http.headers["authorization"] = f"Bearer {chosen.api_key.get_secret_value()}"
        yield Client(http, app.state.engine)
