"""Engines, pools, recipes and health of the platform."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from leyden.libs.contracts.api.body import Body


class Engine(Body):
    """An engine with the weights that it served at the last poll."""

    url: str
    pool: str
    run_id: str | None
    """The run whose weights it serves."""
    policy: str | None = None
    """The further policy of that run; null for its own model."""
    policy_version: int | None
    state: str
    """`serving`; `updating`: it loads weights; `idle`: it waits for a run; `draining`; `unreachable`."""
    detail: str | None
    updated_at: datetime


class Recipe(Body):
    """Settings that a run's document may begin with."""

    name: str
    purpose: str
    document: dict[str, Any]
    """A part of a run's document."""
    model: str
    """A model that the recipe is sized for."""
    machine: str
    """The smallest machines of one host that hold its trainer and an engine with that model, by arithmetic: GPUs and
    their memory."""


class Pool(Body):
    """Engines that serve one model. One run at a time has them, or several share them, each with a LoRA adapter."""

    name: str
    model_path: str | None
    """Folder of the base model; null: the one in the settings of trainer and gateway."""
    context_length: int | None
    """Tokens of prompt and answer together; null: as many as the model allows."""
    adapters: int | None
    """So many runs share the engines, each with a LoRA adapter; null: one run has them."""
    max_adapter_rank: int | None
    """The largest LoRA rank that the engines take; null: any."""
    embeddings: bool
    """Whether the engines embed: runs name the pool under `embeddings`, and none has its engines."""
    run_ids: list[str]
    """The runs that have the engines."""
    waiting: list[str]
    """The runs that wait for the engines, in order."""
    engines: list[Engine]


class Health(Body):
    """State of the platform."""

    status: Literal["ok", "degraded"]
    database: str
    schema_revision: str | None
    engines: list[Engine]
    queued_rollouts: int
    live_attempts: int
