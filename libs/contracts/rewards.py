"""Validates rewards from agents' stdout, the reward endpoint, telemetry and people."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

MAX_REWARD = 1e6
"""Largest magnitude of one reward. Baselines square rewards and subtract them in float32, where 1e6 keeps its units."""

ROUNDING = 1e-9
"""Sums of rewards miss what they are on paper by less: 0.7 + 0.2 + 0.1 is 0.9999999999999999."""

RewardValue = Annotated[float, Field(strict=True, ge=-MAX_REWARD, le=MAX_REWARD, allow_inf_nan=False)]
"""A reward in a request: a JSON number, no text and no boolean."""


def is_reward(value: float) -> bool:
    """Whether the number is finite and within `MAX_REWARD`."""
    return -MAX_REWARD <= value <= MAX_REWARD


def reaches(value: float, bound: float) -> bool:
    """Whether a reward is at least the bound, rounding left out."""
    return value >= bound - ROUNDING


def gain(before: float, after: float) -> float:
    """How much a mean reward rose; 0 within rounding, which depends on the order of its sum."""
    return after - before if abs(after - before) > ROUNDING else 0.0
