"""A person's question to a policy that engines serve."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from leyden.libs.contracts.api.body import Body

Words = Annotated[str, Field(max_length=32_000)]


class PlaygroundRequest(Body):
    """One system and one user message, and how to sample the answer."""

    system: Words = ""
    """Empty: none."""
    user: Annotated[Words, Field(min_length=1)]
    temperature: float = Field(default=1.0, ge=0, le=2)
    """0 takes the likeliest tokens. Rollouts have `sampling.temperature` of the run."""
    max_tokens: int = Field(default=512, ge=1, le=2048)
    policy: str | None = Field(default=None, max_length=200)
    """A further policy of the run; null: its own model."""
