"""How much the engine gains from batching and from shared prefixes, measured on one scheduler without HTTP."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np

from services.engine.config import read_config
from services.engine.convert import convert
from services.engine.model import Model
from services.engine.request import Prompt, SamplingParams
from services.engine.sampling import Draw, Sampler
from services.engine.scheduler import Limits, Scheduler
from services.engine.sequence import Sequence
from services.engine.weights import load_weights

PREFIX_TOKENS = 361
NEW_TOKENS = 16


def rows(folder: Path | None = None) -> list[dict[str, Any]]:
    """Rows of name, value, unit, baseline_name, baseline, ratio; on SmolLM2-135M-Instruct unless told otherwise."""
    folder = folder or convert()
    config = read_config(folder)
    model = Model(config, load_weights(folder, config))
    one, many = _decode_rate(model, 1), _decode_rate(model, 32)
    computed, asked = _shared_prefill(model, streams=64, shared=2048, own=8)
    return [
        _row("engine_decode_32_streams", many, "tokens/s", "one stream", one),
        _row("engine_prefill_shared_2k_prefix_64_requests", computed, "tokens computed", "tokens asked for", asked),
    ]


def _row(name: str, value: float, unit: str, baseline_name: str, baseline: float) -> dict[str, Any]:
    return {
        "name": name,
        "value": value,
        "unit": unit,
        "baseline_name": baseline_name,
        "baseline": baseline,
        "ratio": value / baseline,
    }


def _decode_rate(model: Model, streams: int) -> float:
    """Tokens per second of decoding; prompts are computed before the clock starts."""
    scheduler = Scheduler(model, Limits(), Sampler(seed=0), version="bench")
    rng = np.random.default_rng(0)
    shared = _random_ids(rng, model, PREFIX_TOKENS)
    _run(scheduler, [_sequence(model, shared, 1)])
    own = (_random_ids(rng, model, 30 + 7 * index % 120) for index in range(streams))
    sequences = [_sequence(model, np.concatenate([shared, ids]), NEW_TOKENS) for ids in own]
    scheduler.submit(sequences)
    while scheduler.waiting or scheduler.prefilling:
        scheduler.step()
    done, started = sum(len(s.output_ids) for s in sequences), time.perf_counter()
    _run(scheduler, [])
    return (streams * NEW_TOKENS - done) / (time.perf_counter() - started)


def _shared_prefill(model: Model, streams: int, shared: int, own: int) -> tuple[int, int]:
    """Prompt tokens computed for requests that arrive together and share a prefix, and tokens they asked for."""
    scheduler = Scheduler(model, Limits(), Sampler(seed=0), version="bench")
    rng = np.random.default_rng(1)
    prefix = _random_ids(rng, model, shared)
    sequences = [_sequence(model, np.concatenate([prefix, _random_ids(rng, model, own)]), 1) for _ in range(streams)]
    _run(scheduler, sequences)
    # The last token of each prompt is decoded; it was computed all the same.
    return scheduler.totals.prefill_tokens + streams, streams * (shared + own)


def _random_ids(rng: np.random.Generator, model: Model, count: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return rng.integers(10, model.config.vocab_size, count, dtype=np.int32)


def _sequence(model: Model, ids: np.ndarray[Any, np.dtype[np.int32]], new_tokens: int) -> Sequence:
    sampling = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True, temperature=0.8)
    prompt = Prompt(rid="bench", sampling=sampling)
    return Sequence(prompt, ids, Draw(sampling, model.config.end_ids), None, "bench", asyncio.Event())


def _run(scheduler: Scheduler, sequences: list[Sequence]) -> None:
    scheduler.submit(sequences)
    while scheduler.has_work:
        scheduler.step()


if __name__ == "__main__":
    for row in rows():
        print(row)
