"""Corrections for tokens drawn from another policy, or from another implementation of the same policy.

Axes: K trained tokens. π_old is the policy at the start of the step, μ the engine that sampled.
"""

from __future__ import annotations

from typing import assert_never

import torch
from torch import Tensor

from leyden.libs.contracts.config import DecoupledCorrection
from leyden.services.trainer.loss.losses import LOG_RATIO_LIMIT, row_means, row_sums


def importance_weights(
    correction: DecoupledCorrection, old_logprobs_K: Tensor, generator_logprobs_K: Tensor, rows_K: Tensor
) -> Tensor:
    """The weight of each token from π_old / μ, without gradient, for a loss whose own ratio is π / π_old.

    0 where the correction drops the token. A sequence is a row; a call needs all trained tokens of its rows.

    Source: tis_token: truncated importance sampling (Ionides 2008, equation 3), as in "Your efficient RL framework
        secretly brings you off-policy training" (Yao et al. 2025), and decoupled PPO (arXiv 2110.00641) equation 2.
        tis_seq: the same over a row, verl's `rollout_is: sequence`. icepop: Ring-1T (arXiv 2510.18855) equation 3.
        seq_mask: TRL's `sequence_mask`. mis_geo: verl's `seq_mean_k1`, which bounds mean(-Δ) in place of mean Δ.
    """
    low, high = correction.bounds
    ratio_K = importance_ratio(old_logprobs_K, generator_logprobs_K)
    difference_K = old_logprobs_K.detach() - generator_logprobs_K
    match correction.weights:
        case "tis_token":
            return ratio_K.clamp(max=high)
        case "icepop":
            return ratio_K * _inside(ratio_K, low, high)
        case "tis_seq" | "seq_mask":
            product_K = row_sums(difference_K, rows_K).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
            truncated = correction.weights == "tis_seq"
            return product_K.clamp(max=high) if truncated else product_K * _inside(product_K, low, high)
        case "mis_geo":
            mean_K = row_means(difference_K.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), rows_K).exp()
            return _inside(mean_K, low, high).to(ratio_K.dtype)
        case _:
            assert_never(correction.weights)


def importance_ratio(old_logprobs_K: Tensor, generator_logprobs_K: Tensor) -> Tensor:
    """π_old / μ per token, without gradient; its logarithm is clamped to ±20."""
    difference_K = old_logprobs_K.detach() - generator_logprobs_K
    return difference_K.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def effective_sample_share(weights_K: Tensor) -> float:
    """Effective sample size as a share of the samples, 1 / mean((w / mean w)²): 1.0 for equal weights.

    Source: Kong (1992); the form of verl's `rollout_is_eff_sample_size`. Worked value: weights [1, 3] give 0.8.
    """
    if len(weights_K) == 0:
        return 1.0
    return float(1 / torch.mean((weights_K / weights_K.mean()) ** 2))


def _inside(values_K: Tensor, low: float, high: float) -> Tensor:
    return (values_K >= low) & (values_K <= high)
