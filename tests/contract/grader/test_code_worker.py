"""Attempts that the operator's own code grades, on Postgres: its document, its retries, and lanes that do not wait."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select

from leyden.libs.contracts.api.rollouts import Graded
from leyden.libs.contracts.config import Reward
from leyden.libs.service import Checks
from leyden.libs.store import tables
from leyden.libs.store.attempts import AttemptKey
from leyden.libs.store.database import Database
from leyden.libs.store.read.trajectory.conversations import conversations_of
from leyden.libs.store.runs.grading import Lane, lease_gradings
from leyden.libs.store.runs.trials import TrialFailed, graded_by_trial
from leyden.services.grader.worker import work
from tests.contract.grader.test_worker import (
    F1,
    FORMAT,
    add_ungraded,
    grading,
    gradings,
    rewards,
    settings_of,
    settled,
)
from tests.support import builders
from tests.support.waiting import eventually


def command(script: str, **fields: Any) -> dict[str, Any]:
    return {"type": "command", "command": ["{python}", "-I", "-S", "-c", script], **fields}


def of_code(tmp_path: Path) -> dict[str, Any]:
    return {"work_folder": tmp_path / "work", "code_user": "same", "code_roots": [tmp_path / "graders"]}


async def test_a_program_gets_the_stored_attempt(database: Database, redis_url: str, tmp_path: Path) -> None:
    script = """
import json, sys
d = json.load(sys.stdin)
said = [turn["content"] for one in d["rollout"]["conversations"] for turn in one["turns"]]
print(json.dumps({"reward": 0.5, "explanation": json.dumps([d["task"], d["rollout"]["output"], said])}))
"""
    run, (rollout,) = await add_ungraded(
        database, {"name": "mine", "grader": command(script)}, FORMAT, outputs=["words"]
    )
    first = await builders.add_call(database, rollout, **turns("hello", answer="hi"))
    await builders.add_call(
        database,
        rollout,
        **turns("go on", answer="done"),
        parent_call_id=first.id,
        shared_turns=2,
    )
    await builders.add_call(database, rollout, **turns("elsewhere", answer="yes"))
    lost = await builders.add_call(
        database, rollout, **turns("and then", answer="lost"), parent_call_id=first.id, shared_turns=2
    )
    await builders.add_delivery(database, lost, delivered=False)
    async with grading(database, redis_url, **of_code(tmp_path)):
        (found,) = await settled(database, run, 1)
    assert found.total == pytest.approx(0.5)
    mine, layout = await rewards(database, run)
    assert (mine.state, mine.value, mine.source) == ("scored", 0.5, "command")
    said = [*("hello", "hi", "go on", "done"), *("elsewhere", "yes")]
    assert json.loads(mine.explanation) == [{"answer": "Eiffel Tower"}, "words", said]
    assert layout.value == 0.0
    async with database.read() as session:
        stored = await conversations_of(session, AttemptKey(rollout.id, 1))
    assert [[turn["role"] for turn in one["turns"]] for one in stored] == [
        ["user", "assistant"] * 2,
        ["user", "assistant"],
    ]


def turns(*said: str, answer: str) -> dict[str, Any]:
    asked = [{"role": "user", "content": one} for one in said]
    return {"turns": asked, "answer": {"role": "assistant", "content": answer}}


async def test_a_program_that_fails_is_tried_three_times_and_is_no_0(
    database: Database, redis_url: str, tmp_path: Path
) -> None:
    log = tmp_path / "shared" / "log"
    log.parent.mkdir()
    log.touch()
    script = f"open({str(log)!r}, 'a').write('x'); print(1); raise SystemExit(1)"
    run, _ = await add_ungraded(database, {"name": "mine", "grader": command(script)}, F1, outputs=["x"])
    async with grading(database, redis_url, **of_code(tmp_path)):
        (found,) = await settled(database, run, 1)
    assert (found.total, found.reason, found.tries) == (None, "mine: it exited with 1", 3)
    assert log.read_text() == "xxx"
    assert [(one.component, one.state, one.value) for one in await rewards(database, run)] == [
        ("mine", "failed", None),
        ("answer", "scored", 0.0),
    ]


async def test_a_program_that_works_the_second_time_counts(database: Database, redis_url: str, tmp_path: Path) -> None:
    mark = tmp_path / "shared" / "mark"
    mark.parent.mkdir()
    script = f"import os\nif os.path.exists({str(mark)!r}): print(1)\nelse: open({str(mark)!r}, 'w').close()"
    run, _ = await add_ungraded(database, {"name": "mine", "grader": command(script)}, outputs=["x"])
    async with grading(database, redis_url, **of_code(tmp_path)):
        (found,) = await settled(database, run, 1)
    assert (found.total, found.tries) == (1.0, 2)


async def test_a_grader_that_stops_gives_its_attempts_back_without_a_try(
    database: Database, redis_url: str, tmp_path: Path
) -> None:
    begun = tmp_path / "shared" / "begun"
    begun.parent.mkdir()
    begun.touch()
    script = f"open({str(begun)!r}, 'a').write('x'); import time; time.sleep(600)"
    run, _ = await add_ungraded(database, {"name": "mine", "grader": command(script)}, outputs=["x"])
    for stops in range(1, 5):
        stop = asyncio.Event()
        grader = asyncio.create_task(work(settings_of(database, redis_url, **of_code(tmp_path)), stop, Checks()))
        await eventually(lambda stops=stops: len(begun.read_text()) == stops)
        stop.set()
        await asyncio.sleep(0)
        grader.cancel()
        await asyncio.gather(grader, return_exceptions=True)
        (found,) = await gradings(database, run)
        assert (found.tries, found.settled_at) == (0, None)


async def test_attempts_of_other_runs_do_not_wait_for_programs(
    database: Database, redis_url: str, tmp_path: Path
) -> None:
    hangs = {"name": "mine", "grader": command("import time; time.sleep(600)", timeout_seconds=20)}
    slow, _ = await add_ungraded(database, hangs, outputs=["x"])
    fast, _ = await add_ungraded(database, F1, outputs=["x"] * 8)
    async with grading(database, redis_url, code_processes=1, **of_code(tmp_path)):
        assert {one.tries for one in await settled(database, fast, 8)} == {1}
        assert [one.settled_at for one in await gradings(database, slow)] in ([], [None])


async def test_a_trial_runs_code_once_and_stores_nothing(database: Database, redis_url: str, tmp_path: Path) -> None:
    run, (rollout,) = await add_ungraded(database, F1, outputs=['{"answer": "Tower"}'])
    good = {
        "name": "good",
        "grader": command("import json, sys; print(len(json.load(sys.stdin)['rollout']['output']))"),
    }
    bad = {"name": "bad", "weight": 0.0, "grader": command("raise SystemExit(3)")}
    reward = Reward.model_validate({"components": [good, bad, F1]})
    async with grading(database, redis_url, **of_code(tmp_path)):
        await settled(database, run, 1)
        answer = await graded_by_trial(database, rollout.id, reward, begin_seconds=30.0, seconds=60.0)
    found = Graded.model_validate(answer)
    assert found.total == pytest.approx(19 + 0.9 * 2 / 3)
    assert [(one.component, one.state, one.value) for one in found.components][:2] == [
        ("good", "scored", 19.0),
        ("bad", "failed", None),
    ]
    assert found.components[1].explanation == "it exited with 3"
    assert [one.component for one in await rewards(database, run)] == ["answer"]
    async with database.read() as session:
        assert await session.scalar(select(func.count()).select_from(tables.GradingTrial)) == 0


@pytest.mark.parametrize("bad", ["\\u0000", "\\ud800"])
async def test_a_trial_shows_any_text_of_an_agent(database: Database, redis_url: str, bad: str) -> None:
    run, (rollout,) = await add_ungraded(database, F1, outputs=[f'{{"answer": "Tower{bad}"}}'])
    async with grading(database, redis_url):
        await settled(database, run, 1)
        reward = Reward.model_validate({"components": [F1]})
        found = await graded_by_trial(database, rollout.id, reward, begin_seconds=30.0, seconds=30.0)
    assert found["components"][0]["extracted"] == "Tower\ufffd"
    assert [one.extracted for one in await rewards(database, run)] == ["Tower\ufffd"]


async def test_a_trial_that_fails_is_answered_at_once(database: Database, redis_url: str) -> None:
    reward = Reward.model_validate({"components": [F1]})
    async with grading(database, redis_url):
        with pytest.raises(TrialFailed, match=r"could not grade rollout run-1\.0\.0: UnknownRollout: no rollout"):
            await graded_by_trial(database, "run-1.0.0", reward, begin_seconds=30.0, seconds=30.0)


async def test_each_lane_leases_its_own_runs(database: Database) -> None:
    judge = {"type": "score_model", "provider": "judge", "model": "m", "rubric": "r"}
    python = {"type": "python", "function": "package:score"}
    made = {
        Lane.INSTANT: await add_ungraded(database, F1, outputs=["x"]),
        Lane.JUDGE: await add_ungraded(database, F1, {"name": "judge", "grader": judge}, outputs=["x"]),
        Lane.CODE: await add_ungraded(
            database, {"name": "judge", "grader": judge}, {"name": "code", "grader": python}, outputs=["x"]
        ),
    }
    for lane, (run, _) in made.items():
        async with database.session() as session:
            assert [one.run_id for one in await lease_gradings(session, "one", 5, 30.0, lane=lane)] == [run.id]
    async with database.read() as session:
        coded = (await session.scalars(select(tables.Run.id).where(tables.Run.coded))).all()
    assert coded == [made[Lane.CODE][0].id]
