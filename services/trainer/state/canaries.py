"""Computes canaries: the log-probabilities of a few fixed texts with the weights that a step has just made.

The model is the one that the trainer holds, and the cost is one pass over 256 tokens at most, over 48 on a CPU. Texts
and tokenizer do not change during a run, so that the canaries of its versions can be compared with each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from leyden.libs.contracts.canary import SEQUENCE_TOKENS, SEQUENCES, Canary
from leyden.libs.contracts.config import Computation, Device, RunConfig
from leyden.libs.telemetry import logger
from leyden.services.trainer.ranks.messages import Read
from leyden.services.trainer.rows.batch import Sample, trained_tokens
from leyden.services.trainer.step.gradients import batch_outputs, plan_batch
from leyden.services.trainer.step.learner import Learner

log = logger()

TEXTS = (
    "The train left the station at noon. Two children waved from the platform until it was a grey dot between the"
    " hills, and then they walked home along the river. It had rained in the morning, so the path was soft, and they"
    " counted the snails on the wall as they went. By the time they reached the gate they had found thirty-one.",
    "def running_mean(values):\n    total = 0.0\n    for count, value in enumerate(values, start=1):\n        total +="
    " value\n        yield total / count\n\n\nprint(list(running_mean([2, 4, 9])))  # [2.0, 3.0, 5.0]\n",
    'User: What is the weather in Oslo tomorrow?\nAssistant: {"name": "forecast", "arguments": {"city": "Oslo",'
    ' "day": "tomorrow", "units": "celsius"}}\nTool: {"low": -3, "high": 2, "sky": "snow"}\nAssistant: Snow, between'
    " minus three and two degrees.",
    "Question: A box holds 12 pens and costs 18 euros. How much do 30 pens cost? Answer: One pen costs 18 / 12 = 1.5"
    " euros, and 30 pens cost 30 * 1.5 = 45 euros. Question: How many boxes must be bought for 30 pens? Answer: 30 / 12"
    " = 2.5, so 3 boxes.",
)
"""Prose, code, a call of a tool, and sums: tokens of the kinds that agents write."""


def canary_tokens(base: Path, vocabulary: int, size: int = SEQUENCE_TOKENS) -> tuple[tuple[int, ...], ...]:
    """The token sequences of a run's canaries; none where the model's folder has no `tokenizer.json`.

    Args: base: the model's folder; vocabulary: the number of tokens that the model knows; size: the most of each
    """
    file = base / "tokenizer.json"
    if not file.is_file():
        log.warning("versions have no canary", cause=f"{file} is missing")
        return ()
    encoder = Tokenizer.from_file(str(file))
    rows = [tuple(encoder.encode(text).ids[:size]) for text in TEXTS[:SEQUENCES]]
    # An engine ends at a token that it does not know.
    return tuple(row for row in rows if len(row) > 1 and max(row) < vocabulary)


def compute_canary(learner: Learner, token_ids: Sequence[Sequence[int]], config: RunConfig) -> Canary | None:
    """The canary of the learner's weights; None without sequences, and where a log-probability is not finite.

    Rank 0 calls it.

    Args: token_ids: see `canary_tokens`
    """
    if not token_ids:
        return None
    with learner.ranks.sending(Read(token_ids)):
        logprobs_K = read_logprobs(learner, token_ids, config.training.micro_batch_tokens)
    if not np.isfinite(logprobs_K).all():
        return None
    ends = np.cumsum([len(row) - 1 for row in token_ids])[:-1]
    computation = config.computation(Device(learner.accelerator.device.type))
    return Canary(
        token_ids=tuple(map(tuple, token_ids)),
        logprobs=tuple(tuple(round(value, 6) for value in part.tolist()) for part in np.split(logprobs_K, ends)),
        dtype=_lowest(computation),
        max_gap=config.training.max_logprob_gap,
        rounds_updates=_rounds_updates(computation, has_adapters=config.training.lora is not None),
    )


def read_logprobs(learner: Learner, token_ids: Sequence[Sequence[int]], max_pack_tokens: int) -> NDArray[np.float64]:
    """The log-probability of every token but the first of each sequence, in order, [K]. All ranks call it."""
    samples = [_as_sample(number, row) for number, row in enumerate(token_ids)]
    tokens, ranks = trained_tokens(samples), learner.ranks
    plan = plan_batch(samples, tokens, max_pack_tokens, ranks=ranks)
    logprobs_K = batch_outputs(learner.policy, plan, len(tokens), learner.accelerator, ranks).logprobs_K
    found: NDArray[np.float64] = ranks.add(torch.from_numpy(logprobs_K)).numpy()
    return found


def _as_sample(number: int, token_ids: Sequence[int]) -> Sample:
    size, name = len(token_ids), f"canary.{number}"
    zeros, ones = np.zeros(size, np.float32), np.ones(size, np.float32)
    mask = np.arange(size) > 0
    return Sample(name, name, name, np.array(token_ids, np.int32), mask, zeros, zeros, ones, np.zeros(size, np.int32))


def _lowest(computation: Computation) -> Literal["float32", "bfloat16"]:
    used = {computation.precision, computation.export_dtype, computation.base_dtype}
    return "bfloat16" if "bfloat16" in used else "float32"


def _rounds_updates(computation: Computation, *, has_adapters: bool) -> bool:
    """Whether a version's files lack digits that the trainer computes with."""
    return computation.export_dtype == "bfloat16" and (has_adapters or computation.precision == "float32")
