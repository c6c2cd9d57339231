"""One step, of one optimiser update or several: from samples to new weights in memory and a row of metrics."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, assert_never

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray

from leyden.libs.contracts.config import Critic, Optimizer, RunConfig, Training
from leyden.libs.faults import fault_point
from leyden.services.trainer.batch import (
    Sample,
    TrainedTokens,
    mini_batches,
    to_go,
    trained_tokens,
    weights_of,
    with_advantages,
    with_whitened_advantages,
)
from leyden.services.trainer.compute import Anchors, Computed, accumulate_gradients, batch_outputs, plan_batch
from leyden.services.trainer.corrections import effective_sample_share
from leyden.services.trainer.critic import estimate
from leyden.services.trainer.forward import Policy
from leyden.services.trainer.losses import LOG_RATIO_LIMIT, kl
from leyden.services.trainer.ranks import ALONE, Ranks
from leyden.services.trainer.sharding import complete_number

Metrics = dict[str, float]


class TrainingDiverged(ArithmeticError):
    """Loss or gradient norm is not a finite number: no weights are exported."""


@dataclass
class Learner:
    """The policy's weights and the optimiser's moments, which every step changes; `step` counts the steps made."""

    policy: Policy
    optimizer: torch.optim.Optimizer
    accelerator: Accelerator
    reference: Policy | None = None
    step: int = 0
    ranks: Ranks = ALONE


def make_optimizer(policy: Policy, config: Optimizer, critic: Critic | None = None) -> torch.optim.AdamW:
    """AdamW over the parameters that are not frozen, and after them over the value head's.

    `scale` of a group is its rate as a multiple of the step's.
    """
    trained = [parameter for parameter in policy.model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [{"params": trained, "scale": 1.0}]
    if policy.value_head is not None and critic is not None:
        groups.append(
            {"params": list(policy.value_head.parameters()), "scale": critic.learning_rate / config.learning_rate}
        )
    return torch.optim.AdamW(
        groups,
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
    """Trains the policy on `samples` and returns the step's metrics; all ranks call it with the same samples.

    One update, or `mini_batches` · `epochs` of them. `zero_variance` holds the samples of groups whose advantages are
    all zero. Their gradient is zero, so leaving them out of the computation is exact, but the loss's denominators count
    them. It must be empty if the credit whitens advantages.

    Args:   interrupted: asked before every pack; before_update: called once the first gradients are computed, before
                weights and moments change
    Raises: TrainingDiverged: loss or gradient norm is not finite; Interrupted; whatever `before_update` raises. `step`
                is then unchanged, and before the first update weights and moments are, too. After it the learner must
                be loaded again.
    """
    started = time.perf_counter()
    anchors = _anchors(learner, samples, trained_tokens(samples), config)
    samples = _with_kl_rewards(samples, anchors, config)
    if config.credit.baseline.whiten:
        samples = with_whitened_advantages(samples)
    algorithm, everything, tokens = config.algorithm, [*samples, *zero_variance], trained_tokens(samples)
    groups = {sample.group_id for sample in everything}
    updates, seconds = list[_Update](), 0.0
    for part in mini_batches(groups, algorithm.mini_batches, algorithm.epochs, config.sampling.seed, learner.step):
        if updates:
            fault_point("trainer.updated")
        updates.append(_compute_gradients(learner, samples, zero_variance, part, anchors, config, interrupted))
        updates[-1].norm = _clip(learner, config.optimizer.max_grad_norm)
        _require_finite(learner, samples, tokens, updates[-1])
        if len(updates) == 1:
            before_update()
        computed_at = time.perf_counter()
        rate = _update(learner, config.optimizer, config.training.steps)
        seconds += time.perf_counter() - computed_at
    learner.step += 1

    return {
        **_batch_metrics(everything, samples, learner.step),
        **_token_metrics(tokens, anchors, updates, learner.step),
        **_value_metrics(anchors, updates),
        "updates": len(updates),
        "loss": _mean([update.computed.loss for update in updates]),
        "gradient_norm": _mean([update.norm for update in updates]),
        "learning_rate": rate,
        "gradients_seconds": time.perf_counter() - started - seconds,
        "optimizer_seconds": seconds,
    }


@dataclass
class _Update:
    """One update: tokens_k: the numbers of its tokens within the step's K."""

    tokens_k: NDArray[np.int64]
    computed: Computed
    norm: float = 0.0


def _anchors(learner: Learner, samples: Sequence[Sample], tokens: TrainedTokens, config: RunConfig) -> Anchors:
    """Outputs of the weights at the step's start: log-probabilities of π_old if the step makes several updates or
    rewards contain the KL, and a critic's estimates; log-probabilities of the reference if KL is penalised."""
    algorithm, ranks = config.algorithm, learner.ranks
    several = algorithm.mini_batches * algorithm.epochs > 1 or algorithm.kl_in == "reward"
    if not several and learner.reference is None and algorithm.critic is None:
        return Anchors()
    # Whitening moves rows without an advantage, too.
    every_row = algorithm.trains_every_row or config.credit.baseline.whiten
    plan = plan_batch(samples, tokens, config.training.micro_batch_tokens, every_row=every_row, ranks=ranks)

    def outputs(policy: Policy) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        own = batch_outputs(policy, plan, len(tokens), learner.accelerator)
        logprobs_K, values_K = ranks.add(torch.from_numpy(np.stack(own))).numpy()
        return logprobs_K, values_K

    old_K, values_K = outputs(learner.policy) if several or algorithm.critic else (None, None)
    return Anchors(
        old_K if several else None,
        outputs(learner.reference)[0] if learner.reference else None,
        estimate(algorithm.critic, samples, tokens, values_K) if algorithm.critic and values_K is not None else None,
    )


def _with_kl_rewards(samples: Sequence[Sample], anchors: Anchors, config: RunConfig) -> Sequence[Sample]:
    """The samples with advantages that contain the KL penalty, where it belongs to the rewards."""
    algorithm, rule = config.algorithm, config.credit.rule
    if algorithm.kl_in == "loss" or anchors.old_K is None or anchors.reference_K is None:
        return samples
    tokens = trained_tokens(samples)
    old_K, reference_K = torch.from_numpy(anchors.old_K), torch.from_numpy(anchors.reference_K)
    penalties_K = algorithm.kl_coefficient * kl(algorithm.kl_estimator, old_K, reference_K).numpy()
    gamma = rule.gamma if rule.type == "token_discounted" else 1.0
    return with_advantages(samples, tokens.advantages_K - to_go(penalties_K, tokens.rows_K, gamma))


def _compute_gradients(
    learner: Learner,
    samples: Sequence[Sample],
    zero_variance: Sequence[Sample],
    groups: set[str],
    anchors: Anchors,
    config: RunConfig,
    interrupted: Callable[[], bool],
) -> _Update:
    """The gradients of one update. The weights of its tokens count those of all `groups`, and of no other."""
    algorithm = config.algorithm
    chosen = [sample for sample in samples if sample.group_id in groups]
    tokens = trained_tokens([*chosen, *(sample for sample in zero_variance if sample.group_id in groups)])
    in_update = [np.full(int(sample.mask.sum()), sample.group_id in groups) for sample in samples]
    tokens_k = np.flatnonzero(np.concatenate([np.zeros(0, bool), *in_update]))
    weights_K = weights_of(tokens, algorithm.weighting, algorithm.sum_constant)
    trained, anchors = trained_tokens(chosen), anchors.of(tokens_k)
    if anchors.estimates is not None:
        trained = replace(trained, advantages_K=anchors.estimates.advantages_K.astype(np.float32))
        anchors = replace(anchors, estimates=anchors.estimates.weighted())
    learner.optimizer.zero_grad(set_to_none=True)
    computed = accumulate_gradients(
        learner.policy,
        algorithm,
        chosen,
        trained,
        weights_K[tokens.rows_K < len(chosen)],
        max_pack_tokens=config.training.micro_batch_tokens,
        accelerator=learner.accelerator,
        anchors=anchors,
        values_alone=algorithm.critic is not None and learner.step < algorithm.critic.warmup_steps,
        ranks=learner.ranks,
        interrupted=interrupted,
    )
    return _Update(tokens_k, computed)


def _require_finite(learner: Learner, samples: Sequence[Sample], tokens: TrainedTokens, update: _Update) -> None:
    loss, norm = update.computed.loss, update.norm
    if math.isfinite(loss) and math.isfinite(norm):
        return
    learner.optimizer.zero_grad(set_to_none=True)
    rows_k = tokens.rows_K[update.tokens_k]
    groups = dict.fromkeys(samples[row].group_id for row in rows_k)
    damaged = dict.fromkeys(samples[row].id for row in rows_k[~np.isfinite(update.computed.logprobs_K)])
    raise TrainingDiverged(
        f"step {learner.step + 1}: loss {loss}, gradient norm {norm}: lower optimizer.learning_rate and"
        f" resume from the last step. The update trained {_listed(groups)}; samples whose log-probabilities are not"
        f" finite: {_listed(damaged)}"
    )


def _listed(ids: Iterable[str], most: int = 8) -> str:
    names = list(ids)
    return (", ".join(names[:most]) or "none") + (f" and {len(names) - most} more" if len(names) > most else "")


@contextmanager
def naming_memory_settings(training: Training) -> Iterator[None]:
    """Adds to an accelerator's out-of-memory error which settings of the run need less."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        remedies = [f"lower training.micro_batch_tokens ({training.micro_batch_tokens})"]
        remedies += [] if training.activation_checkpointing else ["set training.activation_checkpointing"]
        remedies += [] if training.lora else ["train adapters with training.lora"]
        raise torch.OutOfMemoryError(f"the step needs too much memory: {', or '.join(remedies)}; {error}") from error


def _update(learner: Learner, config: Optimizer, steps: int) -> float:
    """Applies the gradients to weights and moments, and returns the learning rate."""
    rate = learning_rate(config, learner.step + 1, steps)
    for group in learner.optimizer.param_groups:
        group["lr"] = rate * group["scale"]
    learner.optimizer.step()
    learner.optimizer.zero_grad(set_to_none=True)
    return rate


def _clip(learner: Learner, max_norm: float) -> float:
    parameters = [p for p in learner.policy.parameters() if p.grad is not None]
    if not parameters:
        return 0.0
    norm = learner.accelerator.clip_grad_norm_(parameters, max_norm)
    return complete_number(norm) if norm is not None else 0.0


def _batch_metrics(everything: Sequence[Sample], samples: Sequence[Sample], step: int) -> Metrics:
    lags_K = step - 1 - trained_tokens(everything).policy_versions_K
    return {
        "samples": len(samples),
        "rollouts": len({sample.rollout_id for sample in samples}),
        "groups": len({sample.group_id for sample in samples}),
        "groups_without_variance": len({s.group_id for s in everything} - {s.group_id for s in samples}),
        "trained_tokens": sum(int(sample.mask.sum()) for sample in samples),
        "policy_lag_mean": _mean(lags_K),
        "policy_lag_max": int(lags_K.max()) if len(lags_K) else 0,
    }


def _token_metrics(tokens: TrainedTokens, anchors: Anchors, updates: Sequence[_Update], step: int) -> Metrics:
    """Averages over the computed tokens of all updates. `logprob_gap_*` compare trainer and engine at the step's own
    version, before the first update."""
    start_K, mask_K = np.zeros(len(tokens)), np.zeros(len(tokens), bool)
    for update in updates:
        start_K[update.tokens_k] = update.computed.logprobs_K
        mask_K[update.tokens_k] |= update.computed.computed_K
    if anchors.old_K is not None:
        start_K = anchors.old_K

    def column(name: str, of: Sequence[_Update] = updates) -> NDArray[Any]:
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
        # Monte Carlo estimate: the tokens are draws from (nearly) this policy.
        "entropy": -_mean(start_K[mask_K]),
    }
    own_K = mask_K & (tokens.policy_versions_K == step - 1)
    return metrics | gap_metrics(start_K, tokens, own_K)


def _value_metrics(anchors: Anchors, updates: Sequence[_Update]) -> Metrics:
    if anchors.estimates is None:
        return {}
    return {"value_loss": _mean([update.computed.value_loss for update in updates]), **anchors.estimates.metrics()}


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
