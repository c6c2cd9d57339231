"""One step, of one optimiser update or several: from samples to new weights in memory and a row of metrics."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from leyden.libs.contracts.config import Algorithm, Optimizer, RunConfig, Sft
from leyden.libs.faults import fault_point
from leyden.libs.store.training import StartTokens
from leyden.services.trainer.loss.critic import Estimates, Scale, estimate
from leyden.services.trainer.loss.distillation import teacher_advantages
from leyden.services.trainer.loss.losses import kl
from leyden.services.trainer.model.forward import Policy
from leyden.services.trainer.model.remedies import naming_settings
from leyden.services.trainer.model.tensors import complete_number
from leyden.services.trainer.ranks.collectives import Ranks
from leyden.services.trainer.rows.batch import (
    Sample,
    TrainedTokens,
    mini_batches,
    to_go,
    trained_tokens,
    with_advantages,
    with_hint,
    with_whitened_advantages,
)
from leyden.services.trainer.step.batch import Anchors, Batch
from leyden.services.trainer.step.gradients import (
    BatchOutputs,
    Plan,
    accumulate_gradients,
    batch_outputs,
    plan_batch,
)
from leyden.services.trainer.step.learner import Learner
from leyden.services.trainer.step.metrics import Metrics, Update, start_tokens, step_metrics, without_samplers
from leyden.services.trainer.step.optimizers import learning_rate


class TrainingDiverged(ArithmeticError):
    """Loss or gradient norm is not a finite number: no weights are exported."""


def optimizer_step(
    learner: Learner,
    samples: Sequence[Sample],
    config: RunConfig,
    *,
    zero_variance: Sequence[Sample] = (),
    interrupted: Callable[[], bool] = lambda: False,
    is_written: Callable[[float], bool] = lambda _: True,
    keep_start: Callable[[dict[str, StartTokens]], None] = lambda _: None,
) -> Metrics:
    """Trains the policy on `samples` and returns the step's metrics; all ranks call it with the same samples.

    One update, or `mini_batches` · `epochs` of them. `zero_variance` holds the samples of groups whose advantages are
    all zero. Their gradient is zero, so leaving them out of the computation is exact, but the loss's denominators count
    them. It must be empty if the credit whitens advantages.

    Args:   interrupted: asked before every pack; is_written: waits at most so many seconds and returns whether the last
                step's state is on the disk. No rank changes weights or moments before that; keep_start: is given
                `start_tokens`
    Raises: TrainingDiverged: loss or gradient norm is not finite; Interrupted; torch.OutOfMemoryError;
                CompilationFailed; whatever `is_written` raises, and RankFailed on other ranks. `step` is then
                unchanged, and before the first update weights and moments are, too. After it the learner must be
                loaded again.
    """
    started = time.perf_counter()
    with naming_settings(config, "the step"):
        if learner.reference is not None:
            learner.reference.refresh(learner.policy, learner.step)
        batch = _prepare(learner, samples, zero_variance, config)
        updates = _make_updates(learner, batch, config, interrupted, is_written)
        if learner.value_head is not None and batch.anchors.estimates is not None:
            learner.value_head.follow(batch.anchors.estimates.targets)
    learner.step += 1
    keep_start(start_tokens(batch, updates))
    metrics = step_metrics(batch, updates, learner.step, started)
    # No policy of the run sampled demonstrations.
    return without_samplers(metrics) if isinstance(config.algorithm, Sft) else metrics


def _prepare(learner: Learner, samples: Sequence[Sample], zero_variance: Sequence[Sample], config: RunConfig) -> Batch:
    anchors = _anchors(learner, samples, trained_tokens(samples), config)
    samples = _with_teacher(samples, anchors, config)
    samples = _with_kl_rewards(samples, anchors, config)
    if config.credit.baseline.whiten:
        samples = with_whitened_advantages(samples)
    return Batch(samples, zero_variance, anchors)


def _make_updates(
    learner: Learner,
    batch: Batch,
    config: RunConfig,
    interrupted: Callable[[], bool],
    is_written: Callable[[float], bool],
) -> list[Update]:
    algorithm, updates = config.algorithm, list[Update]()
    parts = mini_batches(batch.groups, algorithm.mini_batches, algorithm.epochs, config.sampling.seed, learner.step)
    for groups in parts:
        if updates:
            fault_point("trainer.updated")
        learner.optimizer.zero_grad(set_to_none=True)
        tokens_k, part = batch.part(groups)
        update = Update(tokens_k, accumulate_gradients(learner, part, config, interrupted))
        _clip_gradients(learner, update, config)
        _require_finite(learner, batch, update)
        if not updates:
            learner.ranks.wait(is_written)
        computed_at = time.perf_counter()
        update.learning_rate = _apply(learner, config.optimizer, config.training.steps)
        update.seconds = time.perf_counter() - computed_at
        updates.append(update)
    return updates


def _anchors(learner: Learner, samples: Sequence[Sample], tokens: TrainedTokens, config: RunConfig) -> Anchors:
    """Outputs of the weights at the step's start: log-probabilities of π_old if the step makes several updates or
    advantages contain the KL to a reference or a teacher, and a critic's estimates; log-probabilities of the reference
    if KL is penalised, and of a teacher."""
    algorithm, ranks = config.algorithm, learner.ranks
    compared = algorithm.kl_in == "reward" or learner.teacher is not None
    several = algorithm.mini_batches * algorithm.epochs > 1 or compared
    if not several and learner.reference is None and algorithm.critic is None:
        return Anchors()
    # Whitening moves rows without an advantage, too.
    every_row = algorithm.trains_every_row or config.credit.baseline.whiten
    plan = plan_batch(samples, tokens, config.training.micro_batch_tokens, every_row=every_row, ranks=ranks)

    def outputs(policy: Policy, plan: Plan = plan, *, entropies: bool = False) -> BatchOutputs:
        own = batch_outputs(policy, plan, len(tokens), learner.accelerator, ranks, entropies=entropies)
        return BatchOutputs(*ranks.add(torch.from_numpy(np.stack(own))).numpy())

    shared = algorithm.critic is not None and learner.value_model is None
    old = outputs(learner.policy, entropies=several) if several or shared else None
    values_K = None if old is None else old.values_K
    if learner.value_model is not None:
        values_K = outputs(learner.value_model).values_K
    reference_K = None
    if learner.reference is not None:
        with learner.reference.weights() as reference:
            reference_K = outputs(reference).logprobs_K
    teacher_K = None
    if learner.teacher is not None:
        with learner.teacher.weights() as teacher:
            teacher_K = outputs(teacher, _plan_of_teacher(samples, plan, config, ranks)).logprobs_K
    estimates = _estimates(learner, algorithm, samples, tokens, values_K)
    if old is None or not several:
        return Anchors(reference_K=reference_K, estimates=estimates, teacher_K=teacher_K)
    return Anchors(
        old_K=old.logprobs_K,
        entropies_K=old.entropies_K,
        reference_K=reference_K,
        estimates=estimates,
        teacher_K=teacher_K,
    )


def _plan_of_teacher(samples: Sequence[Sample], plan: Plan, config: RunConfig, ranks: Ranks) -> Plan:
    """The plan of the rows as the teacher reads them, where it has hints. Their trained tokens have the same order."""
    if all(sample.hint is None for sample in samples):
        return plan
    hinted = [with_hint(sample) for sample in samples]
    return plan_batch(hinted, trained_tokens(hinted), config.training.micro_batch_tokens, ranks=ranks)


def _with_teacher(samples: Sequence[Sample], anchors: Anchors, config: RunConfig) -> Sequence[Sample]:
    """The samples with advantages that contain the teacher's judgement, where the run has one.

    Raises: RuntimeError: the learner lacks it: rewards alone would train
    """
    distillation = config.algorithm.distillation
    if distillation is None:
        return samples
    if anchors.old_K is None or anchors.teacher_K is None:
        raise RuntimeError("algorithm.distillation: the learner was loaded without its teacher, for no further step")
    advantages_K = trained_tokens(samples).advantages_K
    return with_advantages(samples, teacher_advantages(distillation, advantages_K, anchors.old_K, anchors.teacher_K))


def _estimates(
    learner: Learner,
    algorithm: Algorithm,
    samples: Sequence[Sample],
    tokens: TrainedTokens,
    outputs_K: NDArray[np.float64] | None,
) -> Estimates | None:
    """Values and targets in units of the reward, and the scale of the head's outputs in the step's updates.

    A head's first targets give it that scale: its outputs of then, 0, are their mean from there on.
    """
    head = learner.value_head
    if algorithm.critic is None or head is None or outputs_K is None:
        return None
    found = estimate(algorithm.critic, samples, tokens, Scale(*head.scale).values(outputs_K))
    scale = Scale(*head.scale_for(found.targets))
    return replace(found, values_K=scale.values(outputs_K), scale=scale)


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


def _require_finite(learner: Learner, batch: Batch, update: Update) -> None:
    loss, norm = update.computed.loss, update.norm
    value_loss, value_norm = update.computed.value_loss, update.value_norm
    if all(map(math.isfinite, (loss, norm, value_loss, value_norm or 0.0))):
        return
    of_critic = value_norm is not None
    learner.optimizer.zero_grad(set_to_none=True)
    rows_k = batch.tokens.rows_K[update.tokens_k]
    groups = dict.fromkeys(batch.samples[row].group_id for row in rows_k)
    damaged = dict.fromkeys(batch.samples[row].id for row in rows_k[~np.isfinite(update.computed.logprobs_K)])
    raise TrainingDiverged(
        f"step {learner.step + 1}: loss {loss}, gradient norm {norm}"
        + (f", value loss {value_loss}, the critic's gradient norm {value_norm}" if of_critic else "")
        + ": lower optimizer.learning_rate"
        + (" or algorithm.critic.learning_rate" if of_critic else "")
        + f" and resume from the last step. The update trained {_listed(groups)}; samples whose log-probabilities are"
        f" not finite: {_listed(damaged)}"
    )


def _listed(ids: Iterable[str], most: int = 8) -> str:
    names = list(ids)
    return (", ".join(names[:most]) or "none") + (f" and {len(names) - most} more" if len(names) > most else "")


def _apply(learner: Learner, config: Optimizer, steps: int) -> float:
    """Applies the gradients to weights and moments, and returns the learning rate."""
    rate = learning_rate(config, learner.step + 1, steps)
    for group in learner.optimizer.param_groups:
        group["lr"] = rate * group["scale"]
    learner.optimizer.step()
    learner.optimizer.zero_grad(set_to_none=True)
    return rate


def _clip_gradients(learner: Learner, update: Update, config: RunConfig) -> None:
    """Bounds the gradient norms of the policy's model, and of the critic's head or model, each by itself."""
    critic, bound = config.algorithm.critic, config.optimizer.max_grad_norm
    update.norm = _clip(learner, learner.policy.model, bound)
    if learner.values is not None and critic is not None:
        update.value_norm = _clip(learner, learner.values, critic.max_grad_norm or bound)


def _clip(learner: Learner, module: nn.Module, max_norm: float) -> float:
    parameters = [p for p in module.parameters() if p.grad is not None]
    if not parameters:
        return 0.0
    norm = learner.accelerator.clip_grad_norm_(parameters, max_norm)
    return complete_number(norm) if norm is not None else 0.0
