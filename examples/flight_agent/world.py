"""The flight agent's simulated world: one traveller, and three tools with deterministic answers.

Everything follows from the task row, so the same task and the same calls always give the same answers.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

NEXT = "Next tool?"
ANSWER = "Answer the user now."


class ToolError(Exception):
    """A tool could not do what it was asked; `kind` is a short name for the cause, the text is what the model reads."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(frozen=True)
class Task:
    """One row of the dataset: the question that the traveller asks and the facts that only the tools know.

    Prices and the budget are in euros; `departure` is the time of day of the one connection that is affordable.
    """

    question: str
    origin: str
    destination: str
    budget: int
    carrier: str
    departure: str
    price: int

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> "Task":
        """Take the fields of a task out of a row, which may have more.

        Raises: KeyError: a field is missing
        """
        return cls(**{name: row[name] for name in cls.__dataclass_fields__})


@dataclass
class World:
    """The tools of one rollout. Search needs a place of departure, which nobody but memory knows."""

    task: Task
    remembered: bool = field(default=False, init=False)
    found: bool = field(default=False, init=False)

    def tools(self) -> dict[str, Callable[[str], str]]:
        return {"search": self.search, "memory": self.memory, "calculator": self.calculator}

    def memory(self, query: str) -> str:
        """Return the traveller's location and budget, once.

        Raises: ToolError: it was asked before
        """
        if self.remembered:
            raise ToolError("nothing_new", "nothing else is stored.")
        self.remembered = True
        return f"You are in {self.task.origin} and have {self.task.budget} euros."

    def search(self, query: str) -> str:
        """Name the affordable connection from the traveller's place.

        Raises: ToolError: the place of departure is not known, because memory has not been asked
        """
        if not self.remembered:
            raise ToolError("unknown_departure", "unknown place of departure.")
        self.found = True
        return f"{self.task.carrier} leaves {self.task.origin} at {self.task.departure} for {self.task.price} euros."

    def calculator(self, query: str) -> str:
        """Compute the first `a op b` in the query.

        Raises: ToolError: there is none
        """
        match = re.search(r"(\d+(?:\.\d+)?)\s*([-+*/x])\s*(\d+(?:\.\d+)?)", query)
        if match is None or (match[2] == "/" and float(match[3]) == 0):
            raise ToolError("no_expression", "nothing to compute.")
        left, right = float(match[1]), float(match[3])
        value = {"+": left + right, "-": left - right, "*": left * right, "x": left * right}.get(match[2])
        return f"{left / right if value is None else value:g}."
