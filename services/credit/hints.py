"""Leaves out groups whose teacher has no hint: the task lacks a field that the hint names.

Without its hint the teacher would judge as the policy does, and an advantage of 0 would say that nothing is to learn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from leyden.libs.contracts.config import RunConfig
from leyden.libs.contracts.placeholders import MissingField
from leyden.services.credit.group import Credited, Excluded


def has_hints(config: RunConfig) -> bool:
    """Whether the teacher of any policy has a hint."""
    teachers = (policy.algorithm.distillation for policy in _policies(config).values())
    return any(teacher is not None and teacher.hint is not None for teacher in teachers)


def only_hinted(result: Credited | Excluded, config: RunConfig, task: Mapping[str, Any]) -> Credited | Excluded:
    """The result without the rows of policies whose hint the task cannot fill, and with the reason of each."""
    if isinstance(result, Excluded):
        return result
    reasons = dict[str | None, str]()
    for name, policy in _policies(config).items():
        try:
            if policy.algorithm.distillation is not None:
                policy.algorithm.distillation.hint_for(task)
        except MissingField as error:
            reasons[name] = f"the teacher has no hint for this task: {error} (algorithm.distillation.hint)"
    if not reasons:
        return result
    samples = {
        rollout: [path for path in paths if path.policy not in reasons] for rollout, paths in result.samples.items()
    }
    return replace(result, samples=samples, left_out=reasons)


def _policies(config: RunConfig) -> dict[str | None, RunConfig]:
    """The document of the run's own model, under None, and of each further policy that trains."""
    found: dict[str | None, RunConfig] = {None: config}
    return found | {name: config.policy_document(name) for name, policy in config.policies.items() if policy.trains}
