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


class JudgeUse(NamedTuple):
    """Tokens that judges used, and their price. Args: unpriced_tokens: those of providers without a price"""

    tokens: int = 0
    cost: float = 0.0
    unpriced_tokens: int = 0

    def plus(self, other: JudgeUse) -> JudgeUse:
        """Returns the sums."""
        return JudgeUse(
            self.tokens + other.tokens, self.cost + other.cost, self.unpriced_tokens + other.unpriced_tokens
        )


class Ledger(NamedTuple):
    """A total, or the reason why there is none, with all components in their order."""

    total: float | None
    reason: str | None
    components: tuple[NewComponent, ...]
