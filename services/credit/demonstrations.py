"""Demonstrations become samples: every token that the model of a stored rollout wrote trains, with weight 1.

Sampling parameters do not matter here: the loss is the cross-entropy of the tokens, whichever way they were sampled. No
version of the run sampled them, which version -1 says.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from leyden.libs.contracts import untrainable
from leyden.libs.contracts.call_counts import CallCounts, total, why_nothing_trains
from leyden.libs.contracts.config import BrokenDocument, RunConfig
from leyden.libs.contracts.states import GroupVerdict
from leyden.libs.store.demonstrations import DemonstratedGroup, SupervisedRun
from leyden.libs.store.samples import NewGroupCredit, NewSample, SiblingRows
from leyden.services.credit.counts import counts_by_policy
from leyden.services.credit.forest import Forest, call_forest, without_auxiliary_calls
from leyden.services.credit.group import CREDIT_VERSION
from leyden.services.credit.paths import paths
from leyden.services.credit.records import TOKEN, BrokenRecord, Call, Rollout
from leyden.services.credit.rows import rollouts_by_group, sample_row

NO_VERSION = -1
Sources = Mapping[str, RunConfig | BrokenDocument]


def demonstrate(
    run: SupervisedRun, groups: Sequence[DemonstratedGroup], rows: SiblingRows, sources: Sources
) -> tuple[list[NewGroupCredit], list[NewSample]]:
    """The verdicts of some groups for the run, and the samples of those of their rollouts that are demonstrations.

    Args: rows: of the groups; sources: the documents of the groups' runs, by id
    """
    found = [_demonstrated(run, group, rows, sources[group.run_id]) for group in groups]
    return [verdict for verdict, _ in found], [sample for _, samples in found for sample in samples]


def _demonstrated(
    run: SupervisedRun, group: DemonstratedGroup, rows: SiblingRows, source: RunConfig | BrokenDocument
) -> tuple[NewGroupCredit, list[NewSample]]:
    if isinstance(source, BrokenDocument):
        return _verdict(run, group, CallCounts(), f"run {group.run_id}: {source}"), []
    # Models of other pools have tokens of their own.
    others = {role.name: role.policy for role in source.roles if role.policy in source.served_policies}
    try:
        siblings = rollouts_by_group(rows.of(group.rollouts), others).get(group.id, [])
    except BrokenRecord as error:
        return _verdict(run, group, CallCounts(), f"a record is broken: {error}"), []
    rollouts = [replace(one, calls=[_written(call, run.config.train) for call in one.calls]) for one in siblings]
    forests = {one.id: _forest(one, run.config) for one in rollouts}
    samples = [
        sample_row(run.id, group.id, rollout, path)
        for rollout, forest in forests.items()
        for path in paths(forest, {node.call.id: 1.0 for node in forest.nodes})
    ]
    used = {node.call.id: () for forest in forests.values() for node in forest.nodes}
    counts = total(counts_by_policy(rollouts, used).values())
    return _verdict(run, group, counts, None, has_samples=bool(samples)), samples


def _forest(rollout: Rollout, config: RunConfig) -> Forest:
    forest = call_forest(rollout.calls)
    return without_auxiliary_calls(forest) if config.credit.auxiliary_calls == "leave_out" else forest


def _written(call: Call, train: Collection[str] | None) -> Call:
    """The call as text that somebody wrote: no parameters, no log-probabilities and no versions."""
    reason = None if train is None or call.role in train else untrainable.of_role(call.role)
    if call.policy is not None:
        reason = untrainable.of_other_model(call.policy)
    tokens = call.written or call.sampled
    return replace(
        call,
        sampled=tokens,
        trainable=reason is None,
        recorded_reason=reason,
        temperature=1.0,
        masks_forced=False,
        logprobs=bytes(len(tokens)),
        versions=np.full(len(tokens) // TOKEN.itemsize, NO_VERSION, TOKEN).tobytes(),
    )


def _verdict(
    run: SupervisedRun, group: DemonstratedGroup, counts: CallCounts, broken: str | None, *, has_samples: bool = False
) -> NewGroupCredit:
    rewards = np.array(group.rewards, np.float64)
    return NewGroupCredit(
        group_id=group.id,
        run_id=run.id,
        verdict=GroupVerdict.EXCLUDED if broken else GroupVerdict.CREDITED,
        reason=broken or (None if has_samples else why_nothing_trains(counts)),
        credit_version=CREDIT_VERSION,
        counted_siblings=len(rewards),
        has_variance=has_samples,
        min_policy_version=NO_VERSION if has_samples else None,
        reward_mean=float(rewards.mean()),
        reward_std=float(rewards.std()),
        calls=counts.model_dump(),
    )
