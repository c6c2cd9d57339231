"""One finding about a run's document."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["cannot", "warns"]
"""`cannot`: the run can never train, and the API refuses it. `warns`: it does not mean what it says, or may not fit."""


@dataclass(frozen=True)
class Judgement:
    """A finding: the path of the field to change, why, and what to write."""

    path: str
    severity: Severity
    reason: str
    remedy: str

    @property
    def message(self) -> str:
        """Reason and remedy in one line."""
        return f"{self.reason}: {self.remedy}"
