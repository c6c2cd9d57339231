"""Policy losses per token, as plain functions; `objective` picks one and adds corrections and weights.

Axes: K trained tokens (all of one call's rows, flattened), N rows. Every function returns [K] losses to be multiplied
by token weights and summed. The ratio's denominator is the policy of `anchor_logprobs_K`: μ under bypass, π_old under
decoupled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, assert_never

import torch
from torch import Tensor

# exp(20) is 4.9e8: far beyond every clip, and still finite when multiplied in float32 (verl uses 20 too).
LOG_RATIO_LIMIT = 20.0
GSPO_LOG_RATIO_LIMIT = 10.0
K3_LIMIT = 10.0
DRIFT_COEFFICIENT = 1e-3


@dataclass(frozen=True)
class TokenLoss:
    """losses_K to minimise; clipped_K: True where the clip stops the gradient."""

    losses_K: Tensor
    clipped_K: Tensor


def ppo_clip(
    logprobs_K: Tensor,
    anchor_logprobs_K: Tensor,
    advantages_K: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> TokenLoss:
    """PPO's clipped surrogate: max(-Aρ, -A·clip(ρ, 1-ε_low, 1+ε_high)), and where A < 0 at most -cA (dual clip).

    With group advantages this is GRPO; with those that subtract the mean alone and weights that divide by a constant,
    Dr. GRPO; with ε_high > ε_low, DAPO.
    Worked value: ρ = 1.5, A = 1, ε_high = 0.28 gives -1.28 and no gradient.

    Source: PPO (arXiv 1707.06347) equation 7; dual clip (arXiv 1912.09729) equation 5; GRPO (arXiv 2402.03300)
        equation 3; DAPO's clip-higher (arXiv 2503.14476) equation 10.
    """
    ratio_K = _ratio(logprobs_K, anchor_logprobs_K)
    unclipped_K = -advantages_K * ratio_K
    bounded_K = -advantages_K * ratio_K.clamp(1 - clip_low, 1 + clip_high)
    losses_K = torch.maximum(unclipped_K, bounded_K)
    clipped_K = bounded_K > unclipped_K
    if dual_clip is not None:
        ceiling_K = torch.where(advantages_K < 0, -advantages_K * dual_clip, torch.inf)
        clipped_K = clipped_K | (ceiling_K < losses_K)
        losses_K = torch.minimum(losses_K, ceiling_K)
    return TokenLoss(losses_K, clipped_K)


def gspo(
    logprobs_K: Tensor,
    anchor_logprobs_K: Tensor,
    advantages_K: Tensor,
    rows_K: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """PPO's clip on the row's ratio s = exp(mean Δ), whose gradient reaches each token through its own log-probability.

    Args: rows_K: int64, the row of each token; a call needs all tokens of its rows.
    Source: GSPO (arXiv 2507.18071) equations 7 and 14 (the token variant, straight-through). As in verl, log s is
        clamped to at most 10, and no token's Δ is; TRL clamps neither.
    """
    mean_K = row_means((logprobs_K - anchor_logprobs_K).detach(), rows_K)
    log_ratio_K = logprobs_K - logprobs_K.detach() + mean_K
    ratio_K = log_ratio_K.clamp(max=GSPO_LOG_RATIO_LIMIT).exp()
    unclipped_K = -advantages_K * ratio_K
    bounded_K = -advantages_K * ratio_K.clamp(1 - clip_low, 1 + clip_high)
    return TokenLoss(torch.maximum(unclipped_K, bounded_K), bounded_K > unclipped_K)


def cispo(
    logprobs_K: Tensor,
    anchor_logprobs_K: Tensor,
    advantages_K: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """REINFORCE weighted by a clipped, detached ratio: -sg(clip(ρ, 1-low, 1+high))·A·logπ; no token loses its gradient.

    Source: MiniMax-M1 (arXiv 2506.13585) equations 4 and 5. Its setting is low = 1 (no lower clip) and a high cap.
    """
    ratio_K = _ratio(logprobs_K, anchor_logprobs_K).detach()
    bounded_K = ratio_K.clamp(1 - clip_low, 1 + clip_high)
    return TokenLoss(-bounded_K * advantages_K * logprobs_K, bounded_K != ratio_K)


def sapo(
    logprobs_K: Tensor, anchor_logprobs_K: Tensor, advantages_K: Tensor, *, tau_positive: float, tau_negative: float
) -> TokenLoss:
    """A soft gate on the ratio, -A·σ(τ(ρ - 1))·4/τ, whose gradient at ρ = 1 is REINFORCE's.

    Worked value: ρ = 1, A = 1, τ = 1 gives -2 and the gradient -1.

    Source: SAPO (arXiv 2511.20347); verl's `sapo`, TRL's `loss_type="sapo"`.
    """
    ratio_K = _ratio(logprobs_K, anchor_logprobs_K)
    taus_K = torch.full_like(ratio_K, tau_negative).masked_fill(advantages_K > 0, tau_positive)
    gates_K = torch.sigmoid(taus_K * (ratio_K - 1)) * 4 / taus_K
    return TokenLoss(-advantages_K * gates_K, torch.zeros_like(advantages_K, dtype=torch.bool))


def dppo_tv(
    logprobs_K: Tensor,
    generator_logprobs_K: Tensor,
    advantages_K: Tensor,
    *,
    mask_low: float,
    mask_high: float,
    drift_coefficient: float = DRIFT_COEFFICIENT,
) -> TokenLoss:
    """-A·ρ(π/μ) on tokens whose probability has not moved too far in the direction of A, and a penalty on (log ρ)² of
    every token.

    Worked value: π = 0.9, μ = 0.5, A = 1 has no gradient but the penalty's.

    Source: DPPO with the binary TV mask (arXiv 2602.04879), in the form and with the constants of prime-rl, whose
        penalty counts masked tokens and those without an advantage, too.
    """
    difference_K = (logprobs_K - generator_logprobs_K).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    moved_K = (logprobs_K.exp() - generator_logprobs_K.exp()).detach()
    masked_K = torch.where(advantages_K > 0, moved_K > mask_high, (advantages_K < 0) & (moved_K < -mask_low))
    losses_K = -advantages_K * difference_K.exp() * ~masked_K + drift_coefficient * difference_K**2
    return TokenLoss(losses_K, masked_K)


def importance_sampling(logprobs_K: Tensor, anchor_logprobs_K: Tensor, advantages_K: Tensor) -> TokenLoss:
    """-A·ρ: the policy gradient of tokens from another policy, token by token, without a clip.

    Source: Tinker's `importance_sampling`.
    """
    losses_K = -advantages_K * _ratio(logprobs_K, anchor_logprobs_K)
    return TokenLoss(losses_K, torch.zeros_like(losses_K, dtype=torch.bool))


def reinforce(logprobs_K: Tensor, advantages_K: Tensor) -> TokenLoss:
    """-A·log π. Source: Williams (1992); verl's `reinforce` loss of its bypass mode."""
    losses_K = -advantages_K * logprobs_K
    return TokenLoss(losses_K, torch.zeros_like(losses_K, dtype=torch.bool))


def kl(estimator: Literal["k1", "k2", "k3", "k3+"], logprobs_K: Tensor, reference_logprobs_K: Tensor) -> Tensor:
    """An estimate of KL(π_θ ‖ π_ref) at each sampled token, [K], with d = logπ_θ - logπ_ref.

    k1: d. k2: d²/2. k3: e^-d + d - 1, never negative. k3+: k3's value with k2's gradient. On-policy the means of k1 and
    k3 are the KL; the mean gradient of k2 and k3+ is that of the KL, of k1 it is 0. Worked values: d = 1 gives 1, 0.5
    and 0.3679.

    Source: Schulman, "Approximating KL divergence" (2020); k3 in GRPO (arXiv 2402.03300) equation 4; k3+ as in verl.
        For k3, d is clamped to ±20 and the estimate to 10, as verl does; TRL clamps neither.
    """
    difference_K = logprobs_K - reference_logprobs_K
    match estimator:
        case "k1":
            return difference_K
        case "k2":
            return 0.5 * difference_K**2
        case "k3":
            inverse_K = (-difference_K).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
            return (inverse_K.exp() - inverse_K - 1).clamp(max=K3_LIMIT)
        case "k3+":
            half_K = 0.5 * difference_K**2
            return half_K - half_K.detach() + kl("k3", logprobs_K, reference_logprobs_K).detach()
        case _:
            assert_never(estimator)


def _ratio(logprobs_K: Tensor, anchor_logprobs_K: Tensor) -> Tensor:
    return (logprobs_K - anchor_logprobs_K).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def row_sums(values_K: Tensor, rows_K: Tensor) -> Tensor:
    """The sum over each token's row, [K]."""
    return _by_row(values_K, rows_K)[rows_K]


def row_means(values_K: Tensor, rows_K: Tensor) -> Tensor:
    """The mean over each token's row, [K]."""
    return (_by_row(values_K, rows_K) / _by_row(torch.ones_like(values_K), rows_K).clamp(min=1))[rows_K]


def _by_row(values_K: Tensor, rows_K: Tensor) -> Tensor:
    sums_N = values_K.new_zeros(int(rows_K.max()) + 1 if len(rows_K) else 0)
    return sums_N.index_add_(0, rows_K, values_K)
