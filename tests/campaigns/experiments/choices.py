"""The choices of an experiment, and its seam."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from leyden.libs.cli.local.platform import Options
from leyden.libs.client import Client
from tests.campaigns.experiments.results import Stage

Air = Literal["dense", "sparse"]
Team = Literal["together", "apart"]
Guard = Literal["none", "brief", "kl"]
Place = Literal["notebook", "service"]


@dataclass(frozen=True)
class Choices:
    """Sizes and variants.

    Args: python: the interpreter of agents; held_out: tasks of an evaluation; every: steps from one to the next of
        math, rag and sql, None for the first and the last alone; warm_steps, solutions: of a warm start; level: of the
        tasks of math and sql, None for the usual one; team: how writer and checker of coordination train; guard: of
        open-ended against hacking its judge; lag: versions by which tokens of disaggregation may be old; client: the
        place of the agent of external
    """

    steps: int = 10
    python: str = "{python}"
    held_out: int = 40
    every: int | None = None
    warm_steps: int = 6
    solutions: int = 96
    air: Air = "dense"
    credit: str = "discounted"
    level: str | None = None
    team: Team = "together"
    guard: Guard = "none"
    lag: int = 1
    client: Place = "notebook"

    @property
    def interpreter(self) -> str:
        """Returns the interpreter for scripts beside an agent: the agent's, or ours where that is the runner's."""
        return sys.executable if self.python == Choices.python else self.python


class Experiment(Protocol):
    """Trains one seed after another on one platform."""

    @property
    def purpose(self) -> str:
        """Returns the first paragraph of its page."""
        ...

    def title(self, choices: Choices) -> str:
        """Returns the heading of its page."""
        ...

    def page(self, choices: Choices) -> str:
        """Returns the name of its page."""
        ...

    def platform(
        self, folder: Path, seeds: Sequence[int], choices: Choices, usual: Options
    ) -> AbstractContextManager[Options]:
        """Writes tasks into the folder, and holds the servers that the platform needs, with its options."""
        ...

    def train(self, client: Client, folder: Path, seed: int, choices: Choices) -> list[Stage]:
        """Returns the runs of a seed, completed, in their order."""
        ...
