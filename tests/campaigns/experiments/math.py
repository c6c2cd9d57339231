"""Mathematics by a calculator, in AutoGen: by levels, with intermediate rewards (AIR) and without."""

from __future__ import annotations

from typing import Any

from tests.campaigns.experiments.choices import Choices
from tests.campaigns.experiments.taught import Taught


class Math(Taught):
    """Trains the agent in `examples/math`, with AIR and without."""

    def title(self, choices: Choices) -> str:
        """Returns the heading of its page."""
        return f"{super().title(choices)}, {choices.air} rewards"

    def page(self, choices: Choices) -> str:
        """Returns the name of its page."""
        return f"{super().page(choices)}-{choices.air}"

    def document(self, seed: int, choices: Choices) -> dict[str, Any]:
        """Returns the example's document for a seed, with or without AIR."""
        document = super().document(seed, choices)
        if choices.air == "sparse":
            document["credit"]["air"] = None
        return document


MATH = Math(
    name="math",
    heading="Mathematics, AutoGen",
    levels=("chain_sum", "leg_counting", "gsm_symbolic"),
    purpose="The [math agent](../../examples/math/README.md) answers problems of `reasoning-gym` with a calculator. A"
    " model that calls no tool learns nothing from rewards of 0: a warm start on solutions of a scripted teacher comes"
    " first. `dense`: calculations that work earn intermediate rewards (AIR); `sparse`: the answer alone counts.",
)
