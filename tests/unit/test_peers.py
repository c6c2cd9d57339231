"""The table of trainings beside each other: a goal that was not reached is never a number of seconds."""

from __future__ import annotations

from tests.campaigns.peers.trained import Trained, table


def test_the_first_step_at_the_goal_counts_and_none_is_said_to_be_none() -> None:
    fast = Trained("ours", 0, (0.1, 0.6, 0.5), (20.0, 41.0, 60.0))
    slow = Trained("theirs", 0, (0.1, 0.2), (30.0, 60.0))
    failed = Trained("broken", 0, (), ())

    assert fast.reached(0.6) == (2, 41.0)
    assert slow.reached(0.6) is None
    assert table([fast, slow, failed], 0.6)[2:] == [
        "| ours | 0 | 41 | 2 | 20 | 10%, 60%, 50% |",
        "| theirs | 0 | not reached | more than 2 | 30 | 10%, 20% |",
        "| broken | 0 | not reached | more than 0 | – |  |",
    ]
