"""A call in a sample's row: the credit worker writes it into `samples.calls`, and the trainer's critic reads it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class RowCall:
    """A call that a row trains.

    begin, end: its first and last trained token in the row; parent: the trained call that it continues, by id; reward:
    what it earned before the calls that continue it; share: the weight of its return in that of its parent.
    """

    id: str
    parent: str | None
    reward: float
    share: float
    begin: int = 0
    end: int = 0
