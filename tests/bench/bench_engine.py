"""Batching and shared prefixes of the CPU engine, measured on one scheduler without HTTP."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np

from leyden.services.engine.config import read_config
from leyden.services.engine.convert import convert
from leyden.services.engine.model import Model
from leyden.services.engine.request import Prompt, SamplingParams
from leyden.services.engine.sampling import Draw, Sampler
from leyden.services.engine.scheduler import Limits, Scheduler
from leyden.services.engine.sequence import Sequence
from leyden.services.engine.weights import load_weights
from tests.bench.rows import Row

PREFIX_TOKENS = 361
NEW_TOKENS = 16


STREAMS, REQUESTS = 32, 64
SHARED_TOKENS, OWN_TOKENS = 2048, 8


def rows(repeats: int) -> list[Row]:
    """Batched decoding and shared prefixes of the CPU engine, on SmolLM2-135M-Instruct."""
    folder = convert()
    config = read_config(folder)
    model = Model(config, load_weights(folder, config))
    rates = [_decode_rate(model, STREAMS) for _ in range(repeats)]
    computed = _shared_prefill(model, REQUESTS, SHARED_TOKENS)
    # The prefix once, and each request's own end.
    least = SHARED_TOKENS + REQUESTS * OWN_TOKENS
    return [
        Row("engine", f"{STREAMS} streams decode together", "tokens/s", rates, at_least=330),
        Row("engine", f"{REQUESTS} requests share 2k tokens: prefill", "tokens computed", [computed], at_most=least),
    ]


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
    seconds = time.perf_counter() - started
    assert all(len(sequence.output_ids) == NEW_TOKENS for sequence in sequences)
    return (streams * NEW_TOKENS - done) / seconds


def _shared_prefill(model: Model, streams: int, shared: int) -> int:
    """Prompt tokens computed for requests that arrive together and share a prefix."""
    scheduler = Scheduler(model, Limits(), Sampler(seed=0), version="bench")
    rng = np.random.default_rng(1)
    prefix = _random_ids(rng, model, shared)
    sequences = [
        _sequence(model, np.concatenate([prefix, _random_ids(rng, model, OWN_TOKENS)]), 1) for _ in range(streams)
    ]
    _run(scheduler, sequences)
    # The scheduler counts the last token of each prompt as decoded.
    return scheduler.totals.prefill_tokens + streams


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
