"""The flight agent, with intermediate rewards (AIR) dense or sparse, and by each credit rule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from leyden.libs.cli.commands.demo import AIR_WEIGHTS, GAMMA, DemoOptions, dataset_names, run_document, write_tasks
from leyden.libs.cli.local.platform import Options
from leyden.libs.client import Client
from leyden.libs.contracts.api.runs import Run
from leyden.libs.contracts.config import RunConfig
from tests.campaigns.experiments.choices import Choices
from tests.campaigns.experiments.results import Stage
from tests.campaigns.experiments.runs import completed, named

RULES: dict[str, dict[str, Any]] = {
    "identical": {"type": "identical"},
    "equal_split": {"type": "equal_split"},
    "discounted": {"type": "discounted", "gamma": GAMMA},
    "temporal_discount": {"type": "temporal_discount", "gamma": 0.99},
    "own": {"type": "own"},
}
ALPHA = 0.2
"""The explainer's share of a status in a call's own reward."""


class Flight:
    """Trains the demo's agent from the base model."""

    purpose = (
        "The [flight agent](../../examples/flight_agent/README.md) learns to ask its memory first. `dense`: tool calls"
        " that work earn intermediate rewards (AIR); `sparse`: the outcome alone counts."
    )

    def title(self, choices: Choices) -> str:
        """Returns the heading of its page."""
        return f"Flight agent, {choices.air} rewards, credit `{choices.credit}`"

    def page(self, choices: Choices) -> str:
        """Returns the name of its page."""
        return f"flight-{choices.air}-{choices.credit.replace('_', '-')}"

    @contextmanager
    def platform(self, folder: Path, seeds: Sequence[int], choices: Choices, usual: Options) -> Iterator[Options]:
        """Yields the usual options."""
        for seed in seeds:
            write_tasks(folder / f"flight-{seed}", DemoOptions(seed=seed))
        yield usual

    def train(self, client: Client, folder: Path, seed: int, choices: Choices) -> list[Stage]:
        """Returns the runs of a seed, completed."""
        for name, file in zip(dataset_names(seed), ("train.jsonl", "heldout.jsonl"), strict=True):
            client.upload_dataset(name, folder / f"flight-{seed}" / file)
        document = named(f"flight-{seed}", self.document(seed, choices).storable())
        agents = partial(self.agents, client, folder.parent, choices)
        run = completed(client, document["name"], lambda: client.create_run(document), agents)
        return [Stage(run.id, "trained", "base model", has_curve=True)]

    def agents(self, client: Client, home: Path, choices: Choices, run: Run) -> AbstractContextManager[object]:
        """Plays the attempts of the run in its block; the platform does it for this one."""
        return nullcontext()

    def document(self, seed: int, choices: Choices) -> RunConfig:
        """Returns the run's document: the demo's, with another rule or without AIR."""
        options = DemoOptions(
            steps=choices.steps, seed=seed, evaluation_tasks=choices.held_out, agent_python=choices.python
        )
        document = run_document(options).model_dump(mode="json")
        per_call = choices.credit not in ("identical", "equal_split")
        air = {"weights": AIR_WEIGHTS, "failure": 0.0, "null": "nothing"}
        if choices.credit == "own":
            air["alpha"] = ALPHA
        document["credit"] |= {
            "rule": RULES[choices.credit],
            "air": air if choices.air == "dense" else None,
            "baseline": {"type": "mean", "per": "state" if per_call else "rollout"},
        }
        return RunConfig.model_validate(document)
