"""Text to SQL, in LangGraph: its writer and rewriter train, and its checker stays context."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from leyden.libs.client import Client
from tests.campaigns.experiments.choices import Choices
from tests.campaigns.experiments.results import Stage
from tests.campaigns.experiments.runs import named, newest
from tests.campaigns.experiments.taught import Taught


class Sql(Taught):
    """Trains on one database, and measures each version on another one as well."""

    def train(self, client: Client, folder: Path, seed: int, choices: Choices) -> list[Stage]:
        """Returns the runs from the warm start of a seed, and those without steps on the other database, completed."""
        stages = super().train(client, folder, seed, choices)
        name = self.elsewhere_dataset(seed, choices)
        client.upload_dataset(name, folder / self.dataset(seed, choices) / "elsewhere.jsonl")
        models = {"base model": None} | {one.label: newest(client, one.run_id) for one in stages}
        found = {label: self._run(client, self.elsewhere(seed, choices, model)) for label, model in models.items()}
        return [*stages, *(Stage(run.id, f"{label}, another database") for label, run in found.items())]

    def elsewhere_dataset(self, seed: int, choices: Choices) -> str:
        """Returns the name of the tasks on the other database."""
        return f"{self.dataset(seed, choices)}-elsewhere"

    def elsewhere(self, seed: int, choices: Choices, model: str | None) -> dict[str, Any]:
        """Returns the evaluation of a model on the other database. Args: model: None is the pool's"""
        document = self.document(seed, choices)
        name = self.elsewhere_dataset(seed, choices)
        changes = {
            "evaluation": document["evaluation"] | {"dataset": name, "at_start": False},
            "training": {"steps": 0},
        }
        return named(name, document | changes | ({} if model is None else {"model": model}))


SQL = Sql(
    name="sql",
    heading="Text to SQL, LangGraph",
    levels=("one_table", "joins"),
    purpose="The [SQL agent](../../examples/sql/README.md) writes queries for an excerpt of Chinook. A model that finds"
    " no query learns nothing from rewards of 0: a warm start on solutions of a scripted teacher comes first. Each"
    " version answers questions about another database as well, of which training shows nothing.",
)
