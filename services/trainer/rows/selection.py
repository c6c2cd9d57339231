"""Selects the groups of a step among those that credit has finished."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from leyden.libs.store import training


@dataclass(frozen=True)
class Selection:
    """Group ids by verdict: too old, trained, or consumed untrained because all their advantages are zero
    (`zero_variance`) or because none of their tokens can be trained, whatever their rewards (`untrainable`).

    `replaced` groups have no variance either; others of the step stand for them. `repeated` groups are demonstrations
    of an earlier pass. All but `stale` stay empty until a step has enough groups.
    """

    stale: list[str]
    trained: list[str]
    zero_variance: list[str]
    untrainable: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether a step can be made."""
        return bool(self.trained or self.zero_variance or self.untrainable or self.repeated)


def select_groups(
    ready: Sequence[training.ReadyGroup],
    *,
    step: int,
    groups_per_step: int,
    max_lag: int,
    every_group: bool = False,
    refills: int = 0,
) -> Selection:
    """Sorts the ready groups by verdict for step `step` (from 1), which improves version step - 1.

    A group is stale if its oldest token was sampled more than `max_lag` versions before that. With a lag of 1, step 3
    trains tokens of versions 1 and 2 and refuses version 0.

    Args: every_group: trains groups without variance too, since a penalty, whitening or a critic moves them; refills:
        the first groups without variance that do not count as groups of the step
    """
    stale = [
        group.group_id
        for group in ready
        if group.min_policy_version is not None and step - 1 - group.min_policy_version > max_lag
    ]
    usable = [group for group in ready if group.group_id not in set(stale)]
    without_variance = [group.group_id for group in usable if group.is_trainable and not group.has_variance]
    replaced = set(without_variance[:refills])
    fresh = [group for group in usable if group.group_id not in replaced][:groups_per_step]
    if len(fresh) < groups_per_step:
        return Selection(stale, [], [])
    last = usable.index(fresh[-1])
    passed = [group.group_id for group in usable[:last] if group.group_id in replaced]
    untrainable = [group.group_id for group in fresh if not group.is_trainable]
    trained = [group.group_id for group in fresh if group.is_trainable and (group.has_variance or every_group)]
    zero_variance = [group.group_id for group in fresh if group.group_id not in {*trained, *untrainable}]
    return Selection(stale, trained, zero_variance, untrainable, passed)


def select_demonstrations(
    ready: Sequence[training.ReadyGroup], uses: Mapping[str, int], *, seed: int, groups_per_step: int
) -> Selection:
    """Selects the groups of a step of supervised fine-tuning: those used least so far, shuffled anew for each pass.

    >>> new = [training.ReadyGroup("c", -1, True)]
    >>> found = select_demonstrations(new, {"a": 1, "b": 2}, seed=0, groups_per_step=2)
    >>> found.trained, found.repeated
    (['c'], ['a'])

    Args: ready: the groups that no step has judged; uses: how many steps used each of the others
    """
    passes = {group.group_id: 0 for group in ready if group.is_trainable} | dict(uses)

    def place(group: str) -> tuple[int, bytes]:
        return passes[group], blake2b(f"{seed}:{passes[group]}:{group}".encode()).digest()

    chosen = sorted(passes, key=place)[:groups_per_step]
    return Selection(
        stale=[],
        trained=[group for group in chosen if group not in uses],
        zero_variance=[],
        untrainable=[group.group_id for group in ready if not group.is_trainable],
        repeated=[group for group in chosen if group in uses],
    )
