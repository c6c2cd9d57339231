"""Corrections for tokens drawn from another policy, or from another implementation of the same policy.

Axes: K trained tokens. π_old is the policy at the start of the step, μ the engine that sampled.
"""

from __future__ import annotations

import torch
from torch import Tensor

from leyden.services.trainer.losses import LOG_RATIO_LIMIT


def truncated_importance_weights(old_logprobs_K: Tensor, generator_logprobs_K: Tensor, cap: float) -> Tensor:
    """min(π_old / μ, C) per token, without gradient: the weight of a loss whose own ratio is π / π_old.

    Source: truncated importance sampling (Ionides 2008, equation 3), as in "Your efficient RL framework secretly brings
        you off-policy training" (Yao et al. 2025); decoupled PPO (arXiv 2110.00641) equation 2.
    """
    return importance_ratio(old_logprobs_K, generator_logprobs_K).clamp(max=cap)


def importance_ratio(old_logprobs_K: Tensor, generator_logprobs_K: Tensor) -> Tensor:
    """π_old / μ per token, without gradient; its logarithm is clamped to ±20."""
    difference_K = old_logprobs_K.detach() - generator_logprobs_K
    return difference_K.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def ratio_band(ratio_K: Tensor, above: float) -> Tensor:
    """True where 1/above <= π_old / μ <= above: an off-policy mask drops the other tokens.

    The loss's denominators still count the dropped tokens, so that masking never makes the rest weigh more.
    Source: IcePop (Ring-1T, arXiv 2510.18855) equation 3, with a symmetric band.
    """
    return (ratio_K >= 1 / above) & (ratio_K <= above)


def effective_sample_share(weights_K: Tensor) -> float:
    """Effective sample size as a share of the samples, 1 / mean((w / mean w)²): 1.0 for equal weights.

    Source: Kong (1992); the form of verl's `rollout_is_eff_sample_size`. Worked value: weights [1, 3] give 0.8.
    """
    if len(weights_K) == 0:
        return 1.0
    return float(1 / torch.mean((weights_K / weights_K.mean()) ** 2))
