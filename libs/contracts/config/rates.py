"""Learning rates that a run's document leaves out, by the parameters that train."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FULL_RATE, ADAPTER_RATE = 1e-6, 1e-5


def usual_rate(lora: object) -> float:
    """The rate of LoRA adapters, or with None that of all weights."""
    return FULL_RATE if lora is None else ADAPTER_RATE


def with_rate(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a run's document with a learning rate in place of null.

    >>> with_rate({"training": {"lora": {}}})["optimizer"]
    {'learning_rate': 1e-05}
    """
    training, optimizer = document.get("training", {}), document.get("optimizer", {})
    if not isinstance(training, Mapping) or not isinstance(optimizer, Mapping):
        return document
    if optimizer.get("learning_rate") is not None:
        return document
    return {**document, "optimizer": {**optimizer, "learning_rate": usual_rate(training.get("lora"))}}
