"""Canaries: a few fixed token sequences with the log-probabilities that the trainer computes for them at each version.

trainer ──records with the version──▶ `Canary` ──the controller asks each engine for the same──▶ `compare`

Both sides compute the same tokens with the same weights, so that one short request tells whether an engine serves the
version that it was given. A canary shows weights and precision. It samples nothing: the mismatch gate compares sampled
tokens.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

SEQUENCES, SEQUENCE_TOKENS, CPU_TOKENS = 4, 64, 12
"""The most sequences of a canary, and the most tokens of each: fewer on a CPU, where tokens are slow and float32 leaves
little noise to average out."""


class Canary(BaseModel):
    """The log-probabilities of a version for some token sequences, at temperature 1.

    token_ids: two tokens or more in each sequence; logprobs: natural logarithms, one for each token except the first of
    a sequence; dtype: the lowest precision of the trainer's products and of the version's files; max_gap: nats, the
    run's `training.max_logprob_gap`; rounds_updates: the version's files round what the trainer computes with, so that
    a small update may not be in them.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    token_ids: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]
    dtype: Literal["float32", "bfloat16"]
    max_gap: float
    rounds_updates: bool = False
