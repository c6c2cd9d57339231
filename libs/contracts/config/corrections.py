"""How a loss corrects for tokens that another policy, or the engine, has sampled."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from leyden.libs.contracts.config.document import Document


class BypassCorrection(Document):
    """π_x = μ: the ratio is taken to the engine's own log-probabilities; one forward pass."""

    type: Literal["bypass"] = "bypass"


_WEIGHT_BOUNDS = {
    "tis_token": (0.0, 2.0),
    "tis_seq": (0.0, 2.0),
    "icepop": (0.5, 5.0),
    "mis_geo": (0.99, 1.01),
    "seq_mask": (0.0, 3.0),
}


class DecoupledCorrection(Document):
    """π_x recomputed by the trainer at the step's start; importance weights correct for the sampler."""

    type: Literal["decoupled"] = "decoupled"
    weights: Literal["tis_token", "tis_seq", "icepop", "mis_geo", "seq_mask"] = "tis_token"
    """The weight of a token from π_old / μ. `tis_token`: the token's ratio, at most `cap`. `tis_seq`: the product over
    its row, at most `cap`. `icepop`: the token's ratio, 0 outside [`floor`, `cap`]. `seq_mask`: the product over its
    row, 0 above `cap`. `mis_geo`: 1, and 0 where the row's geometric mean is outside [`floor`, `cap`]."""
    cap: float | None = Field(default=None, gt=0, le=1e6)
    """C, the upper bound; null for 2 with `tis_token` and `tis_seq`, 5 with `icepop`, 1.01 with `mis_geo`, 3 with
    `seq_mask`."""
    floor: float | None = Field(default=None, gt=0, le=1e6)
    """The lower bound of `icepop` and `mis_geo`; null for 0.5 and 0.99."""

    @property
    def bounds(self) -> tuple[float, float]:
        """The lower and the upper bound of `weights`."""
        low, high = _WEIGHT_BOUNDS[self.weights]
        return low if self.floor is None else self.floor, high if self.cap is None else self.cap

    @model_validator(mode="after")
    def _bounds_are_a_band(self) -> DecoupledCorrection:
        low, high = self.bounds
        if self.floor is not None and self.weights not in {"icepop", "mis_geo"}:
            raise ValueError(f"floor has no effect with weights '{self.weights}': remove it, or write weights 'icepop'")
        if low >= high:
            raise ValueError(f"floor {low} is not below cap {high}: lower floor, or raise cap")
        return self


Correction = Annotated[BypassCorrection | DecoupledCorrection, Field(discriminator="type")]
