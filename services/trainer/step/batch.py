"""The batch of a step or of one of its updates: what its passes need, and their results.

Axes: N samples, K trained tokens of the batch, k some of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from leyden.libs.contracts.config import Algorithm
from leyden.services.trainer.loss.critic import Estimates
from leyden.services.trainer.loss.objective import Objective
from leyden.services.trainer.model.forward import Outputs
from leyden.services.trainer.ranks.collectives import Ranks
from leyden.services.trainer.rows.batch import Sample, TrainedTokens, trained_tokens, weights_of


@dataclass(frozen=True)
class Anchors:
    """Outputs of fixed weights for the trained tokens, [K] each, computed once and shared by all updates.

    old_K: log-probabilities of π_old, the policy at the step's start; None where a step makes one update, whose own
    are π_old's; entropies_K: of π_old's states, known with old_K; reference_K: log-probabilities of the reference, None
    without a KL penalty; estimates: None without a critic; teacher_K: log-probabilities of the teacher, None without
    distillation.
    """

    old_K: NDArray[np.float64] | None = None
    reference_K: NDArray[np.float64] | None = None
    estimates: Estimates | None = None
    teacher_K: NDArray[np.float64] | None = None
    entropies_K: NDArray[np.float64] | None = None

    def of(self, tokens_k: NDArray[np.int64]) -> Anchors:
        """Those of some tokens."""
        columns = (self.old_K, self.reference_K, self.teacher_K, self.entropies_K)
        old_K, reference_K, teacher_K, entropies_K = (None if c is None else c[tokens_k] for c in columns)
        estimates = None if self.estimates is None else self.estimates.of(tokens_k)
        return Anchors(old_K, reference_K, estimates, teacher_K, entropies_K)


@dataclass(frozen=True)
class Batch:
    """Samples with their final advantages, and the anchors of their trained tokens, K.

    zero_variance: samples of groups whose advantages are all zero. Their gradient is zero, so that nothing computes
    them, but the loss's denominators count them.
    """

    samples: Sequence[Sample]
    zero_variance: Sequence[Sample] = ()
    anchors: Anchors = Anchors()

    @property
    def groups(self) -> set[str]:
        return {sample.group_id for sample in (*self.samples, *self.zero_variance)}

    @cached_property
    def tokens(self) -> TrainedTokens:
        """Advantages are the critic's where there is one."""
        found, estimates = trained_tokens(self.samples), self.anchors.estimates
        return found if estimates is None else replace(found, advantages_K=estimates.advantages_K.astype(np.float32))

    def weights(self, algorithm: Algorithm) -> NDArray[np.float64]:
        """The weight of each trained token in the loss, [K]."""
        counted = trained_tokens([*self.samples, *self.zero_variance])
        return weights_of(counted, algorithm.weighting, algorithm.sum_constant)[: len(self.tokens)]

    def part(self, groups: set[str]) -> tuple[NDArray[np.int64], Batch]:
        """The batch of some groups, and the numbers of its tokens within K; its weights count no other groups."""
        chosen_N = np.array([sample.group_id in groups for sample in self.samples], dtype=bool)
        tokens_k = np.flatnonzero(chosen_N[self.tokens.rows_K])
        samples, zero_variance = (
            [sample for sample in some if sample.group_id in groups] for some in (self.samples, self.zero_variance)
        )
        return tokens_k, Batch(samples, zero_variance, self.anchors.of(tokens_k))


@dataclass
class Computed:
    """Results of a pass over the batch; arrays are [K] in the order of the batch's trained tokens.

    computed_K: False for the tokens of a row left out because it cannot move the loss; the other arrays are 0 there.
    entropies_K: of the states before the tokens, in nats; 0 where the pass was not asked for them.
    computed_tokens: tokens that passed through the model; row_tokens: their number with one call per row.
    """

    size: int
    computed_tokens: int = 0
    row_tokens: int = 0
    loss: float = 0.0
    value_loss: float = 0.0
    logprobs_K: NDArray[np.float64] = field(init=False)
    importance_K: NDArray[np.float64] = field(init=False)
    kl_K: NDArray[np.float64] = field(init=False)
    entropies_K: NDArray[np.float64] = field(init=False)
    clipped_K: NDArray[np.bool_] = field(init=False)
    masked_K: NDArray[np.bool_] = field(init=False)
    computed_K: NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        self.logprobs_K, self.importance_K, self.kl_K, self.entropies_K = (np.zeros(self.size) for _ in range(4))
        self.clipped_K, self.masked_K, self.computed_K = (np.zeros(self.size, dtype=bool) for _ in range(3))

    def add(self, tokens_k: NDArray[np.int64], found: Outputs, result: Objective, value_loss: float) -> None:
        """Adds one pack's results. tokens_k: the numbers of its tokens within K."""
        self.loss += result.loss.item()
        self.value_loss += value_loss
        self.logprobs_K[tokens_k] = found.logprobs_K.detach().cpu()
        if found.entropies_K is not None:
            self.entropies_K[tokens_k] = found.entropies_K.detach().cpu()
        self.importance_K[tokens_k] = result.importance_K.cpu()
        self.kl_K[tokens_k] = result.kl_K.cpu()
        self.clipped_K[tokens_k] = result.clipped_K.cpu()
        self.masked_K[tokens_k] = result.masked_K.cpu()
        self.computed_K[tokens_k] = True

    def add_up(self, ranks: Ranks) -> None:
        """Replaces one rank's share of the results by those of the complete batch. All ranks call it."""
        numbers = (self.logprobs_K, self.importance_K, self.kl_K, self.entropies_K)
        columns = (*numbers, self.clipped_K, self.masked_K, self.computed_K)
        values = np.concatenate([*columns, [self.loss, self.computed_tokens, self.row_tokens, self.value_loss]])
        *parts, counts = np.split(ranks.add(torch.from_numpy(values)).numpy(), np.arange(1, 8) * self.size)
        # Each token is computed on one rank, and 0 on the others.
        self.logprobs_K, self.importance_K, self.kl_K, self.entropies_K = parts[:4]
        self.clipped_K, self.masked_K, self.computed_K = (part.astype(bool) for part in parts[4:])
        self.loss, self.computed_tokens, self.row_tokens = float(counts[0]), int(counts[1]), int(counts[2])
        self.value_loss = float(counts[3])
