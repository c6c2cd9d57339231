"""The ledger of an attempt: its total, and for each component the row that explains it."""

from __future__ import annotations

from typing import NamedTuple


class NewComponent(NamedTuple):
    """One row of `rollout_rewards` without its keys."""

    component: str
    state: str
    weight: float
    value: float | None
    contribution: float | None
    extracted: str | None
    explanation: str
    source: str
    duration_seconds: float


class Ledger(NamedTuple):
    """A total, or the reason why there is none, with all components in their order."""

    total: float | None
    reason: str | None
    components: tuple[NewComponent, ...]
