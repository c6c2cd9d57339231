"""Text to SQL: solutions of a scripted teacher, a warm start on them, and reinforcement."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from leyden.libs.cli.settings import EXAMPLES
from leyden.libs.client import Client
from leyden.libs.contracts.api.runs import ResumeRequest, Run
from leyden.libs.contracts.config import RunConfig
from tests.campaigns.experiments.choices import Choices
from tests.campaigns.experiments.results import Stage
from tests.campaigns.experiments.runs import completed, named

AGENT = EXAMPLES / "sql"
WARM_RATE = 5e-5
OF_LEARNING = ("sampling", "credit", "algorithm", "optimizer")


class Sql:
    """Trains writer and rewriter of the agent in `examples/sql`; its checker stays context."""

    purpose = (
        "The [SQL agent](../../examples/sql/README.md) writes queries for an excerpt of Chinook. A model that finds no"
        " query learns nothing from rewards of 0: a warm start on solutions of a scripted teacher comes first."
    )

    def title(self, choices: Choices) -> str:
        """Returns the heading of its page."""
        return "Text to SQL, LangGraph"

    def page(self, choices: Choices) -> str:
        """Returns the name of its page."""
        return "sql"

    @contextmanager
    def environment(self, folder: Path, seeds: Sequence[int], choices: Choices) -> Iterator[dict[str, dict[str, str]]]:
        """Yields the gateway's provider, which is the teacher of all seeds."""
        for seed in seeds:
            command = [sys.executable, "tasks.py", "--out", str(folder / f"sql-{seed}"), "--seed", str(seed)]
            subprocess.run(command, cwd=AGENT, check=True)
        files = [str(folder / f"sql-{seed}" / "train.jsonl") for seed in seeds]
        command = [sys.executable, "teacher.py", *files, "--port", "0"]
        with subprocess.Popen(command, cwd=AGENT, stdout=subprocess.PIPE, text=True) as teacher:
            assert teacher.stdout is not None
            try:
                url = f"http://127.0.0.1:{int(teacher.stdout.readline())}/v1"
                yield {"gateway": {"GATEWAY_PROVIDERS": json.dumps({"solutions": {"url": url}})}}
            finally:
                teacher.terminate()

    def train(self, client: Client, folder: Path, seed: int, choices: Choices) -> list[Stage]:
        """Returns warm start and training of a seed, completed."""
        for name, file in ((f"sql-{seed}", "train.jsonl"), (f"sql-{seed}-held-out", "heldout.jsonl")):
            client.upload_dataset(name, folder / f"sql-{seed}" / file)
        shown = self._run(client, demonstrations(seed, choices))
        warm = self._run(client, warm_start(seed, choices, shown.id))
        further = named(f"sql-{seed}-trained", {**changes(seed, choices), "parent": warm.id})
        request = ResumeRequest(changes={key: value for key, value in further.items() if key != "parent"})
        trained = completed(client, further["name"], lambda: client.continue_run(warm.id, request))
        return [Stage(warm.id, "after the warm start", "base model"), Stage(trained.id, "trained")]

    def _run(self, client: Client, document: dict[str, Any]) -> Run:
        return completed(client, document["name"], lambda: client.create_run(document))


def run_document(seed: int, choices: Choices) -> dict[str, Any]:
    """Returns the example's document for a seed."""
    document: dict[str, Any] = json.loads((AGENT / "run.json").read_text())
    command = [choices.python, *document["agent"]["command"][1:]]
    return document | {
        "dataset": f"sql-{seed}",
        "agent": {"command": command, "directory": str(AGENT)},
        "sampling": document["sampling"] | {"seed": seed},
        "training": document["training"] | {"steps": choices.steps},
        "evaluation": {"dataset": f"sql-{seed}-held-out", "max_tasks": choices.held_out},
    }


def demonstrations(seed: int, choices: Choices) -> dict[str, Any]:
    """Returns the run whose calls the teacher answers, on the tasks of training."""
    document = run_document(seed, choices)
    taught = {
        "roles": [one | {"policy": "teacher"} for one in document["roles"]],
        "policies": {"teacher": {"provider": "solutions"}},
        "train": None,
        "training": {"steps": 0},
        "evaluation": {"dataset": f"sql-{seed}", "max_tasks": choices.solutions},
    }
    return named(f"sql-{seed}-solutions", document | taught)


def warm_start(seed: int, choices: Choices, source: str) -> dict[str, Any]:
    """Returns the fine-tuning on the solutions."""
    document = run_document(seed, choices)
    del document["credit"]
    return named(
        f"sql-{seed}-warm",
        document
        | {
            "recipe": "sft",
            "sampling": {"seed": seed, "groups_per_step": 16},
            "algorithm": {"type": "sft", "runs": [source], "per_task": 1},
            "optimizer": {"learning_rate": WARM_RATE},
            "training": document["training"] | {"steps": choices.warm_steps},
        },
    )


def changes(seed: int, choices: Choices) -> dict[str, Any]:
    """Returns the changes of a warm start that make it a training by the example's document."""
    document = RunConfig.model_validate(run_document(seed, choices)).storable()
    return {name: document[name] for name in OF_LEARNING} | {"training": {"steps": choices.steps}}
