"""The flight agent by turns or at once: agents and engine wait for the trainer, or work while it computes."""

from __future__ import annotations

from leyden.libs.contracts.config import RunConfig
from tests.campaigns.experiments.choices import Choices
from tests.campaigns.experiments.flight import Flight


class Disaggregation(Flight):
    """Trains the flight agent with a bound on the age of tokens, `sampling.max_policy_lag`."""

    purpose = (
        "Trainer, engine and agents are separate processes in every run: the platform has no mode with all of them in"
        " one process group, and none is compared here. This page compares the two ways to use them, by the [flight"
        " agent](../../examples/flight_agent/README.md). `--lag 0`: agents and engine wait while the trainer makes a"
        " step, and it waits while they work, as in one process group that takes turns. `--lag 1` and more: they"
        " sample groups of the next steps meanwhile, with tokens that are at most so many versions old. On one machine"
        " both sides share its cores, and the seconds of a step show what overlap is worth there; with devices of"
        " their own for trainer and engine it is worth more. The curves show what older tokens cost."
    )

    def title(self, choices: Choices) -> str:
        """Returns the heading of its page."""
        return f"Steps by turns and at once, lag {choices.lag}"

    def page(self, choices: Choices) -> str:
        """Returns the name of its page."""
        return f"disaggregation-lag-{choices.lag}"

    def document(self, seed: int, choices: Choices) -> RunConfig:
        """Returns the run's document: that of the flight agent, with the lag."""
        document = super().document(seed, choices)
        sampling = document.sampling.model_copy(update={"max_policy_lag": choices.lag})
        return document.model_copy(update={"sampling": sampling})
