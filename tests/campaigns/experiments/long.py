"""Twenty calls of which the first decides, by each way of credit, with a tiny random model."""

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
from tests.campaigns.experiments.choices import Choices
from tests.campaigns.experiments.results import Stage
from tests.campaigns.experiments.runs import completed, named
from tests.support.tiny_model import make_tiny_model

AGENT = EXAMPLES / "long"
ARM, TASKS = "0", 200
DATASETS = ("long", "long-held-out")
BY_CALL = {"per": "call", "gamma": 1.0, "gae_lambda": 0.95, "learning_rate": 0.03, "value_clip": None}
"""The critic of `tests/bench/value_credit.py`."""
CREDITS: dict[str, dict[str, Any]] = {
    "identical": {"credit": {"rule": {"type": "identical"}}},
    "undiscounted": {"credit": {"rule": {"type": "discounted", "gamma": 1.0}}},
    "discounted": {"credit": {"rule": {"type": "discounted", "gamma": 0.95}}},
    "monte_carlo": {
        "credit": {"rule": {"type": "identical"}, "baseline": {"type": "monte_carlo", "calls": 4, "samples": 2}}
    },
    "value": {"credit": {"baseline": {"type": "value"}}, "algorithm": {"type": "ppo_clip", "critic": BY_CALL}},
}


class Long:
    """Trains the agent in `examples/long` from a tiny random model: its letters are as good as any."""

    purpose = (
        "The [long agent](../../examples/long/README.md) makes twenty calls, and the first one alone decides its"
        " reward. A tiny random model answers: one arm of four is right, so that it begins near 0.3."
    )

    def title(self, choices: Choices) -> str:
        """Returns the heading of its page."""
        return f"Twenty calls, the first decides, credit `{choices.credit}`"

    def page(self, choices: Choices) -> str:
        """Returns the name of its page."""
        return f"long-{choices.credit}"

    @contextmanager
    def platform(self, folder: Path, seeds: Sequence[int], choices: Choices, usual: Options) -> Iterator[Options]:
        """Yields a tiny random model; all seeds have the same tasks."""
        rows = [{"question": f"{number}: which arm?", "arm": ARM} for number in range(2 * TASKS)]
        for name, found in ((DATASETS[0], rows[:TASKS]), (DATASETS[1], rows[TASKS:])):
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
        yield replace(usual, model_path=make_tiny_model(folder / "tiny"))

    def train(self, client: Client, folder: Path, seed: int, choices: Choices) -> list[Stage]:
        """Returns the run of a seed, completed."""
        for name in DATASETS:
            client.upload_dataset(name, folder / f"{name}.jsonl")
        document = named(f"long-{choices.credit}-{seed}", self.document(seed, choices))
        run = completed(client, document["name"], lambda: client.create_run(document))
        return [Stage(run.id, "trained", "base model", has_curve=True)]

    def document(self, seed: int, choices: Choices) -> dict[str, Any]:
        """Returns the example's document with a way of credit."""
        document: dict[str, Any] = json.loads((AGENT / "run.json").read_text())
        command = [choices.python, *document["agent"]["command"][1:]]
        return document | {
            "agent": {"command": command, "directory": str(AGENT)},
            "sampling": document["sampling"] | {"seed": seed},
            "training": document["training"] | {"steps": choices.steps},
            "evaluation": document["evaluation"] | {"max_tasks": choices.held_out},
            **CREDITS[choices.credit],
        }
