"""Two policies of one team: the writer and the checker of the SQL agent, trained together or each alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from leyden.libs.cli.local.platform import Options
from leyden.libs.cli.local.services import SERVICES
from leyden.libs.cli.settings import EXAMPLES
from leyden.libs.client import Client
from leyden.libs.contracts.api.runs import Run
from tests.campaigns.experiments.choices import Choices
from tests.campaigns.experiments.results import Stage
from tests.campaigns.experiments.runs import named, newest
from tests.campaigns.experiments.taught import Taught
from tests.support.engines import engine_process

ROLES = {"writer": ("writer", "rewriter"), "checker": ("checker",)}
"""The roles of each policy."""
POOLS = ("default", "second")


class Coordination(Taught):
    """Trains two policies that begin with the same warm start.

    `together`: one run trains both. `apart`: a run trains the writer beside the frozen checker, a second one the
    checker beside the frozen writer, and a third one, without steps, measures what both have become.
    """

    @property
    def agent(self) -> Path:
        """Returns the folder of the SQL agent."""
        return EXAMPLES / "sql"

    def title(self, choices: Choices) -> str:
        """Returns the heading of its page."""
        return f"{self.heading}, trained {choices.team}"

    def page(self, choices: Choices) -> str:
        """Returns the name of its page."""
        return f"{self.name}-{choices.team}"

    @contextmanager
    def platform(self, folder: Path, seeds: Sequence[int], choices: Choices, usual: Options) -> Iterator[Options]:
        """Yields two pools with an engine of the base model each."""
        model = usual.model_path or bundled_model()
        with super().platform(folder, seeds, choices, usual) as options, ExitStack() as stack:
            urls = [stack.enter_context(engine_process(model, folder / f"engine-{pool}.log")) for pool in POOLS]
            pools = {
                pool: {"model_path": str(model), "engine_urls": [url]} for pool, url in zip(POOLS, urls, strict=True)
            }
            yield replace(
                options,
                environment={**options.environment, "controller": {"CONTROLLER_POOLS": json.dumps(pools)}},
                model_path=model,
                services=tuple(name for name in SERVICES if name != "engine"),
                engine_urls=tuple(urls),
            )

    def document(self, seed: int, choices: Choices) -> dict[str, Any]:
        """Returns the example's document, in which the checker's calls train, too."""
        return super().document(seed, choices) | {"train": None}

    def reinforce(self, client: Client, warm: Run, seed: int, choices: Choices) -> list[Stage]:
        """Returns the runs that begin with the model of the warm start, completed."""
        start = newest(client, warm.id)
        if choices.team == "together":
            return [self._trained(client, self.together(seed, choices, start), "trained")]
        alone = [
            self._trained(client, self.alone(seed, choices, start, policy), f"{policy} trained alone")
            for policy in ROLES
        ]
        both = self._run(client, self.both(seed, choices, *(newest(client, one.run_id) for one in alone)))
        return [*alone, Stage(both.id, "both, each trained alone")]

    def _trained(self, client: Client, document: dict[str, Any], label: str) -> Stage:
        return Stage(self._run(client, document).id, label, has_curve=True)

    def together(self, seed: int, choices: Choices, start: str) -> dict[str, Any]:
        """Returns the run that trains both policies with the advantage of the team."""
        return self._team("together", seed, choices, {"model": start}, checker={"model": start})

    def alone(self, seed: int, choices: Choices, start: str, policy: str) -> dict[str, Any]:
        """Returns the run that trains a policy beside the other one, which stays as it begins."""
        (other,) = ROLES.keys() - {policy}
        own = {"model": start, "train": list(ROLES[policy])}
        return self._team(f"{policy}-alone", seed, choices, own, **{other: {"model": start, "frozen": True}})

    def both(self, seed: int, choices: Choices, writer: str, checker: str) -> dict[str, Any]:
        """Returns the evaluation of two policies that trained apart."""
        own = {"model": writer, "training": {"steps": 0}}
        return self._team("both", seed, choices, own, checker={"model": checker, "frozen": True})

    def _team(
        self, name: str, seed: int, choices: Choices, own: dict[str, Any], **further: dict[str, Any]
    ) -> dict[str, Any]:
        """The run of two policies. Args: own: fields of the run; further: those of the other policy, by its name"""
        document = self.document(seed, choices)
        policy_of = {role: policy for policy in further for role in ROLES[policy]}
        team = {
            "roles": [role | {"policy": policy_of.get(role["name"])} for role in document["roles"]],
            "policies": {policy: {"pool": POOLS[1], **fields} for policy, fields in further.items()},
            # The warm start has measured the model with which both begin.
            "evaluation": document["evaluation"] | {"at_start": False},
        }
        return named(f"{self.name}-{seed}-{name}", document | team | own)


def bundled_model() -> Path:
    """Returns the folder of the platform's usual model, converted where it is not."""
    command = [sys.executable, "-m", "leyden.services.engine.convert"]
    made = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Path(made.stdout.strip().splitlines()[-1])


COORDINATION = Coordination(
    name="coordination",
    heading="Writer and checker of the SQL agent",
    levels=("joins",),
    purpose="The [SQL agent](../../examples/sql/README.md) with two policies: the writer's, which rewrites, too, and"
    " the checker's. Both begin with one warm start on solutions of a scripted teacher, all roles in one model."
    " `together`: both learn in one run, with the advantage of the team. `apart`: each learns alone beside the other"
    " one's beginning, in as many steps on the same tasks; a last run measures the two that came of it.",
)
