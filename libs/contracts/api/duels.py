"""Duels: two evaluations of one dataset, whose answers judges compare pair by pair."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import Field

from leyden.libs.contracts.api.body import Body, RequestBody
from leyden.libs.contracts.api.runs import Statistic
from leyden.libs.contracts.config import Reward
from leyden.libs.contracts.conversation import Json

MAX_PAIRS = 5000
"""Pairs of a duel, which one request of at most a mebibyte holds."""


class DuelPair(RequestBody):
    """Two rollouts of one task, one of each evaluation."""

    rollout: str = Field(min_length=1, max_length=200)
    against: str = Field(min_length=1, max_length=200)
    values: dict[str, Annotated[float, Field(ge=0, le=1)] | None] = Field(max_length=100)
    """By component: 1 where `rollout` is better, 0 where it is worse, 0.5 for a tie, null where no judge told."""


class DuelRequest(RequestBody):
    """The judged pairs of two evaluations."""

    evaluation: str = Field(min_length=1, max_length=200)
    """The evaluation whose win rate it is."""
    against: str = Field(min_length=1, max_length=200)
    """Another one of the same dataset, of any run."""
    reward: Reward
    """The judges: each component is a `relative_model`."""
    pairs: list[DuelPair] = Field(min_length=1, max_length=MAX_PAIRS)


class WinRate(Body):
    """The share of pairs that one evaluation wins, ties as halves."""

    component: str
    wins: int
    ties: int
    losses: int
    lost: int
    """Pairs without a value, which are in no rate."""
    rate: Statistic | None
    """With a 95 % interval over tasks; null where no pair has a value."""


class Duel(Body):
    """A stored duel."""

    number: int
    run_id: str
    evaluation_id: str
    version: int | None
    """The version that the evaluation measured."""
    against_id: str
    against_run_id: str | None
    """Null, as `against_version`, where its run is deleted."""
    against_version: int | None
    pairs: int
    rates: list[WinRate]
    """One for each judge, in the order of the document."""
    reward: Json
    given_by: str
    """The name of the token that asked for it."""
    created_at: datetime
