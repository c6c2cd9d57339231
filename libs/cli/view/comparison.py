"""Runs beside each other on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.table import Table

from leyden.libs.cli.view.alarms import alarms_of
from leyden.libs.cli.view.output import (
    Part,
    best_words,
    counted_rollouts,
    format_value,
    heading,
    left_words,
    mean_and_interval,
    steps_words,
    table,
)
from leyden.libs.contracts.api.comparison import Comparison, RunCurve, TaskChange, TaskComparison, whole_evaluations
from leyden.libs.contracts.api.runs import Evaluation, Run

BARS = "▁▂▃▄▅▆▇█"
ROW_CHARACTERS = 60
"""Those of a task's row that a table shows."""


def run_table(runs: Sequence[Run], curves: Mapping[str, RunCurve]) -> Table:
    """Runs below each other. Args: curves: by the ids of runs"""
    rows = [
        (
            run.id,
            run.name,
            run.phase if run.config else f"{run.phase}: {run.reason}",
            steps_words(run.progress),
            left_words(run.progress),
            run.progress.reward_mean,
            sparkline([reward for _, reward in curves[run.id].points]) if run.id in curves else None,
            _held_out(curves[run.id]) if run.id in curves else None,
            best_of(curves[run.id]) if run.id in curves else None,
            ", ".join(dict.fromkeys(one.name for _, one in alarms_of(run))) or None,
            run.created_at,
        )
        for run in runs
    ]
    head = ("run", "name", "phase", "step", "left", "reward", "by step", "held out", "best version", "alarms", "made")
    return table(head, rows)


def _held_out(curve: RunCurve) -> str | None:
    """The mean of the newest version that was measured; None without one."""
    if not curve.held_out:
        return None
    version, reward = curve.held_out[-1]
    return f"{format_value(reward)}, version {version}"


def sparkline(values: Sequence[float | None]) -> str | None:
    """A bar for each value, from the least to the largest; a space for an unknown one, None without any.

    >>> sparkline([0.0, None, 0.5, 1.0])
    '▁ ▅█'
    """
    known = [value for value in values if value is not None]
    if not known:
        return None
    low, span = min(known), max(known) - min(known)
    heights = [None if value is None else (value - low) / span if span else 0.5 for value in values]
    return "".join(" " if one is None else BARS[round(one * (len(BARS) - 1))] for one in heights)


def best_of(curve: RunCurve) -> str:
    """The best version with the reward by which it is the best."""
    if curve.best_version is None:
        return "unknown" if curve.best_version_reason else "none yet"
    of = "held out" if curve.best_reward_of == "evaluations" else "in training"
    return f"{curve.best_version}: {format_value(curve.best_reward)} {of}"


def comparison_parts(found: Comparison) -> Iterator[Part]:
    """Figures of each run in a column, differences of the documents by path, tasks won over the first run, and
    those that changed most."""
    columns = [f"{run.name} ({run.id})" for run in found.runs]
    yield table(("", *columns), list(_figures(found)))
    yield heading("Differences of the documents")
    yield table(
        ("path", *columns), [(one.path, *("–" if v is None else v for v in one.values)) for one in found.differences]
    )
    if found.tasks:
        yield heading(f"Held-out tasks, beside {columns[0]}")
        head = ("run", "dataset", "won", "lost", "same", "difference")
        yield table(head, [_tasks(one, found.runs) for one in found.tasks])
    for one in found.tasks:
        if one.changes:
            other = _column(one, found.runs)
            yield heading(f"Tasks of {one.dataset_id} that changed most from {columns[0]} to {other}")
            yield table(("task", "there", "here", "difference", "row", "rollouts"), list(map(_change, one.changes)))


def _figures(found: Comparison) -> Iterator[tuple[object, ...]]:
    runs = found.runs
    yield ("phase", *(run.phase for run in runs))
    yield ("step", *(steps_words(run.progress, " of ") for run in runs))
    yield ("last reward", *(run.progress.reward_mean for run in runs))
    yield ("held-out reward", *map(held_out_reward, found.evaluations))
    yield ("best version", *map(best_words, runs))
    yield ("dataset", *(run.dataset_id for run in runs))


def held_out_reward(evaluations: Sequence[Evaluation]) -> str | None:
    """The reward of the newest version that the run's own evaluations have measured as a whole."""
    own = [one.results for one in whole_evaluations(evaluations) if one.dataset_id == evaluations[0].dataset_id]
    if not own or (reward := own[-1].reward) is None:
        return None
    words = mean_and_interval(reward, ".3f")
    return words if reward.count == sum(own[-1].rollouts.values()) else f"{words} ({counted_rollouts(own[-1])})"


def _column(one: TaskComparison, runs: Sequence[Run]) -> str:
    """The name and id of the compared run."""
    return f"{next(run.name for run in runs if run.id == one.run_id)} ({one.run_id})"


def _change(one: TaskChange) -> tuple[object, ...]:
    before, after = one.rewards
    row = "its dataset was deleted" if one.text is None else one.text[:ROW_CHARACTERS]
    rollouts = " ".join(rollout or "–" for rollout in one.rollout_ids)
    return (one.number, f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}", row, rollouts)


def _tasks(one: TaskComparison, runs: Sequence[Run]) -> tuple[object, ...]:
    interval = "" if one.low is None or one.high is None else f" [{one.low:+.3f}, {one.high:+.3f}]"
    return (_column(one, runs), one.dataset_id, one.won, one.lost, one.same, f"{one.difference:+.3f}{interval}")
