"""Experiments in three runs: solutions of a scripted teacher, a warm start on them, and reinforcement."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from leyden.libs.cli.local.platform import Options
from leyden.libs.cli.settings import EXAMPLES
from leyden.libs.client import Client
from leyden.libs.contracts.api.runs import ResumeRequest, Run
from leyden.libs.contracts.config import RunConfig
from tests.campaigns.experiments.choices import Choices
from tests.campaigns.experiments.results import Stage
from tests.campaigns.experiments.runs import completed, named
from tests.campaigns.experiments.servers import example_server, write_example_tasks

OF_LEARNING = ("sampling", "credit", "algorithm", "optimizer")


@dataclass(frozen=True)
class Taught:
    """Trains the agent in `examples/NAME`.

    Its folder has `run.json`, whose roles cover all calls; `tasks.py --out FOLDER --seed SEED`, which writes
    `train.jsonl` and `heldout.jsonl`; and `teacher.py FILE… --port PORT`, which prints its port and answers chat
    completions with the solutions of the tasks in these files. Both run with the agent's interpreter.

    Args: heading: the title of its page; warm_rate: the learning rate of the warm start; levels: of the tasks, the
        usual one first, which `tasks.py --level LEVEL` knows
    """

    name: str
    heading: str
    purpose: str
    warm_rate: float = 5e-5
    levels: tuple[str, ...] = ()

    def level(self, choices: Choices) -> str | None:
        """Returns the level of the tasks; None where they have none."""
        return choices.level or next(iter(self.levels), None)

    def dataset(self, seed: int, choices: Choices) -> str:
        """Returns the name of a seed's tasks, from which those of its runs derive."""
        return "-".join([self.agent.name, *filter(None, [self.level(choices)]), str(seed)])

    def of_tasks(self, choices: Choices) -> list[str]:
        """Returns further arguments of `tasks.py`."""
        level = self.level(choices)
        return [] if level is None else ["--level", level]

    @property
    def agent(self) -> Path:
        """Returns the agent's folder."""
        return EXAMPLES / self.name

    def title(self, choices: Choices) -> str:
        """Returns the heading of its page."""
        return ", ".join([self.heading, *filter(None, [self.level(choices)])])

    def page(self, choices: Choices) -> str:
        """Returns the name of its page."""
        return "-".join([self.name, *filter(None, [self.level(choices)])]).replace("_", "-")

    @contextmanager
    def platform(self, folder: Path, seeds: Sequence[int], choices: Choices, usual: Options) -> Iterator[Options]:
        """Yields the gateway's provider, which is the teacher of all seeds."""
        folders = [folder / self.dataset(seed, choices) for seed in seeds]
        for seed, made in zip(seeds, folders, strict=True):
            write_example_tasks(choices.interpreter, self.agent, made, seed, *self.of_tasks(choices))
        command = [choices.interpreter, "teacher.py", *(str(made / "train.jsonl") for made in folders), "--port", "0"]
        with example_server(command, self.agent) as url:
            providers = {"GATEWAY_PROVIDERS": json.dumps({"solutions": {"url": url}})}
            yield replace(usual, environment={**usual.environment, "gateway": providers})

    def train(self, client: Client, folder: Path, seed: int, choices: Choices) -> list[Stage]:
        """Returns the runs from the warm start of a seed, completed."""
        dataset = self.dataset(seed, choices)
        for name, file in ((dataset, "train.jsonl"), (f"{dataset}-held-out", "heldout.jsonl")):
            client.upload_dataset(name, folder / dataset / file)
        shown = self._run(client, self.demonstrations(seed, choices))
        warm = self._run(client, self.warm_start(seed, choices, shown.id))
        return [Stage(warm.id, "after the warm start", "base model"), *self.reinforce(client, warm, seed, choices)]

    def reinforce(self, client: Client, warm: Run, seed: int, choices: Choices) -> list[Stage]:
        """Returns the training that continues the warm start, completed."""
        changes = {**self.changes(seed, choices), "parent": warm.id}
        further = named(f"{self.dataset(seed, choices)}-trained", changes)
        request = ResumeRequest(changes={key: value for key, value in further.items() if key != "parent"})
        trained = completed(client, further["name"], lambda: client.continue_run(warm.id, request))
        return [Stage(trained.id, "trained", has_curve=True)]

    def _run(self, client: Client, document: dict[str, Any]) -> Run:
        return completed(client, document["name"], lambda: client.create_run(document))

    def document(self, seed: int, choices: Choices) -> dict[str, Any]:
        """Returns the example's document for a seed."""
        document: dict[str, Any] = json.loads((self.agent / "run.json").read_text())
        command = [choices.python, *document["agent"]["command"][1:]]
        dataset = self.dataset(seed, choices)
        return document | {
            "dataset": dataset,
            "agent": {"command": command, "directory": str(self.agent)},
            "sampling": document["sampling"] | {"seed": seed},
            "training": document["training"] | {"steps": choices.steps},
            "evaluation": {"dataset": f"{dataset}-held-out", "max_tasks": choices.held_out},
        }

    def demonstrations(self, seed: int, choices: Choices) -> dict[str, Any]:
        """Returns the run whose calls the teacher answers, on the tasks of training."""
        document = self.document(seed, choices)
        del document["credit"]
        taught = {
            "roles": [one | {"policy": "teacher"} for one in document["roles"]],
            "policies": {"teacher": {"provider": "solutions"}},
            "train": None,
            "training": {"steps": 0},
            "evaluation": {"dataset": document["dataset"], "max_tasks": choices.solutions, "at_start": False},
        }
        return named(f"{document['dataset']}-solutions", document | taught)

    def warm_start(self, seed: int, choices: Choices, source: str) -> dict[str, Any]:
        """Returns the fine-tuning on the solutions."""
        document = self.document(seed, choices)
        del document["credit"]
        return named(
            f"{document['dataset']}-warm",
            document
            | {
                "recipe": "sft",
                "sampling": {"seed": seed, "groups_per_step": 16},
                "algorithm": {"type": "sft", "runs": [source], "per_task": 1},
                "optimizer": {"learning_rate": self.warm_rate},
                "training": document["training"] | {"steps": choices.warm_steps},
            },
        )

    def changes(self, seed: int, choices: Choices) -> dict[str, Any]:
        """Returns the changes of a warm start that make it a training by the example's document."""
        document = RunConfig.model_validate(self.document(seed, choices)).storable()
        changed = {name: document[name] for name in OF_LEARNING} | {"training": {"steps": choices.steps}}
        # The warm start has measured the version that this begins with.
        return changed | {"evaluation": {"at_start": False, "every": choices.every}}
