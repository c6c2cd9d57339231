"""The page of an experiment."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tests.campaigns.experiments.results import Seed, shown


def page(title: str, purpose: str, command: str, seeds: Sequence[Seed]) -> str:
    """Returns the page as Markdown."""
    return "\n".join(
        [
            f"# {title}",
            "",
            purpose,
            "",
            f"`{command}` trained it and wrote this page from the store. {_intervals(seeds)}",
            "",
            f"Mean reward on {tasks(seeds)} held-out tasks, one rollout each:",
            "",
            *held_out(seeds),
            "",
            *(line for label in seeds[0].curves for line in _steps(label, seeds)),
            "Seconds from the end of a step to that of the next, in the mean:",
            "",
            *step_seconds(seeds),
            "",
            f"Seconds from the creation of a seed's runs to their ends: {_listed(round(one.seconds) for one in seeds)}."
            f" Runs: {_listed(', '.join(one.runs) for one in seeds)}.",
            "",
        ]
    )


def tasks(seeds: Sequence[Seed]) -> str:
    """Returns how many tasks an evaluation counted, as "38 to 40" where they differ."""
    counts = {count for one in seeds for count in one.tasks}
    return " to ".join(map(str, sorted({min(counts), max(counts)})))


def held_out(seeds: Sequence[Seed]) -> list[str]:
    """Returns the table of evaluations."""
    rows = [[label, *(f"{one.held_out[label]:.2f}" for one in seeds)] for label in seeds[0].held_out]
    means = [shown([one.held_out[label] for one in seeds]) for label in seeds[0].held_out]
    return _table(["policy"], seeds, [[*row, mean] for row, mean in zip(rows, means, strict=True)])


def _steps(label: str, seeds: Sequence[Seed]) -> list[str]:
    return [f"Mean over the training rollouts of each step ({label}):", "", *curve(label, seeds), ""]


def curve(label: str, seeds: Sequence[Seed]) -> list[str]:
    """Returns the table of steps of the runs with this label."""
    rows, curves = [], [one.curves[label] for one in seeds]
    for number in range(max(map(len, curves))):
        values = [one[number] if number < len(one) else None for one in curves]
        rows.append([str(number + 1), *("–" if one is None else f"{one:.2f}" for one in values), shown(values)])
    return _table(["step"], seeds, rows)


def step_seconds(seeds: Sequence[Seed]) -> list[str]:
    """Returns the table of times of steps."""
    by_label = {label: [one.step_seconds[label] for one in seeds] for label in seeds[0].step_seconds}
    rows = [
        [label, *("–" if one is None else f"{one:.2f}" for one in values), shown(values)]
        for label, values in by_label.items()
    ]
    return _table(["run"], seeds, rows)


def _table(first: list[str], seeds: Sequence[Seed], rows: list[list[str]]) -> list[str]:
    head = [*first, *(f"seed {one.seed}" for one in seeds), "mean"]
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def _intervals(seeds: Sequence[Seed]) -> str:
    if len(seeds) == 1:
        error = 0.5 / math.sqrt(min(seeds[0].tasks))
        return (
            "One seed has no interval: these figures show that it runs, and not how much it learns. The standard error"
            f" of a mean over {tasks(seeds)} tasks, of rewards from 0 to 1, is at most {error:.2f}."
        )
    return f"Intervals are Student's t, 95 %, over {len(seeds)} seeds."


def _listed(words: object) -> str:
    return "; ".join(map(str, words))  # type: ignore[call-overload]
