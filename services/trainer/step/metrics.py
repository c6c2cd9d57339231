"""The metrics of a step: one row of numbers from its batch and its updates."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from leyden.libs.store.training import StartTokens
from leyden.services.trainer.loss.corrections import effective_sample_share
from leyden.services.trainer.loss.losses import LOG_RATIO_LIMIT
from leyden.services.trainer.rows.batch import TrainedTokens, trained_tokens
from leyden.services.trainer.rows.routing import is_recorded
from leyden.services.trainer.step.batch import Anchors, Batch, Computed

Metrics = dict[str, float]
OF_SAMPLERS = frozenset({"policy_lag_mean", "policy_lag_max", "importance_mean", "effective_sample_share", "entropy"})
"""Metrics that compare the policy with the one that sampled the tokens."""


@dataclass
class Update:
    """One update: tokens_k: the numbers of its tokens within the step's K; seconds: of the optimiser alone;
    value_norm: the gradient norm of the critic's head, or of its own model with it; None without one."""

    tokens_k: NDArray[np.int64]
    computed: Computed
    norm: float = 0.0
    value_norm: float | None = None
    learning_rate: float = 0.0
    seconds: float = 0.0


def step_metrics(batch: Batch, updates: Sequence[Update], step: int, started: float) -> Metrics:
    """Args: step: its number, from 1; started: `perf_counter()` at its beginning"""
    return {
        **_batch_metrics(batch, step),
        **_token_metrics(batch, updates, step),
        **_routing_metrics(batch),
        **_value_metrics(batch.anchors, updates),
        **_teacher_metrics(batch.anchors),
        **_update_metrics(updates, started),
    }


def without_samplers(metrics: Metrics) -> Metrics:
    """The metrics of tokens that other models sampled."""
    return {name: value for name, value in metrics.items() if name not in OF_SAMPLERS}


def _batch_metrics(batch: Batch, step: int) -> Metrics:
    samples = batch.samples
    lags_K = step - 1 - trained_tokens([*samples, *batch.zero_variance]).policy_versions_K
    groups = {sample.group_id for sample in samples}
    return {
        "samples": len(samples),
        "rollouts": len({sample.rollout_id for sample in samples}),
        "groups": len(groups),
        "groups_without_variance": len(batch.groups - groups),
        "trained_tokens": sum(int(sample.mask.sum()) for sample in samples),
        # With those of groups whose rewards teach nothing; 0: nothing that was sampled can be trained.
        "trainable_tokens": sum(int(sample.mask.sum()) for sample in (*samples, *batch.zero_variance)),
        "policy_lag_mean": _mean(lags_K),
        "policy_lag_max": int(lags_K.max()) if len(lags_K) else 0,
    }


def _token_metrics(batch: Batch, updates: Sequence[Update], step: int) -> Metrics:
    """Averages over the computed tokens of all updates. `logprob_gap_*` compare trainer and engine at the step's own
    version, before the first update."""
    tokens = batch.tokens
    start_K, _, mask_K = _start(batch, updates)

    def column(name: str, of: Sequence[Update] = updates) -> NDArray[Any]:
        return np.concatenate([getattr(update.computed, name)[update.computed.computed_K] for update in of])

    computed, rows = (sum(getattr(u.computed, name) for u in updates) for name in ("computed_tokens", "row_tokens"))
    importance_k = column("importance_K")
    metrics: Metrics = {
        "computed_tokens": computed,
        "row_tokens": rows,
        "sharing_ratio": rows / computed if computed else 1.0,
        "kl_reference": _mean(column("kl_K")),
        "clipped_share": _mean(column("clipped_K")),
        "clipped_share_last": _mean(column("clipped_K", updates[-1:])),
        "masked_share": _mean(column("masked_K")),
        "importance_mean": _mean(importance_k) if len(importance_k) else 1.0,
        "effective_sample_share": effective_sample_share(torch.from_numpy(importance_k)),
        "entropy": -_mean(np.concatenate([start_K[mask_K], _unmoved_logprobs(batch)])),
    }
    own_K = mask_K & (tokens.policy_versions_K == step - 1)
    return metrics | gap_metrics(start_K, tokens, own_K)


def _unmoved_logprobs(batch: Batch) -> NDArray[np.float32]:
    """The engine's log-probabilities of tokens of groups without variance, which no pass computes.

    With the computed tokens they make `entropy` the Monte Carlo estimate over all that the policy sampled: one that
    answers most tasks always alike has collapsed, and its other groups alone would hide that.
    """
    return trained_tokens(batch.zero_variance).generator_logprobs_K


def start_tokens(batch: Batch, updates: Sequence[Update]) -> dict[str, StartTokens]:
    """By sample, what the weights at the step's start say of its trained tokens; NaN where no update computed them."""
    start = _start(batch, updates)
    columns = [np.where(start.mask_K, column_K, np.nan).astype("<f4") for column_K in start[:2]]
    bounds = pairwise(np.searchsorted(batch.tokens.rows_K, np.arange(len(batch.samples) + 1)))
    return {
        sample.id: StartTokens(*(column[begin:end].tobytes() for column in columns))
        for sample, (begin, end) in zip(batch.samples, bounds, strict=True)
    }


class _Start(NamedTuple):
    """Columns of all trained tokens, by the weights at the step's start; mask_K: whether an update computed them."""

    logprobs_K: NDArray[np.float64]
    entropies_K: NDArray[np.float64]
    mask_K: NDArray[np.bool_]


def _start(batch: Batch, updates: Sequence[Update]) -> _Start:
    size, anchors = len(batch.tokens), batch.anchors
    found = _Start(np.zeros(size), np.zeros(size), np.zeros(size, bool))
    for update in updates:
        found.logprobs_K[update.tokens_k] = update.computed.logprobs_K
        found.entropies_K[update.tokens_k] = update.computed.entropies_K
        found.mask_K[update.tokens_k] |= update.computed.computed_K
    if anchors.old_K is None or anchors.entropies_K is None:
        return found
    return found._replace(logprobs_K=anchors.old_K, entropies_K=anchors.entropies_K)


def _routing_metrics(batch: Batch) -> Metrics:
    """The tokens of rows, up to the last trained one, that have the trainer's own choice of experts; none where the run
    replays no choice of the engine."""
    ends = [(sample.experts, int(np.flatnonzero(sample.mask)[-1])) for sample in batch.samples if sample.mask.any()]
    lacking = [int((~is_recorded(experts[:end])).sum()) for experts, end in ends if experts is not None]
    return {"routing_unrecorded_tokens": sum(lacking)} if lacking else {}


def _value_metrics(anchors: Anchors, updates: Sequence[Update]) -> Metrics:
    if anchors.estimates is None:
        return {}
    norms = [update.value_norm for update in _filled(updates) if update.value_norm is not None]
    return {
        "value_loss": _mean([update.computed.value_loss for update in updates]),
        **({"value_gradient_norm": _mean(norms)} if norms else {}),
        **anchors.estimates.metrics(),
    }


def _filled(updates: Sequence[Update]) -> Sequence[Update]:
    """The updates of which the model computed a token: another one has no gradient, and its norm of 0 is none."""
    return [update for update in updates if update.computed.computed_tokens]


def _teacher_metrics(anchors: Anchors) -> Metrics:
    """`kl_teacher` is the mean of log π_old - log π_teacher: on the policy's own tokens the reverse KL to the
    teacher."""
    if anchors.teacher_K is None or anchors.old_K is None:
        return {}
    return {"kl_teacher": _mean(anchors.old_K - anchors.teacher_K)}


def _update_metrics(updates: Sequence[Update], started: float) -> Metrics:
    seconds = sum(update.seconds for update in updates)
    norms = [update.norm for update in _filled(updates)]
    return {
        "updates": len(updates),
        "loss": _mean([update.computed.loss for update in updates]),
        **({"gradient_norm": _mean(norms)} if norms else {}),
        "learning_rate": updates[-1].learning_rate,
        "gradients_seconds": time.perf_counter() - started - seconds,
        "optimizer_seconds": seconds,
    }


def gap_metrics(logprobs_K: NDArray[np.float64], tokens: TrainedTokens, own_K: NDArray[np.bool_]) -> Metrics:
    """Compares trainer and engine on the tokens of `own_K`, whose version computed `logprobs_K`; empty without any."""
    if not own_K.any():
        return {}
    differences_K = (logprobs_K - tokens.generator_logprobs_K)[own_K]
    ratios_K = torch.from_numpy(differences_K).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return {
        "logprob_gap_tokens": int(own_K.sum()),
        "logprob_gap_mean": _mean(np.abs(differences_K)),
        "logprob_gap_max": float(np.abs(differences_K).max()),
        "logprob_gap_sample_share": effective_sample_share(ratios_K),
    }


def _mean(values: NDArray[Any] | Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
