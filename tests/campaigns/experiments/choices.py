"""The choices of an experiment, and its seam."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from leyden.libs.client import Client
from tests.campaigns.experiments.results import Stage

Air = Literal["dense", "sparse"]


@dataclass(frozen=True)
class Choices:
    """Sizes and variants.

    Args: python: the interpreter of agents; held_out: tasks of an evaluation; warm_steps, solutions: of a warm start;
        level: of the tasks of math
    """

    steps: int = 10
    python: str = "{python}"
    held_out: int = 40
    warm_steps: int = 20
    solutions: int = 96
    air: Air = "dense"
    credit: str = "discounted"
    level: str = "chain_sum"

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

    def model(self, folder: Path) -> Path | None:
        """Returns a model of its own, made in the folder, in place of the platform's."""
        ...

    def environment(
        self, folder: Path, seeds: Sequence[int], choices: Choices
    ) -> AbstractContextManager[dict[str, dict[str, str]]]:
        """Writes tasks into the folder, and holds what services need, with their variables, by service."""
        ...

    def train(self, client: Client, folder: Path, seed: int, choices: Choices) -> list[Stage]:
        """Returns the runs of a seed, completed, in their order."""
        ...
