"""A regrade whose grader is killed: it goes on with the next grader, once, and who trains meanwhile sees one total."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import func, select, update

from leyden.libs.faults import FaultInjector
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.libs.store.runs.trials import MAX_TRIES
from leyden.services.api import rollouts
from leyden.services.credit.worker import demonstrate_pending
from tests.contract.api.test_regrades import BRIEF, graded
from tests.contract.credit.test_demonstrations import add_supervised, verdicts_of
from tests.contract.grader.test_code_worker import command
from tests.contract.grader.test_worker import killed_at
from tests.invariants import violations
from tests.support import builders
from tests.support.waiting import eventually

POINTS = ("grader.trial_leased", "grader.trial_graded", "grader.trial_answered")
"""Before its program begins, after it has ended, and when the answer is stored."""


def reward_of(begun: Path, *, hangs: int = 0) -> dict[str, Any]:
    """A program that gives 0.65, and a built-in grader that gives 0.1. Args: hangs: the number of starts without end"""
    script = f"""
import os, time
path = {str(begun)!r}
with open(path, "a") as log:
    log.write(f"{{os.getpid()}}\\n")
if len(open(path).readlines()) <= {hangs}:
    time.sleep(600)
print(0.65)
"""
    return {"reward": {"components": [{"name": "code", "grader": command(script)}, BRIEF]}}


@asynccontextmanager
async def grader(
    database: Database, redis_url: str, folder: Path, **environment: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    names = {
        **os.environ,
        **named(folder),
        "LEYDEN_DATABASE_URL": database.dsn,
        "LEYDEN_REDIS_URL": redis_url,
        **environment,
    }
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "leyden.services.grader", env=names)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def named(folder: Path) -> dict[str, str]:
    return {"GRADER_LEASE_SECONDS": "3", "GRADER_WORK_FOLDER": str(folder / "work"), "GRADER_CODE_USER": "same"}


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The API waits for graders that start meanwhile."""
    monkeypatch.setattr(rollouts, "BEGIN_SECONDS", 300.0)


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """The process ids of programs, in the order of their starts."""
    log = tmp_path / "shared" / "begun"
    log.parent.mkdir()
    log.touch()
    return log


async def check_one_revision(database: Database, rollout: tables.Rollout) -> None:
    """The journal of a rollout whose only regrade gave 0.75."""
    async with database.read() as session:
        (regrade,) = (await session.scalars(select(tables.Regrade))).all()
        ledger = select(tables.RolloutReward).order_by(tables.RolloutReward.revision, tables.RolloutReward.position)
        rows = (await session.scalars(ledger)).all()
        audit = select(tables.AuditEntry).where(tables.AuditEntry.action == "create_regrade")
        (entry,) = (await session.scalars(audit)).all()
        trials = await session.scalar(select(func.count()).select_from(tables.GradingTrial))
    assert (regrade.revision, regrade.total) == (2, pytest.approx(0.75))
    assert [(one.revision, one.component, one.state, one.value) for one in rows] == [
        (1, "answer", "scored", 0.0),
        (2, "code", "scored", 0.65),
        (2, "brief", "scored", 1.0),
    ]
    assert (entry.subject, entry.detail["revision"], trials) == (rollout.id, 2, 0)
    found = await asyncio.to_thread(violations, database.dsn, rollout.run_id)
    assert {words: row for words, row in found.items() if "regrades" in words} == {}


@pytest.mark.parametrize("point", POINTS)
async def test_a_regrade_whose_grader_is_killed_is_one_revision(
    database: Database, redis_url: str, api_http: httpx.AsyncClient, tmp_path: Path, begun: Path, point: str
) -> None:
    rollout = await graded(database, evaluated=True)
    asking = asyncio.create_task(api_http.post(f"/v1/rollouts/{rollout.id}/regrades", json=reward_of(begun)))
    await killed_at(point, FaultInjector(tmp_path / "faults"), database, redis_url, **named(tmp_path))
    async with grader(database, redis_url, tmp_path):
        answer = await asking
    assert (answer.status_code, answer.json()["total"]) == (201, pytest.approx(0.75)), answer.text
    assert len(begun.read_text().split()) == (2 if point == "grader.trial_graded" else 1)
    await check_one_revision(database, rollout)


@pytest.mark.parametrize(("evaluated", "newest"), [(True, 0.75), (False, 0.0)])
async def test_a_run_that_trains_during_a_regrade_has_the_old_total_or_the_new_one(
    database: Database,
    redis_url: str,
    api_http: httpx.AsyncClient,
    tmp_path: Path,
    begun: Path,
    evaluated: bool,
    newest: float,
) -> None:
    """Its grader gets SIGKILL in the middle of the program."""
    rollout = await graded(database, evaluated=evaluated)
    await builders.add_call(database, rollout, [1, 2], [3])
    async with database.session() as session:
        complete = update(tables.Group).where(tables.Group.id == rollout.group_id)
        await session.execute(complete.values(state="complete", finished_at=func.now()))
        source = await session.get_one(tables.Run, rollout.run_id)

    async def trained() -> float:
        run = await add_supervised(database, source, algorithm={"min_reward": 0.0})
        assert await demonstrate_pending(database) == 1
        (verdict,) = await verdicts_of(database, run)
        assert verdict.reward_mean is not None
        return verdict.reward_mean

    path, body = f"/v1/rollouts/{rollout.id}/regrades", reward_of(begun, hangs=1)
    asking = asyncio.create_task(api_http.post(path, json=body))
    async with grader(database, redis_url, tmp_path) as killed:
        (program,) = await eventually(lambda: begun.read_text().split())
        assert await trained() == 0.0
        killed.send_signal(signal.SIGKILL)
        await killed.wait()
    await eventually(lambda: not Path(f"/proc/{program}").exists(), "the program ends with its grader")
    meanwhile = [await trained()]
    async with grader(database, redis_url, tmp_path):
        while not asking.done():
            meanwhile.append(await trained())
        answer = await asking
    assert answer.status_code == 201, answer.text
    meanwhile.append(await trained())
    # One total after the other, and nothing between them.
    assert meanwhile == sorted(meanwhile) and meanwhile[-1] == pytest.approx(newest)
    assert {round(one, 9) for one in meanwhile} == {0.0, newest}
    await check_one_revision(database, rollout)
    async with database.read() as session:
        assert (await session.get_one(tables.Rollout, rollout.id)).reward == 0.0


async def test_a_trial_that_ends_its_graders_fails_with_the_reason(
    database: Database, redis_url: str, api_http: httpx.AsyncClient, tmp_path: Path, begun: Path
) -> None:
    rollout = await graded(database, evaluated=True)
    asking = asyncio.create_task(api_http.post(f"/v1/rollouts/{rollout.id}/regrades", json=reward_of(begun)))
    for number in range(3):
        injector = FaultInjector(tmp_path / f"faults{number}")
        await killed_at("grader.trial_leased", injector, database, redis_url, **named(tmp_path))
    async with grader(database, redis_url, tmp_path):
        answer = await asking
    assert (answer.status_code, answer.json()["cause"]) == (500, "grader_failed")
    assert "its grader died 3 times while it graded" in answer.json()["detail"]
    async with database.read() as session:
        assert (await session.scalars(select(tables.Regrade))).all() == []


async def test_a_grader_that_stops_leaves_its_trials_to_the_next_one_at_once_without_a_try(
    database: Database, redis_url: str, api_http: httpx.AsyncClient, tmp_path: Path, begun: Path
) -> None:
    rollout = await graded(database, evaluated=True)
    path, body = f"/v1/rollouts/{rollout.id}/regrades", reward_of(begun, hangs=MAX_TRIES)
    asking = asyncio.create_task(api_http.post(path, json=body))
    for stops in range(1, MAX_TRIES + 1):
        async with grader(database, redis_url, tmp_path, GRADER_LEASE_SECONDS="3600"):
            await eventually(lambda stops=stops: len(begun.read_text().split()) == stops)
    async with grader(database, redis_url, tmp_path):
        answer = await asking
    assert answer.status_code == 201, answer.text
    await check_one_revision(database, rollout)
