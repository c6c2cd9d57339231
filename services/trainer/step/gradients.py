"""Loss and gradients of a batch: plans the forest, runs trunks and packs, and collects values for the metrics.

Axes: N samples, K trained tokens of the batch, k those of one pack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor

from leyden.libs.contracts.config import Algorithm, Critic
from leyden.services.trainer.loss.critic import Estimates, value_loss
from leyden.services.trainer.loss.objective import Objective, Terms, objective
from leyden.services.trainer.model.forward import Outputs, Policy, Reads, Trunk
from leyden.services.trainer.model.sharding import sum_gradients, unsharded
from leyden.services.trainer.ranks.collectives import ALONE, Ranks
from leyden.services.trainer.rows.batch import Sample, TrainedTokens
from leyden.services.trainer.rows.tree import Forest, Pack, plan_forest, share_rows


class Interrupted(Exception):
    """The step was abandoned between two packs, on request."""


@dataclass
class Computed:
    """Results of a pass over the batch; arrays are [K] in the order of the batch's trained tokens.

    computed_K: False for the tokens of a row left out because it cannot move the loss; the other arrays are 0 there.
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
    clipped_K: NDArray[np.bool_] = field(init=False)
    masked_K: NDArray[np.bool_] = field(init=False)
    computed_K: NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        self.logprobs_K, self.importance_K, self.kl_K = (np.zeros(self.size) for _ in range(3))
        self.clipped_K, self.masked_K, self.computed_K = (np.zeros(self.size, dtype=bool) for _ in range(3))

    def add(self, tokens_k: NDArray[np.int64], logprobs_k: Tensor, result: Objective, value_loss: float) -> None:
        """Adds one pack's results. tokens_k: the numbers of its tokens within K."""
        self.loss += result.loss.item()
        self.value_loss += value_loss
        self.logprobs_K[tokens_k] = logprobs_k.detach().cpu()
        self.importance_K[tokens_k] = result.importance_K.cpu()
        self.kl_K[tokens_k] = result.kl_K.cpu()
        self.clipped_K[tokens_k] = result.clipped_K.cpu()
        self.masked_K[tokens_k] = result.masked_K.cpu()
        self.computed_K[tokens_k] = True

    def add_up(self, ranks: Ranks) -> None:
        """Replaces one rank's share of the results by those of the complete batch. All ranks call it."""
        columns = (self.logprobs_K, self.importance_K, self.kl_K, self.clipped_K, self.masked_K, self.computed_K)
        values = np.concatenate([*columns, [self.loss, self.computed_tokens, self.row_tokens, self.value_loss]])
        *parts, counts = np.split(ranks.add(torch.from_numpy(values)).numpy(), np.arange(1, 7) * self.size)
        # Each token is computed on one rank, and 0 on the others.
        self.logprobs_K, self.importance_K, self.kl_K = parts[:3]
        self.clipped_K, self.masked_K, self.computed_K = (part.astype(bool) for part in parts[3:])
        self.loss, self.computed_tokens, self.row_tokens = float(counts[0]), int(counts[1]), int(counts[2])
        self.value_loss = float(counts[3])


@dataclass(frozen=True)
class Anchors:
    """Outputs of fixed weights for the trained tokens, [K] each, computed once and shared by all updates.

    old_K: log-probabilities of π_old, the policy at the step's start; None where a step makes one update, whose own
    are π_old's; reference_K: those of the reference, None without a KL penalty; estimates: None without a critic.
    """

    old_K: NDArray[np.float64] | None = None
    reference_K: NDArray[np.float64] | None = None
    estimates: Estimates | None = None

    def of(self, tokens_k: NDArray[np.int64]) -> Anchors:
        """Those of some tokens."""
        old_K, reference_K = (None if c is None else c[tokens_k] for c in (self.old_K, self.reference_K))
        return Anchors(old_K, reference_K, None if self.estimates is None else self.estimates.of(tokens_k))


@dataclass(frozen=True)
class Plan:
    """A batch's forest, and per pack its trained tokens (numbers within K) and where to read them."""

    forest: Forest
    reads: list[tuple[NDArray[np.int64], Reads]]
    row_tokens: int


def plan_batch(
    samples: Sequence[Sample],
    tokens: TrainedTokens,
    max_pack_tokens: int,
    *,
    every_row: bool = True,
    ranks: Ranks = ALONE,
) -> Plan:
    """Plans which tokens run together and where each trained token's log-probability is read.

    Rows end at the parent of their last trained token: no later logits are needed.

    Args: every_row: False leaves out rows in which every advantage is zero; ranks: plans this rank's share alone.
    """
    starts_N = np.searchsorted(tokens.rows_K, np.arange(len(samples) + 1))
    rows: list[int] = np.unique(tokens.rows_K[every_row | (tokens.advantages_K != 0)]).tolist()
    last = {row: int(tokens.positions_K[starts_N[row + 1] - 1]) for row in rows}
    if ranks.size > 1:
        rows = [rows[i] for i in share_rows([samples[r].token_ids[: last[r]] for r in rows], ranks.rank, ranks.size)]
    forest = plan_forest([samples[row].token_ids[: last[row]] for row in rows], max_pack_tokens)
    reads = [_reads(pack, rows, starts_N, tokens) for pack in forest.packs]
    return Plan(forest, reads, sum(len(samples[row].token_ids) for row in rows))


def batch_logprobs(policy: Policy, plan: Plan, size: int, accelerator: Accelerator) -> NDArray[np.float64]:
    """The policy's log-probability of each planned token, [K], without gradients; 0 for other tokens. size: K."""
    return batch_outputs(policy, plan, size, accelerator)[0]


def batch_outputs(
    policy: Policy, plan: Plan, size: int, accelerator: Accelerator
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """`batch_logprobs`, and the value of the state before each planned token; 0 without a value head."""
    logprobs_K, values_K = np.zeros(size), np.zeros(size)
    with unsharded(policy), torch.no_grad(), accelerator.autocast():
        for number, pack, path in _with_trunks(policy, plan.forest, accelerator):
            tokens_k, reads = plan.reads[number]
            found: Outputs = policy(pack, path, reads)
            logprobs_K[tokens_k] = found.logprobs_K.cpu()
            if found.values_K is not None:
                values_K[tokens_k] = found.values_K.cpu()
    return logprobs_K, values_K


def accumulate_gradients(
    policy: Policy,
    algorithm: Algorithm,
    samples: Sequence[Sample],
    tokens: TrainedTokens,
    weights_K: NDArray[np.float64],
    *,
    max_pack_tokens: int,
    accelerator: Accelerator,
    anchors: Anchors = Anchors(),
    values_alone: bool = False,
    value_model: Policy | None = None,
    ranks: Ranks = ALONE,
    interrupted: Callable[[], bool] = lambda: False,
) -> Computed:
    """Adds the gradients of the batch's loss to the parameters of the policy, and of a critic of its own, pack by pack.

    Each rank computes its share of the rows; gradients and results are then those of the complete batch on all ranks.

    A row whose advantages are all zero has no gradient unless a penalty moves it, and is not computed: the weights
    contain the denominators of the entire batch, so leaving it out changes nothing else.

    Args:   tokens: `trained_tokens(samples)`; weights_K: their weights in the loss; anchors: of the same tokens;
                values_alone: the policy loss has no part in the gradients; value_model: the critic, where it is a model
                of its own, which makes its pass after the policy's.
    Raises: Interrupted: `interrupted` returned True before a pack, on any rank; gradients are incomplete.
    """
    plan = plan_batch(samples, tokens, max_pack_tokens, every_row=algorithm.trains_every_row, ranks=ranks)
    computed = Computed(len(tokens), computed_tokens=plan.forest.computed_tokens, row_tokens=plan.row_tokens)

    def policy_loss(tokens_k: NDArray[np.int64], found: Outputs) -> Tensor:
        here = anchors.of(tokens_k)
        terms = _terms(tokens, weights_K, here, tokens_k, found.logprobs_K)
        result, value_loss = _losses(algorithm, found, terms, here.estimates, values_alone=values_alone)
        computed.add(tokens_k, found.logprobs_K, result, value_loss)
        return result.loss

    def own_value_loss(tokens_k: NDArray[np.int64], found: Outputs) -> Tensor:
        assert algorithm.critic is not None
        assert anchors.estimates is not None
        assert found.values_K is not None
        missed = _value_loss(algorithm.critic, found.values_K, anchors.estimates.of(tokens_k))
        computed.value_loss += missed.item()
        return algorithm.critic.coefficient * missed

    passes = _Passes(plan, accelerator, ranks, interrupted)
    entropies = algorithm.entropy_coefficient > 0
    passes.add_gradients(policy, policy_loss, values_alone=values_alone, entropies=entropies)
    if value_model is not None:
        passes.add_gradients(value_model, own_value_loss)
    computed.add_up(ranks)
    return computed


@dataclass(frozen=True)
class _Passes:
    """Passes of models over a plan's packs, forward and backward."""

    plan: Plan
    accelerator: Accelerator
    ranks: Ranks
    interrupted: Callable[[], bool]

    def add_gradients(
        self,
        policy: Policy,
        loss: Callable[[NDArray[np.int64], Outputs], Tensor],
        *,
        values_alone: bool = False,
        entropies: bool = False,
    ) -> None:
        """Adds the gradients of `loss` of each pack's tokens, by their numbers within K, and outputs.

        Raises: Interrupted
        """
        learns, leaving = not values_alone or policy.value_head is not None, False
        with unsharded(policy), torch.set_grad_enabled(learns):
            for number, pack, path in _with_trunks(policy, self.plan.forest, self.accelerator):
                if leaving := self.ranks.leaving(self.interrupted()):
                    break
                tokens_k, reads = self.plan.reads[number]
                with self.accelerator.autocast():
                    found: Outputs = policy(pack, path, reads, values_alone=values_alone, entropies=entropies)
                total = loss(tokens_k, found)
                if learns:
                    self.accelerator.backward(total)
            if self.ranks.any(leaving):
                raise Interrupted("stopped between two packs: make the step again")
            # Without any pack parameters have no gradient, and the optimiser leaves them alone.
            if self.ranks.any(bool(self.plan.forest.packs)) and learns:
                sum_gradients(policy, values_alone=values_alone)


def _with_trunks(policy: Policy, forest: Forest, accelerator: Accelerator) -> Iterator[tuple[int, Pack, list[Trunk]]]:
    """Yields each pack with its number and the trunks before it; the pack's backward pass adds to their gradients.

    A trunk is computed right before its first pack and runs its own backward pass right after its last.
    """
    numbers: list[int] = []
    path: list[Trunk] = []
    for number, pack in enumerate(forest.packs):
        while numbers != list(pack.path[: len(numbers)]):
            numbers.pop()
            path.pop().backward()
        for trunk in pack.path[len(numbers) :]:
            with accelerator.autocast():
                path.append(policy.trunk(forest.trunks[trunk], path))
            numbers.append(trunk)
        yield number, pack, path
    while path:
        path.pop().backward()


def _reads(
    pack: Pack, rows: Sequence[int], starts_N: NDArray[np.int64], tokens: TrainedTokens
) -> tuple[NDArray[np.int64], Reads]:
    of_rows = [np.arange(starts_N[rows[i]], starts_N[rows[i] + 1]) for i in pack.rows]
    before = np.arange(pack.prefix)
    places = [
        np.concatenate([before, pack.prefix + nodes])[tokens.positions_K[k] - 1]
        for nodes, k in zip(pack.nodes, of_rows, strict=True)
    ]
    tokens_k = np.concatenate(of_rows)
    return tokens_k, Reads(np.concatenate(places), tokens.token_ids_K[tokens_k], tokens.temperatures_K[tokens_k])


def _losses(
    algorithm: Algorithm, found: Outputs, terms: Terms, estimates: Estimates | None, *, values_alone: bool
) -> tuple[Objective, float]:
    """The objective of a pack, whose loss contains the critic's; and the value loss by itself, 0 without a critic."""
    result = objective(algorithm, found.logprobs_K, terms, found.entropies_K)
    if estimates is None or found.values_K is None or algorithm.critic is None:
        return result, 0.0
    missed = _value_loss(algorithm.critic, found.values_K, estimates)
    loss = algorithm.critic.coefficient * missed
    return replace(result, loss=loss if values_alone else result.loss + loss), missed.item()


def _value_loss(critic: Critic, values_k: Tensor, estimates: Estimates) -> Tensor:
    old_k, returns_k, weights_k = (
        torch.from_numpy(column_k).to(values_k)
        for column_k in (estimates.values_K, estimates.returns_K, estimates.weights_K)
    )
    return value_loss(values_k, old_k, returns_k, weights_k, critic.value_clip)


def _terms(
    tokens: TrainedTokens,
    weights_K: NDArray[np.float64],
    anchors: Anchors,
    tokens_k: NDArray[np.int64],
    like: Tensor,
) -> Terms:
    def column(values_k: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values_k).to(device=like.device, dtype=like.dtype)

    return Terms(
        column(tokens.generator_logprobs_K[tokens_k]),
        column(tokens.advantages_K[tokens_k]),
        column(weights_K[tokens_k]),
        torch.from_numpy(tokens.rows_K[tokens_k]).to(like.device),
        None if anchors.reference_K is None else column(anchors.reference_K),
        None if anchors.old_K is None else column(anchors.old_K),
    )
