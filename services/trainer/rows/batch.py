"""The samples of a step, and the flat columns of their trained tokens.

Axes: N samples (rows), T tokens of one row, K trained tokens of all rows in row order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from leyden.libs.contracts.config import Weighting
from leyden.libs.contracts.samples import RowCall
from leyden.libs.store import tables
from leyden.libs.store.records.chains import RoutedCall
from leyden.services.trainer.rows.routing import Experts, agreed_experts, row_experts
from leyden.services.trainer.rows.token_weights import token_weights

RoutedCalls = Mapping[str, Sequence[RoutedCall]]


@dataclass(frozen=True)
class Hint:
    """A message that the teacher alone reads: `token_ids`, int32, stand after the first `at` tokens of the row."""

    token_ids: NDArray[np.int32]
    at: int = 0


@dataclass(frozen=True)
class Sample:
    """A token sequence ready for the loss: one root-to-leaf path of a rollout, decoded from its row.

    All arrays are [T]: token_ids int32; mask bool, True where the policy sampled the token and this row trains it;
    generator_logprobs float32, temperature-scaled; advantages, temperatures float32; policy_versions int32.
    calls: those that this row trains, in order; only where the run has a critic. experts: those that engines recorded,
    as `row_experts` makes them; None where the run replays none. hint: for the
    teacher; None without.

    Raises: ValueError: arrays of different lengths, a trained first token (nothing precedes it), a temperature of 0, or
        a number that is not finite.
    """

    id: str
    rollout_id: str
    group_id: str
    token_ids: NDArray[np.int32]
    mask: NDArray[np.bool_]
    generator_logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]
    temperatures: NDArray[np.float32]
    policy_versions: NDArray[np.int32]
    calls: tuple[RowCall, ...] = ()
    experts: Experts | None = None
    hint: Hint | None = None

    def __post_init__(self) -> None:
        columns = (self.mask, self.generator_logprobs, self.advantages, self.temperatures, self.policy_versions)
        if any(len(column) != len(self.token_ids) for column in columns):
            raise ValueError(f"sample {self.id}: its columns differ in length")
        if len(self.mask) and self.mask[0]:
            raise ValueError(f"sample {self.id}: the first token is trained, but nothing precedes it")
        if (self.temperatures[self.mask] <= 0).any():
            raise ValueError(f"sample {self.id}: a trained token was sampled at temperature 0, which has no gradient")
        if not all(np.isfinite(c[self.mask]).all() for c in (self.generator_logprobs, self.advantages)):
            raise ValueError(f"sample {self.id}: a log-probability or advantage is not finite")


def with_hint(sample: Sample) -> Sample:
    """The row as the teacher reads it: the hint's tokens are in it, untrained, and its own keep their order. It has no
    experts: an engine chose those without the hint."""
    hint = sample.hint
    if hint is None:
        return sample

    def widened(column: NDArray[Any], inserted: NDArray[Any]) -> NDArray[Any]:
        return np.concatenate([column[: hint.at], inserted.astype(column.dtype), column[hint.at :]])

    none = np.zeros(len(hint.token_ids))
    return Sample(
        sample.id,
        sample.rollout_id,
        sample.group_id,
        widened(sample.token_ids, hint.token_ids),
        widened(sample.mask, none),
        widened(sample.generator_logprobs, none),
        widened(sample.advantages, none),
        widened(sample.temperatures, none),
        widened(sample.policy_versions, none),
    )


def decode_sample(row: tables.Sample, routed: RoutedCalls | None = None) -> Sample:
    """Decodes a stored row into arrays.

    Args:   routed: the records of experts by call; None where the run replays none
    Raises: ValueError: its columns differ in length or contain numbers that cannot be trained.
    """
    return Sample(
        id=row.id,
        rollout_id=row.rollout_id,
        group_id=row.group_id,
        token_ids=np.frombuffer(row.token_ids, "<i4"),
        mask=np.frombuffer(row.mask, np.uint8).astype(bool),
        generator_logprobs=np.frombuffer(row.generator_logprobs, "<f4"),
        advantages=np.frombuffer(row.advantages, "<f4"),
        temperatures=np.frombuffer(row.temperatures, "<f4"),
        policy_versions=np.frombuffer(row.policy_versions, "<i4"),
        calls=tuple(RowCall(**call) for call in row.calls or ()),
        experts=None if routed is None else row_experts(routed.get(row.call_id or "", ()), row.length),
    )


def with_agreed_experts(samples: Sequence[Sample]) -> list[Sample]:
    """The samples with one record of experts for a token that several of them share; as they are without records."""
    recorded = [sample.experts for sample in samples if sample.experts is not None]
    if len(recorded) < len(samples):
        return list(samples)
    agreed = agreed_experts([sample.token_ids for sample in samples], recorded)
    return [replace(sample, experts=one) for sample, one in zip(samples, agreed, strict=True)]


@dataclass(frozen=True)
class TrainedTokens:
    """One entry per trained token, [K]. positions_K counts from the row's start; rollouts_K and groups_K are numbers
    from 0 in order of appearance."""

    rows_K: NDArray[np.int64]
    positions_K: NDArray[np.int64]
    rollouts_K: NDArray[np.int64]
    groups_K: NDArray[np.int64]
    token_ids_K: NDArray[np.int64]
    generator_logprobs_K: NDArray[np.float32]
    advantages_K: NDArray[np.float32]
    temperatures_K: NDArray[np.float32]
    policy_versions_K: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.rows_K)


def trained_tokens(samples: Sequence[Sample]) -> TrainedTokens:
    """The columns of every trained token of the samples, in their order."""
    positions = [np.flatnonzero(sample.mask) for sample in samples]
    counts = [len(p) for p in positions]

    def column(name: str) -> NDArray[np.generic]:
        parts = [getattr(sample, name)[p] for sample, p in zip(samples, positions, strict=True)]
        return np.concatenate(parts) if parts else np.zeros(0)

    def numbered(ids: list[str]) -> NDArray[np.int64]:
        number = {name: i for i, name in enumerate(dict.fromkeys(ids))}
        return np.repeat(np.array([number[name] for name in ids], dtype=np.int64), counts)

    return TrainedTokens(
        rows_K=np.repeat(np.arange(len(samples)), counts),
        positions_K=np.concatenate(positions) if positions else np.zeros(0, np.int64),
        rollouts_K=numbered([sample.rollout_id for sample in samples]),
        groups_K=numbered([sample.group_id for sample in samples]),
        token_ids_K=column("token_ids").astype(np.int64),
        generator_logprobs_K=column("generator_logprobs").astype(np.float32),
        advantages_K=column("advantages").astype(np.float32),
        temperatures_K=column("temperatures").astype(np.float32),
        policy_versions_K=column("policy_versions").astype(np.int32),
    )


def whitened(values_K: NDArray[np.float64]) -> NDArray[np.float64]:
    """Values of mean 0 and variance 1: [1, 0, 0] gives [1.1547, -0.5774, -0.5774]; zeros for fewer than two values.

    Source: `masked_whiten` of verl, the step of REINFORCE++ (arXiv 2501.03262) that needs the batch: the variance is
    the unbiased one, and ε = 1e-8 is added to it.
    """
    if len(values_K) < 2:
        return np.zeros(len(values_K))
    centred_K: NDArray[np.float64] = values_K - values_K.mean()
    deviation: float = np.sqrt(centred_K.var(ddof=1) + 1e-8)
    return centred_K / deviation


def to_go(values_K: NDArray[np.float64], rows_K: NDArray[np.int64], gamma: float = 1.0) -> NDArray[np.float64]:
    """The sum of each token's value and those after it in its row, γ a token: [1, 2, 4] with γ 0.5 gives [3, 4, 4]."""
    found_K = values_K.astype(np.float64)
    for k in range(len(found_K) - 2, -1, -1):
        if rows_K[k] == rows_K[k + 1]:
            found_K[k] += gamma * found_K[k + 1]
    return found_K


def with_whitened_advantages(samples: Sequence[Sample]) -> list[Sample]:
    """The samples with the advantages of all their trained tokens whitened together."""
    return with_advantages(samples, whitened(trained_tokens(samples).advantages_K.astype(np.float64)))


def with_advantages(samples: Sequence[Sample], advantages_K: NDArray[np.float64]) -> list[Sample]:
    """The samples with other advantages of their trained tokens."""
    found, start = [], 0
    for sample in samples:
        advantages, size = np.zeros_like(sample.advantages), int(sample.mask.sum())
        advantages[sample.mask] = advantages_K[start : start + size]
        found.append(replace(sample, advantages=advantages))
        start += size
    return found


def weights_of(tokens: TrainedTokens, weighting: Weighting, sum_constant: int | None = None) -> NDArray[np.float64]:
    """The weight of each trained token's loss, [K], from counts over all of `tokens`."""
    return token_weights(weighting, tokens.rows_K, tokens.rollouts_K, tokens.groups_K, sum_constant=sum_constant)


def mini_batches(groups: set[str], count: int, epochs: int, seed: int, step: int) -> Iterator[set[str]]:
    """The groups of each update of a step: each epoch shuffles all groups and divides them into `count` parts.

    Parts differ by one group at most; with fewer groups than `count` there are fewer parts. The same arguments give
    the same parts: a step that is made again is the same step.
    """
    ids = sorted(groups)
    for epoch in range(epochs):
        # A seed of the document may be negative; numpy's is not.
        order = np.random.default_rng([seed % 2**64, step, epoch]).permutation(len(ids))
        for part in np.array_split(order, max(1, min(count, len(ids)))):
            yield {ids[i] for i in part}
