"""Learning rates that a run's document leaves out, by the parameters that train."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FULL_RATE, ADAPTER_RATE = 1e-6, 1e-5


def with_rates(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a run's document with a learning rate in place of null: 1e-6 for all weights, 1e-5 for LoRA adapters.

    A policy that takes the run's optimiser gets one of its own where it trains the other kind of parameters.

    >>> with_rates({"training": {"lora": {}}})["optimizer"]
    {'learning_rate': 1e-05}
    """
    training, optimizer = document.get("training", {}), document.get("optimizer", {})
    if not isinstance(training, Mapping) or not isinstance(optimizer, Mapping):
        return document
    found = {**document, "optimizer": _rated(optimizer, training)}
    policies = document.get("policies")
    if isinstance(policies, Mapping):
        run = {**training, "optimizer": optimizer}
        found["policies"] = {name: _rated_policy(one, run) for name, one in policies.items()}
    return found


def _rated(optimizer: Mapping[str, Any], trained: Mapping[str, Any]) -> Mapping[str, Any]:
    rate = FULL_RATE if trained.get("lora") is None else ADAPTER_RATE
    return optimizer if optimizer.get("learning_rate") is not None else {**optimizer, "learning_rate": rate}


def _rated_policy(policy: Any, run: Mapping[str, Any]) -> Any:
    """Args: run: its `lora` and its `optimizer`"""
    if not isinstance(policy, Mapping) or policy.get("frozen") or policy.get("provider"):
        return policy
    own, inherited = policy.get("optimizer"), run["optimizer"]
    differs = (policy.get("lora") is None) != (run.get("lora") is None)
    if own is None and inherited.get("learning_rate") is None and differs:
        own = inherited
    return {**policy, "optimizer": _rated(own, policy)} if isinstance(own, Mapping) else policy
