"""A person's question to a policy that engines serve."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from leyden.libs.contracts.api.body import Body
from leyden.libs.contracts.conversation import Json

Words = Annotated[str, Field(max_length=32_000)]


class PlaygroundRequest(Body):
    """One system and one user message, the tools, and how to sample the answer."""

    system: Words = ""
    """Empty: none."""
    user: Annotated[Words, Field(min_length=1)]
    temperature: float = Field(default=1.0, ge=0, le=2)
    """0 takes the likeliest tokens. Rollouts have `sampling.temperature` of the run."""
    max_tokens: int = Field(default=512, ge=1, le=2048)
    policy: str | None = Field(default=None, max_length=200)
    """A further policy of the run; null: its own model."""
    version: int | None = Field(default=None, ge=0, le=2**31 - 1)
    """The version that answers, or none does; null: the one that engines serve."""
    tools: Annotated[tuple[Json, ...], Field(max_length=64)] = ()
    """Offered to the model as in chat completions; nobody runs them."""
    seed: int | None = Field(default=None, ge=0, le=2**31 - 1)
    """The same seed, question and version give the same answer, where the engine repeats itself; null: another each
    time."""
