"""Providers of judges with their prices, and who pays for a judge's call."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from leyden.libs.service.providers import Provider


class Price(BaseModel):
    """The price of a million tokens, in the currency of `reward.judge_cost`.

    Args: prompt: of questions; completion: of answers
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt: float = Field(ge=0, le=1e9, allow_inf_nan=False)
    completion: float = Field(ge=0, le=1e9, allow_inf_nan=False)

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float:
        """Returns the price of a call.

        >>> Price(prompt=0.25, completion=2.0).cost(1_000_000, 500_000)
        1.25
        """
        return (self.prompt * prompt_tokens + self.completion * completion_tokens) / 1e6


class JudgeProvider(Provider):
    """A provider whose models judge. Args: price: null: unknown"""

    price: Price | None = None


@dataclass(frozen=True)
class Payer:
    """The run that a judge's calls are counted for. Args: has_cap: its document bounds their cost"""

    run_id: str
    has_cap: bool = False
