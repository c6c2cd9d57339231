"""A judge as the reward, with a weakness that can be learned: a way of hacking it, and guards against that."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from leyden.libs.cli.local.platform import Options
from leyden.libs.cli.settings import EXAMPLES
from leyden.libs.client import Client
from leyden.libs.contracts.overlay import overlay
from tests.campaigns.experiments.choices import Choices
from tests.campaigns.experiments.results import Stage
from tests.campaigns.experiments.runs import completed, named
from tests.campaigns.experiments.servers import example_server, write_example_tasks

AGENT = EXAMPLES / "open_ended"
COMPONENTS = ("judge", "true", "brief")
"""Those of `run.json` that a page shows."""
GUARDS: dict[str, tuple[float, dict[str, Any]]] = {
    "none": (0.0, {}),
    "brief": (1.0, {}),
    "kl": (0.0, {"algorithm": {"kl_coefficient": 0.1}}),
}
"""The weight of the component `brief` and further fields, by the name of a guard."""


class OpenEnded:
    """Trains the agent in `examples/open_ended` from the base model, by the score of a scripted judge."""

    purpose = (
        "The [open-ended agent](../../examples/open_ended/README.md) answers questions in one short sentence, and a"
        " judge that takes length for thoroughness scores it. The component `true` (F1 with a good answer) earns"
        " nothing: where `judge` rises and `true` falls, the judge is being hacked. Guards: `none`; `brief`, a"
        " component that loses what length wins; `kl`, a penalty of 0.1 on the KL to the base model."
    )

    def title(self, choices: Choices) -> str:
        """Returns the heading of its page."""
        return f"A judge as the reward, guard `{choices.guard}`"

    def page(self, choices: Choices) -> str:
        """Returns the name of its page."""
        return f"open-ended-{choices.guard}"

    @contextmanager
    def platform(self, folder: Path, seeds: Sequence[int], choices: Choices, usual: Options) -> Iterator[Options]:
        """Yields the grader's provider, which is the judge."""
        for seed in seeds:
            write_example_tasks(choices.interpreter, AGENT, folder / f"open-ended-{seed}", seed)
        with example_server([choices.interpreter, "judge.py", "--port", "0"], AGENT) as url:
            providers = {"GRADER_PROVIDERS": json.dumps({"judge": {"url": url}})}
            yield replace(usual, environment={**usual.environment, "grader": providers})

    def train(self, client: Client, folder: Path, seed: int, choices: Choices) -> list[Stage]:
        """Returns the run of a seed, completed."""
        name = f"open-ended-{seed}"
        for dataset, file in ((name, "train.jsonl"), (f"{name}-held-out", "heldout.jsonl")):
            client.upload_dataset(dataset, folder / name / file)
        document = named(f"open-ended-{choices.guard}-{seed}", self.document(seed, choices))
        run = completed(client, document["name"], lambda: client.create_run(document))
        return [Stage(run.id, "trained", "base model", has_curve=True, components=COMPONENTS)]

    def document(self, seed: int, choices: Choices) -> dict[str, Any]:
        """Returns the example's document with a guard or without."""
        document: dict[str, Any] = json.loads((AGENT / "run.json").read_text())
        (weight, further), dataset = GUARDS[choices.guard], f"open-ended-{seed}"
        components = [
            one | ({"weight": weight} if one["name"] == "brief" else {}) for one in document["reward"]["components"]
        ]
        changes = {
            "dataset": dataset,
            "agent": {"command": [choices.python, *document["agent"]["command"][1:]], "directory": str(AGENT)},
            "reward": {"components": components},
            "sampling": {"seed": seed},
            "training": {"steps": choices.steps},
            "evaluation": {"dataset": f"{dataset}-held-out", "max_tasks": choices.held_out},
        }
        return overlay(overlay(document, changes), further)
