"""Decides from a run's rewards whether its training ends early. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from leyden.libs.contracts.config import EarlyStopping

WORDS = {"evaluation_reward": ("evaluation reward", "version"), "train_reward": ("train reward", "step")}


def stop_reason(stopping: EarlyStopping, values: Sequence[tuple[int, float]]) -> str | None:
    """Returns why training ends, in words for users; None while it goes on.

    The first value that meets a condition decides, so later values never change the answer.

    Args: values: versions or steps with the metric's value, in order

    >>> stop_reason(EarlyStopping(patience=2), [(0, 0.1), (10, 0.5), (20, 0.5), (30, 0.4)])
    'stopped early at version 30: the evaluation reward was not better than 0.5 (version 10) for 2 values in a row'
    """
    metric, noun = WORDS[stopping.metric]
    best: tuple[int, float] | None = None
    worse = 0
    for index in range(stopping.average_over - 1, len(values)):
        window = [value for _, value in values[index + 1 - stopping.average_over : index + 1]]
        at, value = values[index][0], sum(window) / len(window)
        if stopping.target is not None and value >= stopping.target:
            return f"stopped early at {noun} {at}: the {metric} {value:.4g} reached the target {stopping.target:.4g}"
        if best is None or value > best[1]:
            best, worse = (at, value), 0
            continue
        worse += 1
        if worse == stopping.patience:
            return (
                f"stopped early at {noun} {at}: the {metric} was not better than {best[1]:.4g} ({noun} {best[0]}) for"
                f" {worse} values in a row"
            )
    return None
