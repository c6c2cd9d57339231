"""Parameters that a run's trained policy samples with in training rollouts, in place of the agent's."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from leyden.libs.contracts.config.document import Document

Dropped = Literal["top_p", "top_k", "min_p", "min_tokens", "penalties", "logit_bias"]
PARAMETERS: dict[Dropped, tuple[str, ...]] = {
    "top_p": ("top_p",),
    "top_k": ("top_k",),
    "min_p": ("min_p",),
    "min_tokens": ("min_tokens",),
    "penalties": ("frequency_penalty", "presence_penalty", "repetition_penalty"),
    "logit_bias": ("logit_bias",),
}
"""The parameters of a request that each word names."""


class Override(Document):
    """The run decides how its trained policy samples in training rollouts. Evaluations sample as the agent asks.

    The record of a call has both: the values asked for, and those sampled with.
    """

    temperature: float | None = Field(default=1.0, gt=0, le=10)
    """In place of the agent's, and of `sampling.temperature`. Null leaves it to the agent."""
    drop: tuple[Dropped, ...] = Field(default=tuple(PARAMETERS), strict=False)
    """Parameters of the agent's calls that are left out, because the trainer cannot reproduce what they do to the
    distribution. `penalties` are `frequency_penalty`, `presence_penalty` and `repetition_penalty`."""

    @property
    def replaced(self) -> tuple[str, ...]:
        """The parameters that the run decides, by their names in requests."""
        return self.dropped if self.temperature is None else ("temperature", *self.dropped)

    @property
    def dropped(self) -> tuple[str, ...]:
        """The parameters that are left out, by their names in requests."""
        return tuple(name for word in self.drop for name in PARAMETERS[word])
