"""Evaluations stop a run on the tasks that all of them counted, and not at all where they share none."""

from __future__ import annotations

from typing import Any

import pytest

from leyden.libs.contracts.config import EarlyStopping
from leyden.libs.store.read.best import Measurement
from leyden.services.controller.runs.stopping import stop_reason_of_evaluations


def reason(stopping: dict[str, Any], *evaluations: list[float | None]) -> str | None:
    """Why training ends by evaluations of versions 0, 1, …; of each the mean of its tasks, None for a lost one."""
    measured = [
        Measurement(
            f"e{version}",
            "run",
            version + 1,
            version,
            len(means),
            {n: mean for n, mean in enumerate(means) if mean is not None},
        )
        for version, means in enumerate(evaluations)
    ]
    return stop_reason_of_evaluations(EarlyStopping.model_validate(stopping), measured)


def test_whole_evaluations_decide_as_their_means_do() -> None:
    found = reason({"patience": 2}, [0.1, 0.3], [0.4, 0.6], [0.5, 0.5], [0.3, 0.5], [0.9, 0.9])
    assert found == (
        "stopped early at version 3: the evaluation reward was not better than 0.5 (version 1) for 2 values in a row"
    )
    assert reason({"target": 0.9}, [0.1, 0.3], [1.0, 0.8]) == (
        "stopped early at version 1: the evaluation reward 0.9 reached the target 0.9"
    )
    assert reason({"target": 0.6, "average_over": 2}, [0.5, 0.5], [0.8, 0.8], [0.1, 0.1]) == (
        "stopped early at version 1: the evaluation reward 0.65 reached the target 0.6"
    )


def test_rounding_is_no_progress_and_keeps_no_target_away() -> None:
    shares = 0.7 + 0.2 + 0.1
    assert shares < 1.0
    assert "reached the target 1" in (reason({"target": 1.0}, [shares, shares]) or "")
    assert "not better than 1 (version 0)" in (reason({"patience": 1}, [shares, shares], [1.0, 1.0]) or "")


def test_a_version_whose_hard_tasks_were_lost_is_not_the_better_one() -> None:
    # On the tasks that both counted each version is better than the one before; lost easy tasks looked like a loss.
    assert reason({"patience": 1}, [0.9, 0.9, 0.1, 0.1], [None, None, 0.2, 0.2], [0.9, 0.9, 0.3, 0.3]) is None
    # And lost hard ones like a gain.
    found = reason({"patience": 1}, [0.9, 0.9, 0.1, 0.1], [0.8, 0.8, None, None])
    assert found is not None
    assert "not better than 0.9 (version 0)" in found


@pytest.mark.parametrize("lost", [[None, None, 1.0, None], [None, None, None, None]])
def test_an_evaluation_that_lost_most_of_its_tasks_counts_for_nothing(lost: list[float | None]) -> None:
    assert reason({"patience": 2, "target": 0.9}, [0.5] * 4, lost, [0.4] * 4) is None
    found = reason({"patience": 2, "target": 0.9}, [0.5] * 4, lost, [0.4] * 4, [0.4] * 4)
    assert found is not None
    assert "at version 3" in found


def test_a_target_is_reached_on_all_tasks_alone() -> None:
    assert reason({"target": 0.9}, [0.95, 0.95, None]) is None
    found = reason({"target": 0.9}, [0.95, 0.95, None], [0.95, 0.95, 0.8])
    assert found is not None
    assert "at version 1: the evaluation reward 0.95 reached" in found
    assert reason({"target": 0.9, "average_over": 2}, [0.95, 0.95, None], [0.95, 0.95, 0.95]) is None


def test_evaluations_without_a_common_task_stop_nothing() -> None:
    assert reason({"patience": 1, "target": 0.1}, [0.05, 0.05, None, None], [None, None, 0.0, 0.0], [0.0] * 4) is None


def test_a_later_evaluation_changes_no_decision() -> None:
    stopped = [[0.9, 0.1], [0.8, 0.1]]
    first = reason({"patience": 1}, *stopped)
    assert first is not None
    # On the second task alone, which the last one counted, nothing had become worse.
    assert reason({"patience": 1}, *stopped, [None, 0.9]) == first
    # Nor does one that shrinks the tasks end training at a version before it.
    assert reason({"patience": 1}, [0.1, 0.9], [0.9, 0.8], [None, 0.95]) is None
