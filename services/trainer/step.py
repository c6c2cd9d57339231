"""One optimiser step: from samples to new weights in memory and a row of metrics."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, assert_never

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray

from leyden.libs.contracts.config import Optimizer, RunConfig
from leyden.services.trainer.batch import Sample, TrainedTokens, trained_tokens, weights_of, with_whitened_advantages
from leyden.services.trainer.compute import Computed, accumulate_gradients
from leyden.services.trainer.corrections import effective_sample_share
from leyden.services.trainer.forward import Policy
from leyden.services.trainer.losses import LOG_RATIO_LIMIT
from leyden.services.trainer.ranks import ALONE, Ranks

Metrics = dict[str, float]


class TrainingDiverged(ArithmeticError):
    """Loss or gradient norm is not a finite number; the weights are unchanged."""


@dataclass
class Learner:
    """The policy's weights and the optimiser's moments, which every step changes; `step` counts the steps made."""

    policy: Policy
    optimizer: torch.optim.Optimizer
    accelerator: Accelerator
    reference: Policy | None = None
    step: int = 0
    ranks: Ranks = ALONE


def make_optimizer(policy: Policy, config: Optimizer) -> torch.optim.AdamW:
    """AdamW over the parameters that are not frozen."""
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(
        trained,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        weight_decay=config.weight_decay,
        # One pass over memory per parameter; on a CPU four times as fast as the default.
        fused=True,
    )


def learning_rate(config: Optimizer, step: int, steps: int) -> float:
    """The rate of step `step` (from 1) of `steps`: a linear warm-up, then the schedule.

    The first step after the warm-up has the full rate; the minimum would be reached one step after the last, so that
    every step trains. With 2 warm-up steps of 6, `linear` without a minimum gives the shares 1/2, 1, 1, 3/4, 2/4, 1/4.
    """
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    done = min(1.0, (step - 1 - config.warmup_steps) / max(1, steps - config.warmup_steps))
    match config.schedule:
        case "constant":
            share = 1.0
        case "linear":
            share = 1.0 - done
        case "cosine":
            share = (1.0 + math.cos(math.pi * done)) / 2
        case _:
            assert_never(config.schedule)
    return config.learning_rate * (config.minimum_share + (1.0 - config.minimum_share) * share)


def optimizer_step(
    learner: Learner,
    samples: Sequence[Sample],
    config: RunConfig,
    *,
    zero_variance: Sequence[Sample] = (),
    interrupted: Callable[[], bool] = lambda: False,
    before_update: Callable[[], None] = lambda: None,
) -> Metrics:
    """Updates the policy once on `samples` and returns the step's metrics; all ranks call it with the same samples.

    `zero_variance` holds the samples of groups whose advantages are all zero. Their gradient is zero, so leaving them
    out of the computation is exact, but the loss's denominators count them. It must
    be empty if the credit whitens advantages.

    Args:   interrupted: asked before every pack; before_update: called once gradients are computed, before weights and
                moments change
    Raises: TrainingDiverged: loss or gradient norm is not finite; Interrupted; whatever `before_update` raises. Weights
                and moments are then unchanged.
    """
    started = time.perf_counter()
    if config.credit.baseline.whiten:
        samples = with_whitened_advantages(samples)
    tokens = trained_tokens([*samples, *zero_variance])
    computed = _compute_gradients(learner, samples, tokens, config, interrupted)
    computed_at = time.perf_counter()

    norm = _clip(learner, config.optimizer.max_grad_norm)
    _require_finite(learner, computed.loss, norm)
    before_update()
    rate = _update(learner, config.optimizer, config.training.steps)

    return {
        **_batch_metrics([*samples, *zero_variance], samples, tokens, learner.step),
        **_token_metrics(trained_tokens(samples), computed, learner.step),
        "loss": computed.loss,
        "gradient_norm": norm,
        "learning_rate": rate,
        "gradients_seconds": computed_at - started,
        "optimizer_seconds": time.perf_counter() - computed_at,
    }


def _compute_gradients(
    learner: Learner,
    samples: Sequence[Sample],
    tokens: TrainedTokens,
    config: RunConfig,
    interrupted: Callable[[], bool],
) -> Computed:
    """Args: tokens: the trained tokens of `samples`, then those that only count in the loss's denominators"""
    algorithm = config.algorithm
    weights_K = weights_of(tokens, algorithm.weighting, algorithm.sum_constant)
    learner.optimizer.zero_grad(set_to_none=True)
    return accumulate_gradients(
        learner.policy,
        algorithm,
        samples,
        trained_tokens(samples),
        weights_K[tokens.rows_K < len(samples)],
        max_pack_tokens=config.training.micro_batch_tokens,
        accelerator=learner.accelerator,
        reference=learner.reference,
        ranks=learner.ranks,
        interrupted=interrupted,
    )


def _require_finite(learner: Learner, loss: float, norm: float) -> None:
    if math.isfinite(loss) and math.isfinite(norm):
        return
    learner.optimizer.zero_grad(set_to_none=True)
    raise TrainingDiverged(
        f"step {learner.step + 1}: loss {loss}, gradient norm {norm}: lower optimizer.learning_rate and"
        " resume from the last step"
    )


def _update(learner: Learner, config: Optimizer, steps: int) -> float:
    """Applies the gradients to weights and moments, and returns the learning rate."""
    rate = learning_rate(config, learner.step + 1, steps)
    for group in learner.optimizer.param_groups:
        group["lr"] = rate
    learner.optimizer.step()
    learner.optimizer.zero_grad(set_to_none=True)
    learner.step += 1
    return rate


def _clip(learner: Learner, max_norm: float) -> float:
    parameters = [p for p in learner.policy.parameters() if p.grad is not None]
    if not parameters:
        return 0.0
    norm = learner.accelerator.clip_grad_norm_(parameters, max_norm)
    return float(norm) if norm is not None else 0.0


def _batch_metrics(
    everything: Sequence[Sample], samples: Sequence[Sample], tokens: TrainedTokens, step: int
) -> Metrics:
    lags_K = step - 1 - tokens.policy_versions_K
    return {
        "samples": len(samples),
        "rollouts": len({sample.rollout_id for sample in samples}),
        "groups": len({sample.group_id for sample in samples}),
        "groups_without_variance": len({s.group_id for s in everything} - {s.group_id for s in samples}),
        "trained_tokens": int((tokens.rows_K < len(samples)).sum()),
        "policy_lag_mean": _mean(lags_K),
        "policy_lag_max": int(lags_K.max()) if len(lags_K) else 0,
    }


def _token_metrics(tokens: TrainedTokens, computed: Computed, step: int) -> Metrics:
    """Averages over the computed tokens. `logprob_gap_*` compare trainer and engine at the step's own version."""
    mask_K = computed.computed_K
    metrics: Metrics = {
        "computed_tokens": computed.computed_tokens,
        "row_tokens": computed.row_tokens,
        "sharing_ratio": computed.row_tokens / computed.computed_tokens if computed.computed_tokens else 1.0,
        "kl_reference": _mean(computed.kl_K[mask_K]),
        "clipped_share": _mean(computed.clipped_K[mask_K]),
        "masked_share": _mean(computed.masked_K[mask_K]),
        "importance_mean": _mean(computed.importance_K[mask_K]) if mask_K.any() else 1.0,
        "effective_sample_share": effective_sample_share(torch.from_numpy(computed.importance_K[mask_K])),
        # Monte Carlo estimate: the tokens are draws from (nearly) this policy.
        "entropy": -_mean(computed.logprobs_K[mask_K]),
    }
    own_K = mask_K & (tokens.policy_versions_K == step - 1)
    return metrics | gap_metrics(computed.logprobs_K, tokens, own_K)


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


def _mean(values: NDArray[Any]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
