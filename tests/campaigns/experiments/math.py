"""Mathematics by a calculator, in AutoGen: by levels, with intermediate rewards (AIR) and without."""

from __future__ import annotations

from typing import Any

from tests.campaigns.experiments.choices import Choices
from tests.campaigns.experiments.taught import Taught

LEVELS = ("chain_sum", "leg_counting", "gsm_symbolic")


class Math(Taught):
    """Trains the agent in `examples/math` on the tasks of one level."""

    def dataset(self, seed: int, choices: Choices) -> str:
        """Returns the name of a seed's tasks of this level."""
        return f"{self.name}-{choices.level}-{seed}"

    def of_tasks(self, choices: Choices) -> list[str]:
        """Returns the level."""
        return ["--level", choices.level]

    def title(self, choices: Choices) -> str:
        """Returns the heading of its page."""
        return f"{self.heading}, {choices.level}, {choices.air} rewards"

    def page(self, choices: Choices) -> str:
        """Returns the name of its page."""
        return f"{self.name}-{choices.level.replace('_', '-')}-{choices.air}"

    def document(self, seed: int, choices: Choices) -> dict[str, Any]:
        """Returns the example's document for a seed, with or without AIR."""
        document = super().document(seed, choices)
        if choices.air == "sparse":
            document["credit"]["air"] = None
        return document


MATH = Math(
    name="math",
    heading="Mathematics, AutoGen",
    purpose="The [math agent](../../examples/math/README.md) answers problems of `reasoning-gym` with a calculator. A"
    " model that calls no tool learns nothing from rewards of 0: a warm start on solutions of a scripted teacher comes"
    " first. `dense`: calculations that work earn intermediate rewards (AIR); `sparse`: the answer alone counts.",
)
