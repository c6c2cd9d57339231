"""A phase of a step that is open for far longer than in earlier steps is an alarm."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import update

from leyden.libs.store import tables
from leyden.libs.store.alarms.phases import OpenPhase, judge_phases
from leyden.libs.store.database import Database
from tests.support import builders
from tests.support.alarms import alarms


class Trained:
    """A run with steps, an hour apart, whose groups wait 2 minutes for credit and 3 for the trainer."""

    def __init__(self, database: Database, run: tables.Run) -> None:
        self.database, self.run, self.now = database, run, datetime.now(tz=UTC)

    def ago(self, minutes: float) -> datetime:
        return self.now - timedelta(minutes=minutes)

    async def group(self, number: int, minutes: float) -> tables.Group:
        """A group whose two attempts begin so many minutes ago, take 2 and 4, and are graded a minute later."""
        times = {"created_at": self.ago(minutes), "finished_at": self.ago(minutes - 5)}
        group, rollouts = await builders.add_group(self.database, self.run, number, state="complete", **times)
        for rollout, took in zip(rollouts, (2, 4), strict=True):
            await builders.finish_rollout(self.database, rollout)
            graded: dict[str, Any] = {"tries": 1, "lease_id": rollout.id, "owner": "g", "total": 1.0}
            times = {"lease_expires_at": self.now, "settled_at": self.ago(minutes - took - 1)}
            async with self.database.session() as session:
                tried = await session.get_one(tables.Attempt, (rollout.id, 1))
                tried.started_at, tried.finished_at = self.ago(minutes), self.ago(minutes - took)
                session.add(tables.Grading(rollout_id=rollout.id, attempt=1, run_id=self.run.id, **graded, **times))
        return group

    async def steps(self, count: int) -> None:
        for number in range(1, count + 1):
            minutes = 60.0 * (count + 2 - number)
            group = await self.group(number, minutes)
            await builders.add_credited_group(self.database, group, created_at=self.ago(minutes - 7))
            times = {"started_at": self.ago(minutes - 8), "created_at": self.ago(minutes - 10)}
            async with self.database.session() as session:
                session.add(tables.Step(run_id=self.run.id, number=number, metrics={}, checkpoint="", **times))
                session.add(tables.StepGroup(group_id=group.id, run_id=self.run.id, step=number, verdict="trained"))

    async def slow(self) -> dict[str | None, dict[str, float | str]]:
        found = await alarms(self.database, self.run.id)
        return {one.subject: one.evidence for one in found.values() if one.name == "phase_slow"}


async def trained(database: Database, steps: int, **document: Any) -> Trained:
    config = builders.run_document(training={"steps": 9}, **document)
    made = Trained(database, await builders.add_run(database, config=config))
    await made.steps(steps)
    async with database.session() as session:
        await session.execute(update(tables.RunStatus).values(updated_at=made.ago(600)))
    return made


async def open_sample(made: Trained, minutes: float) -> str:
    _, (rollout, _) = await builders.add_group(made.database, made.run, 50)
    await builders.add_attempt(made.database, rollout, started_at=made.ago(minutes))
    return rollout.id


async def open_grade(made: Trained, minutes: float) -> str:
    _, (rollout, _) = await builders.add_group(made.database, made.run, 50)
    await builders.add_attempt(made.database, rollout, state="settled", finished_at=made.ago(minutes))
    async with made.database.session() as session:
        (await session.get_one(tables.Rollout, rollout.id)).grading_attempt = 1
    return rollout.id


async def open_credit(made: Trained, minutes: float) -> str:
    return (await made.group(50, minutes + 5)).id


async def open_train(made: Trained, minutes: float) -> str:
    group = await made.group(50, minutes + 7)
    await builders.add_credited_group(made.database, group, created_at=made.ago(minutes))
    return group.id


@pytest.mark.parametrize(
    ("phase", "usual", "begin"),
    [("sample", 4, open_sample), ("grade", 1, open_grade), ("credit", 2, open_credit), ("train", 3, open_train)],
)
async def test_a_phase_that_is_open_for_over_six_times_its_median_is_an_alarm(
    database: Database, phase: str, usual: int, begin: Callable[[Trained, float], Awaitable[str]]
) -> None:
    made = await trained(database, 3)
    assert await made.slow() == {}
    oldest = await begin(made, 6 * usual + 2)
    [(subject, evidence)] = (await made.slow()).items()
    assert (subject, evidence["oldest"], evidence["steps"]) == (phase, oldest, 3)
    assert (evidence["median_seconds"], evidence["limit_seconds"]) == (60 * usual, 360 * usual)
    found = (await alarms(database, made.run.id))[f"phase_slow {phase}"]
    assert found.severity == "warning" and found.remedy
    assert found.reason.endswith(f" s: in the last 3 steps it took {60 * usual:.1f} s (median)")
    async with database.session() as session:
        # Once it is paused, nothing is due.
        await session.execute(update(tables.RunStatus).values(phase="paused"))
    assert await made.slow() == {}


async def test_less_than_three_earlier_steps_raise_nothing(database: Database) -> None:
    made = await trained(database, 2)
    await open_sample(made, 600)
    assert await made.slow() == {}


async def test_grades_of_people_may_take_their_time(database: Database) -> None:
    reward = {"components": [{"name": "person", "from": "feedback"}], "wait": {"seconds": 9e5}}
    made = await trained(database, 3, reward=reward)
    await open_grade(made, 500)
    assert await made.slow() == {}


def test_six_medians_or_a_minute_are_never_slow() -> None:
    phases = {"sample": 360.0, "grade": 361.0, "credit": 59.0, "train": 61.0}
    earlier = {"sample": [60.0, 1.0, 90.0], "grade": [60.0, 1.0, 90.0], "credit": [0.1] * 3, "train": [0.1] * 3}
    found = judge_phases([OpenPhase(phase, "oldest", seconds) for phase, seconds in phases.items()], earlier)
    assert [one.subject for one in found] == ["grade", "train"]
