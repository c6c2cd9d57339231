"""One row of the benchmark table: a value that was measured several times, and its budget."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Row:
    """Args: values: one per repeat, in `unit`; at_most, at_least: the budget of their median, if it has one"""

    part: str
    work: str
    unit: str
    values: Sequence[float]
    at_most: float | None = None
    at_least: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def budget(self) -> str:
        """The bound in words; empty without one."""
        if self.at_most is not None:
            return f"≤ {self.at_most:,g}"
        return f"≥ {self.at_least:,g}" if self.at_least is not None else ""

    @property
    def is_within(self) -> bool:
        """Whether the median keeps the budget."""
        below = self.at_most is None or self.median <= self.at_most
        return below and (self.at_least is None or self.median >= self.at_least)

    def document(self) -> dict[str, Any]:
        """The row for bench.json."""
        return asdict(self) | {"median": self.median, "budget": self.budget, "is_within": self.is_within}
