"""What a benchmark tells: a value measured several times, what it stands beside, its goal, and how its cost grows."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Of = Literal["value", "ratio"]


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound on a row's median value, or on its ratio to the baseline; `at_least` and `at_most` in the row's unit."""

    at_least: float | None = None
    at_most: float | None = None
    of: Of = "value"

    def __str__(self) -> str:
        sign, bound = ("≥", self.at_least) if self.at_least is not None else ("≤", self.at_most)
        return f"{sign} {bound:g}{'x' if self.of == 'ratio' else ''}"

    def holds(self, found: float) -> bool:
        """Whether a median keeps the bounds."""
        above = self.at_least is None or found >= self.at_least
        return above and (self.at_most is None or found <= self.at_most)


@dataclass(frozen=True, slots=True)
class Growth:
    """The cost of one unit of work as the work grows.

    Args: of: what grows, such as "clients"; unit: of the cost, such as "ms CPU a call"; sizes: how much work, the
        first being 1x, then usually 4x and 16x; costs: one for each size
    """

    of: str
    unit: str
    sizes: Sequence[float]
    costs: Sequence[float]

    def __post_init__(self) -> None:
        assert len(self.sizes) == len(self.costs) > 1

    @property
    def factor(self) -> float:
        """What a unit costs at the largest size, over what it costs at the smallest."""
        return self.costs[-1] / self.costs[0]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Args: name: the work, and the key by which two recordings are compared; repeats: one value per repeat, in `unit`;
        baseline_name, baseline: what it is measured beside in the same run, one value per repeat and in the same unit,
        repeats alternating with the others'; note: what a reader must know, such as what was checked
    """

    part: str
    name: str
    unit: str
    repeats: Sequence[float]
    baseline_name: str
    baseline: Sequence[float]
    goal: Goal | None = None
    growth: Growth | None = None
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.repeats)

    @property
    def ratio(self) -> float:
        """The medians' ratio, ours over the baseline's."""
        return self.median / statistics.median(self.baseline)

    @property
    def verdict(self) -> bool | None:
        """Whether the goal holds; None without one."""
        if self.goal is None:
            return None
        return self.goal.holds(self.median if self.goal.of == "value" else self.ratio)

    def document(self) -> dict[str, Any]:
        """For bench.json: the fields, and what follows from them."""
        return asdict(self) | {
            "median": self.median,
            "least": min(self.repeats),
            "most": max(self.repeats),
            "baseline_median": statistics.median(self.baseline),
            "ratio": self.ratio,
            "goal": None if self.goal is None else str(self.goal),
            "holds": self.verdict,
        }
