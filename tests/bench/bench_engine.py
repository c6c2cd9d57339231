"""How much the engine gains from batching and from shared prefixes, measured on one scheduler without HTTP."""

from __future__ import annotations

import asyncio
import statistics
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
from tests.bench.rows import Goal, Growth, Row

PREFIX_TOKENS = 361
NEW_TOKENS = 16


STREAMS = (1, 4, 16, 32)
OWN_TOKENS = 8


def rows(repeats: int) -> list[Row]:
    """What batching gives, and how much of a shared prefix is computed; on SmolLM2-135M-Instruct."""
    folder = convert()
    config = read_config(folder)
    model = Model(config, load_weights(folder, config))
    rates = {streams: [] for streams in STREAMS}
    for _ in range(repeats):
        for streams, found in rates.items():
            found.append(_decode_rate(model, streams))
    medians = {streams: statistics.median(found) for streams, found in rates.items()}
    computed = {streams: _shared_prefill(model, streams, shared=2048) for streams in (4, 16, 64)}
    least = 2048 + 64 * OWN_TOKENS
    return [
        Row(
            part="engine",
            name="32 streams decode together",
            unit="tokens/s",
            repeats=rates[32],
            baseline_name="one stream",
            baseline=rates[1],
            goal=Goal(at_least=5, of="ratio"),
            growth=Growth("streams", "ms a token", (1, 4, 16), [1000 / medians[n] for n in (1, 4, 16)]),
        ),
        Row(
            part="engine",
            name="64 requests share 2k tokens: prefill",
            unit="tokens computed",
            repeats=[computed[64]],
            baseline_name="no cache",
            baseline=[64 * (2048 + OWN_TOKENS)],
            goal=Goal(at_most=least),
            growth=Growth("requests", "tokens computed a request", (4, 16, 64), [computed[n] / n for n in computed]),
            note=f"A count, the same in every repeat; {least:,} are the prefix once and each request's own end.",
        ),
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
    # The last token of each prompt is decoded; it was computed all the same.
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
