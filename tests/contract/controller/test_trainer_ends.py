"""Ends of trainers in Postgres: counted since the last step, and shown on the run."""

from __future__ import annotations

from datetime import UTC, datetime

from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.libs.store.read import runs
from leyden.libs.store.runs.trainer_ends import StoredEnds, TrainerEnd
from tests.support import builders
from tests.support.alarms import alarms


async def test_ends_are_counted_since_the_last_step_and_shown_on_the_run(database: Database) -> None:
    run, journal = await builders.add_run(database), StoredEnds(database)
    first = TrainerEnd(run.id, 1, "killed", "evicted", "at work\0")
    second = TrainerEnd(run.id, 2, "ended", "exit code 1: no", "no\n")
    assert await journal.last_attempt(run.id) == 0
    await journal.record(first)
    assert [end.attempt for end in await journal.record(second)] == [1, 2]
    # A repeat changes nothing.
    assert [end.reason for end in await journal.record(TrainerEnd(run.id, 2, "ended", "another"))] == [
        "evicted",
        "exit code 1: no",
    ]
    await builders.add_policy_version(database, run, 0)
    async with database.session() as session:
        session.add(tables.Step(run_id=run.id, number=1, metrics={}, checkpoint="/c", started_at=datetime.now(tz=UTC)))
    third = TrainerEnd(run.id, 3, "out_of_memory", "out of memory: give it more", "x" * 30_000)
    assert [end.attempt for end in await journal.record(third)] == [3]
    assert await journal.last_attempt(run.id) == 3
    async with database.read() as session:
        found = await runs.get_run(session, run.id)
    assert found.trainer_ends == 3
    assert found.last_trainer_end is not None
    assert (found.last_trainer_end.attempt, found.last_trainer_end.step) == (3, 1)
    assert len(found.last_trainer_end.output) == 20_000
    alarm = (await alarms(database, run.id))["trainer_ends"]
    assert alarm.reason == "a trainer of the run ended 3 times; the last, after step 1: out of memory: give it more"
    assert alarm.evidence == {"ends": 3, "step": 1, "state": "out_of_memory"}
