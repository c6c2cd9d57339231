"""One training until its goal, and the table of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Trained:
    """One seed of one trainer.

    Args: curve: mean reward of the rollouts of each step; seconds: from the start to the end of each step
    """

    trainer: str
    seed: int
    curve: tuple[float, ...]
    seconds: tuple[float, ...]

    def reached(self, goal: float) -> tuple[int, float] | None:
        """Returns the first step (from 1) at the goal and its seconds; None where no step is."""
        return next(
            (
                (number, seconds)
                for number, (reward, seconds) in enumerate(zip(self.curve, self.seconds, strict=True), 1)
                if reward >= goal
            ),
            None,
        )


def table(all_trained: Sequence[Trained], goal: float) -> list[str]:
    """Returns the rows of the page, as Markdown."""
    head = ["trainer", "seed", f"seconds to {goal:.0%}", "steps to it", "seconds a step", "success of each step"]
    rows = []
    for one in all_trained:
        reached = one.reached(goal)
        rows.append(
            [
                one.trainer,
                str(one.seed),
                f"{reached[1]:.0f}" if reached else "not reached",
                str(reached[0]) if reached else f"more than {len(one.curve)}",
                f"{one.seconds[-1] / len(one.seconds):.0f}" if one.seconds else "–",
                ", ".join(f"{reward:.0%}" for reward in one.curve),
            ]
        )
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
