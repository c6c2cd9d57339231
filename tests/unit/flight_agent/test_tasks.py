import json
import subprocess
import sys
from pathlib import Path

import pytest
import tasks
from world import Task


def triple(task: Task) -> tuple[str, str, str]:
    return task.origin, task.destination, task.carrier


def test_training_and_heldout_tasks_share_no_triple() -> None:
    train, heldout = tasks.make_tasks(seed=3, train=1000, heldout=500)
    assert (len(train), len(heldout)) == (1000, 500)
    assert len({triple(task) for task in train + heldout}) == 1500


def test_a_seed_always_gives_the_same_tasks() -> None:
    assert tasks.make_tasks(1, 8, 8) == tasks.make_tasks(1, 8, 8)
    assert tasks.make_tasks(1, 8, 8) != tasks.make_tasks(2, 8, 8)


def test_every_task_can_be_solved_within_the_budget() -> None:
    train, heldout = tasks.make_tasks(0, 400, 100)
    assert all(task.price < task.budget and task.origin != task.destination for task in train + heldout)
    assert all(task.destination in task.question and task.origin not in task.question for task in train)


def test_more_tasks_than_triples_are_refused() -> None:
    with pytest.raises(ValueError, match="ask for fewer"):
        tasks.make_tasks(0, 7000, 1000)


def test_the_command_writes_rows_that_the_agent_reads(tmp_path: Path) -> None:
    command = [sys.executable, tasks.__file__, "--out", str(tmp_path), "--train", "3", "--heldout", "2"]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    text = (tmp_path / "train.jsonl").read_text() + (tmp_path / "heldout.jsonl").read_text()
    train, heldout = tasks.make_tasks(0, 3, 2)
    assert [Task.from_row(json.loads(line)) for line in text.splitlines()] == train + heldout
