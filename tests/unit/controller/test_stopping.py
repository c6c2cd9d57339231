from __future__ import annotations

import pytest

from leyden.libs.contracts.config import EarlyStopping
from leyden.services.controller.runs.stopping import stop_reason


@pytest.mark.parametrize(
    ("stopping", "rewards", "stops_at"),
    [
        ({"target": 0.8}, [0.1, 0.79, 0.8, 0.1], 2),
        ({"target": 0.8}, [], None),
        ({"patience": 2}, [0.1, 0.3, 0.3, 0.2, 0.9], 3),
        ({"patience": 2}, [0.1, 0.3, 0.2, 0.31, 0.2, 0.3], 5),
        ({"patience": 3}, [0.5, 0.4, 0.4], None),
        # One lucky value among low ones reaches no target when three are averaged.
        ({"target": 0.5, "average_over": 3}, [0.1, 0.9, 0.1, 0.5, 0.9], 3),
        ({"target": 0.5, "average_over": 3}, [0.9, 0.9], None),
    ],
)
def test_the_first_value_that_meets_a_condition_decides(
    stopping: dict[str, float], rewards: list[float], stops_at: int | None
) -> None:
    config = EarlyStopping.model_validate({"metric": "train_reward", **stopping})
    values = list(enumerate(rewards))
    reason = stop_reason(config, values)
    if stops_at is None:
        assert reason is None
    else:
        assert reason is not None
        assert reason.startswith(f"stopped early at step {stops_at}: ")
        assert stop_reason(config, values[: stops_at + 1]) == reason
        assert stop_reason(config, values[:stops_at]) is None
