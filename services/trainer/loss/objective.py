"""The loss of a run's algorithm: a policy loss, corrected, penalised and weighted, summed over tokens.

Axes: K trained tokens. Calls on disjoint sets of complete rows sum to one call on all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from leyden.libs.contracts.config import (
    Algorithm,
    Cispo,
    DppoTv,
    Gspo,
    ImportanceSampling,
    PpoClip,
    Reinforce,
    Sapo,
    Sft,
)
from leyden.services.trainer.loss import corrections, losses


@dataclass(frozen=True)
class Terms:
    """The loss's inputs for each trained token, beside the log-probability that is trained.

    generator_logprobs_K, advantages_K, weights_K: [K]; rows_K: int64 [K]; reference_logprobs_K: [K], None without KL;
    old_logprobs_K: [K], π_old, the policy at the step's start, None where it is the policy that is trained.
    """

    generator_logprobs_K: Tensor
    advantages_K: Tensor
    weights_K: Tensor
    rows_K: Tensor
    reference_logprobs_K: Tensor | None = None
    old_logprobs_K: Tensor | None = None


@dataclass(frozen=True)
class Objective:
    """loss: scalar with gradient; the other fields, [K] without gradient, are for metrics."""

    loss: Tensor
    clipped_K: Tensor
    masked_K: Tensor
    importance_K: Tensor
    kl_K: Tensor


def objective(algorithm: Algorithm, logprobs_K: Tensor, terms: Terms, entropies_K: Tensor | None = None) -> Objective:
    """Σ_k weight · (correction · policy loss + β · KL estimate - c · entropy); with `kl_in: reward` the advantages hold
    the KL estimate.

    In a step's only update, π_old is `logprobs_K` without its gradient: no second forward pass is needed.

    Args:   entropies_K: of the distribution that each token was drawn from, with its gradient; None without a bonus
    Source: the aggregation of verl's `entropy_coeff`
    Raises: ValueError: a KL penalty without reference log-probabilities, a bonus without entropies
    """
    old_logprobs_K = logprobs_K.detach() if terms.old_logprobs_K is None else terms.old_logprobs_K
    ratio_K = corrections.importance_ratio(old_logprobs_K, terms.generator_logprobs_K)
    policy = _policy_loss(algorithm, logprobs_K, old_logprobs_K, terms)

    correction_K = torch.ones_like(ratio_K)
    if algorithm.decoupled is not None:
        correction_K = corrections.importance_weights(
            algorithm.decoupled, old_logprobs_K, terms.generator_logprobs_K, terms.rows_K
        )
    per_token_K = policy.losses_K * correction_K
    kl_K = torch.zeros_like(logprobs_K)
    if algorithm.kl_coefficient > 0:
        if terms.reference_logprobs_K is None:
            raise ValueError("kl_coefficient is above 0: pass reference_logprobs_K, computed by policy version 0")
        kl_K = losses.kl(algorithm.kl_estimator, logprobs_K, terms.reference_logprobs_K)
        if algorithm.kl_in == "loss":
            per_token_K = per_token_K + algorithm.kl_coefficient * kl_K
    if algorithm.entropy_coefficient > 0:
        if entropies_K is None:
            raise ValueError("entropy_coefficient is above 0: pass entropies_K")
        per_token_K = per_token_K - algorithm.entropy_coefficient * entropies_K

    loss = (per_token_K * terms.weights_K).sum()
    return Objective(loss, policy.clipped_K, correction_K == 0, ratio_K, kl_K.detach())


def _policy_loss(algorithm: Algorithm, logprobs_K: Tensor, old_logprobs_K: Tensor, terms: Terms) -> losses.TokenLoss:
    anchor_K = old_logprobs_K if algorithm.decoupled else terms.generator_logprobs_K
    advantages_K = terms.advantages_K
    match algorithm:
        case PpoClip(clip_low=low, clip_high=high):
            dual = algorithm.dual_clip
            return losses.ppo_clip(logprobs_K, anchor_K, advantages_K, clip_low=low, clip_high=high, dual_clip=dual)
        case Gspo(clip_low=low, clip_high=high):
            return losses.gspo(logprobs_K, anchor_K, advantages_K, terms.rows_K, clip_low=low, clip_high=high)
        case Cispo(clip_low=low, clip_high=high):
            return losses.cispo(logprobs_K, anchor_K, advantages_K, clip_low=low, clip_high=high)
        case Sapo(tau_positive=positive, tau_negative=negative):
            return losses.sapo(logprobs_K, anchor_K, advantages_K, tau_positive=positive, tau_negative=negative)
        case DppoTv(mask_low=low, mask_high=high):
            return losses.dppo_tv(logprobs_K, anchor_K, advantages_K, mask_low=low, mask_high=high)
        case ImportanceSampling():
            return losses.importance_sampling(logprobs_K, anchor_K, advantages_K)
        case Reinforce() | Sft():
            # The advantage of a demonstration's tokens is 1: their cross-entropy.
            return losses.reinforce(logprobs_K, advantages_K)
        case _:
            assert_never(algorithm)
