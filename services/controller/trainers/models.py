"""The model folders that a run's trainer reads."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from leyden.libs.contracts.config import RunConfig


class TrainerModels(NamedTuple):
    """Args: base: the run's own model, None for the base model of the platform; more: folders of a critic's model, of a
    teacher, and of whatever else the algorithm's document names a model of."""

    base: str | None = None
    more: tuple[str, ...] = ()


def models_of(config: RunConfig, of_pool: Path | None) -> TrainerModels:
    """Args: of_pool: the model of the run's pool, where the pool names one"""
    parts = config.algorithm.model_dump(mode="json").values()
    more = [str(part["model"]) for part in parts if isinstance(part, dict) and part.get("model")]
    base = config.model or (None if of_pool is None else str(of_pool))
    return TrainerModels(base, tuple(more))
