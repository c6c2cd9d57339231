"""Loss and gradients of a batch: plans the forest, runs prefixes and packs, and collects values for the metrics.

Axes: N samples, K trained tokens of the batch, k those of one pack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor

from leyden.libs.contracts.config import Algorithm, RunConfig
from leyden.services.trainer.loss.critic import Estimates
from leyden.services.trainer.loss.objective import Objective, Terms, objective
from leyden.services.trainer.model.forward import Outputs, Policy, Prefix, Reads
from leyden.services.trainer.ranks.collectives import ALONE, Ranks
from leyden.services.trainer.rows.batch import Sample, TrainedTokens
from leyden.services.trainer.rows.passes import ONE_TOKEN, merged, nodes_of, passes
from leyden.services.trainer.rows.routing import with_experts
from leyden.services.trainer.rows.tree import Forest, Pack, plan_forest, share_rows
from leyden.services.trainer.step.batch import Anchors, Batch, Computed
from leyden.services.trainer.step.learner import Learner

FIRST = Reads(np.zeros(1, np.int64), np.zeros(1, np.int64), np.ones(1, np.float32))
"""The read behind `ONE_TOKEN`."""


class Interrupted(Exception):
    """The step was abandoned between two packs, on request."""


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
    forest = with_experts(forest, [samples[row].experts for row in rows])
    reads = [_reads(pack, rows, starts_N, tokens) for pack in forest.packs]
    return Plan(forest, reads, sum(len(samples[row].token_ids) for row in rows))


def batch_logprobs(policy: Policy, plan: Plan, size: int, accelerator: Accelerator) -> NDArray[np.float64]:
    """The policy's log-probability of each planned token, [K], without gradients; 0 for other tokens. size: K."""
    return batch_outputs(policy, plan, size, accelerator).logprobs_K


class BatchOutputs(NamedTuple):
    """`Outputs` of a whole batch, [K] each; 0 for tokens that the plan leaves out, and where nothing computes them."""

    logprobs_K: NDArray[np.float64]
    values_K: NDArray[np.float64]
    entropies_K: NDArray[np.float64]


def batch_outputs(
    policy: Policy, plan: Plan, size: int, accelerator: Accelerator, ranks: Ranks = ALONE, *, entropies: bool = False
) -> BatchOutputs:
    """`batch_logprobs`, and what else the policy puts out for the state before each planned token.

    Args: ranks: among which the policy is divided; all of them call it; entropies: compute them, too
    """
    batch = BatchOutputs(*(np.zeros(size) for _ in BatchOutputs._fields))
    with torch.no_grad():
        for number, pack, path in _packs(policy, plan.forest, accelerator, ranks):
            reads = FIRST if number is None else plan.reads[number][1]
            with accelerator.autocast():
                found: Outputs = policy(pack, path, reads, entropies=entropies)
            if number is None:
                continue
            for column_K, column_k in zip(batch, found, strict=True):
                if column_k is not None:
                    column_K[plan.reads[number][0]] = column_k.cpu()
    return batch


def accumulate_gradients(
    learner: Learner, batch: Batch, config: RunConfig, interrupted: Callable[[], bool] = lambda: False
) -> Computed:
    """Adds the gradients of the batch's loss to the parameters of the policy, and of a critic of its own, pack by pack.

    Each rank computes its share of the rows; gradients and results are then those of the complete batch on all ranks. A
    critic that is a model of its own makes its pass after the policy's.

    A row whose advantages are all zero has no gradient unless a penalty moves it, and is not computed: the weights
    contain the denominators of the entire batch, so leaving it out changes nothing else.

    Raises: Interrupted: `interrupted` returned True before a pack, on any rank; gradients are incomplete.
    """
    algorithm, tokens, anchors = config.algorithm, batch.tokens, batch.anchors
    weights_K, critic = batch.weights(algorithm), algorithm.critic
    if anchors.estimates is not None:
        anchors = replace(anchors, estimates=anchors.estimates.weighted())
    values_alone = critic is not None and learner.step < critic.warmup_steps
    size, every_row = config.training.micro_batch_tokens, algorithm.trains_every_row
    plan = plan_batch(batch.samples, tokens, size, every_row=every_row, ranks=learner.ranks)
    computed = Computed(len(tokens), computed_tokens=plan.forest.computed_tokens, row_tokens=plan.row_tokens)

    def policy_loss(tokens_k: NDArray[np.int64], found: Outputs) -> Tensor:
        here = anchors.of(tokens_k)
        terms = _terms(tokens, weights_K, here, tokens_k, found.logprobs_K)
        result, value_loss = _losses(algorithm, found, terms, here.estimates, values_alone=values_alone)
        computed.add(tokens_k, found, result, value_loss)
        return result.loss

    def own_value_loss(tokens_k: NDArray[np.int64], found: Outputs) -> Tensor:
        assert critic is not None
        assert anchors.estimates is not None
        assert found.values_K is not None
        missed = anchors.estimates.of(tokens_k).missed(found.values_K, critic.value_clip)
        computed.value_loss += missed.item()
        return critic.coefficient * missed

    # Those of the step's start are recorded: the anchors have them where other weights make the updates.
    of_pass, entropies = (learner, plan, interrupted), algorithm.entropy_coefficient > 0 or anchors.old_K is None
    _add_gradients(*of_pass, learner.policy, policy_loss, values_alone=values_alone, entropies=entropies)
    if learner.value_model is not None:
        _add_gradients(*of_pass, learner.value_model, own_value_loss)
    computed.add_up(learner.ranks)
    return computed


def _add_gradients(
    learner: Learner,
    plan: Plan,
    interrupted: Callable[[], bool],
    policy: Policy,
    loss: Callable[[NDArray[np.int64], Outputs], Tensor],
    *,
    values_alone: bool = False,
    entropies: bool = False,
) -> None:
    """Adds the gradients of `loss`, a function of a pack's tokens, by number, and outputs. Raises: Interrupted"""
    accelerator, ranks = learner.accelerator, learner.ranks
    learns = not values_alone or policy.value_head is not None
    with torch.set_grad_enabled(learns):
        for number, pack, path in _packs(policy, plan.forest, accelerator, ranks, values_alone=values_alone):
            if ranks.leaving(interrupted()):
                raise Interrupted("stopped between two packs: make the step again")
            tokens_k, reads = (None, FIRST) if number is None else plan.reads[number]
            with accelerator.autocast():
                found: Outputs = policy(pack, path, reads, values_alone=values_alone, entropies=entropies)
            total = _nothing(found) if tokens_k is None else loss(tokens_k, found)
            if learns:
                accelerator.backward(total)


def _nothing(found: Outputs) -> Tensor:
    """A loss that is 0 and has gradients of 0."""
    outputs = found.logprobs_K if found.values_K is None else found.logprobs_K + found.values_K
    return outputs.sum() * 0


def _packs(
    policy: Policy, forest: Forest, accelerator: Accelerator, ranks: Ranks, *, values_alone: bool = False
) -> Iterator[tuple[int | None, Pack, list[Prefix]]]:
    """Yields each pack with its number and the prefixes before it; the pack's backward pass adds to their gradients.

    A prefix is computed right before its first pack and runs its own backward pass right after its last. The number
    is None, and the pack a single token, where other ranks have a pack and this one has none.
    """
    nodes = nodes_of(forest)
    shape = merged(ranks.gather([node.shape for node in nodes]))
    opened: list[Prefix] = []
    path: list[Prefix] = []
    for kind, number in passes(nodes, shape):
        if kind == "pack":
            yield (None, ONE_TOKEN, []) if number is None else (number, forest.packs[number], path)
        elif kind == "open":
            chain, before = (ONE_TOKEN, []) if number is None else (forest.prefixes[number], list(path))
            with accelerator.autocast(), torch.set_grad_enabled(torch.is_grad_enabled() and not values_alone):
                opened.append(policy.prefix(chain, before))
            if number is not None:
                path.append(opened[-1])
        else:
            opened.pop().backward(whole=ranks.size > 1)
            if number is not None:
                path.pop()


def _reads(
    pack: Pack, rows: Sequence[int], starts_N: NDArray[np.int64], tokens: TrainedTokens
) -> tuple[NDArray[np.int64], Reads]:
    of_rows = [np.arange(starts_N[rows[i]], starts_N[rows[i] + 1]) for i in pack.rows]
    before = np.arange(pack.prefix_tokens)
    places = [
        np.concatenate([before, pack.prefix_tokens + nodes])[tokens.positions_K[k] - 1]
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
    missed = estimates.missed(found.values_K, algorithm.critic.value_clip)
    loss = algorithm.critic.coefficient * missed
    return replace(result, loss=loss if values_alone else result.loss + loss), missed.item()


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
