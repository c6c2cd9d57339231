"""A regrade through an API that is killed: the client asks again, and no revision, component or entry is doubled."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from sqlalchemy import select

from leyden.libs.client import Client
from leyden.libs.contracts.config import Reward
from leyden.libs.faults import FaultInjector
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from tests.contract.api.test_regrades import BRIEF, NEW, OLD, graded
from tests.invariants import violations
from tests.support.shared import ROOT, free_port

POINTS = ("api.created", "api.committed")
"""Before the commit, and after it, when the client has no answer yet."""
TOKEN = "secret-of-tests"


@asynccontextmanager
async def api_process(
    database: Database, redis_url: str, port: int, injector: FaultInjector
) -> AsyncIterator[asyncio.subprocess.Process]:
    environment = {
        "PATH": os.environ["PATH"],
        "API_PORT": str(port),
        "API_ADMIN_TOKEN": TOKEN,
        "LEYDEN_DATABASE_URL": database.dsn,
        "LEYDEN_REDIS_URL": redis_url,
        **injector.environment,
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "leyden.services.api", cwd=ROOT, env=environment, stdout=asyncio.subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.parametrize("point", POINTS)
async def test_a_regrade_through_a_killed_api_is_one_revision(
    database: Database, redis_url: str, tmp_path: Path, point: str
) -> None:
    rollout = await graded(database, evaluated=True)
    injector, port = FaultInjector(tmp_path / "faults"), free_port()
    reward = Reward.model_validate({"components": [NEW, BRIEF]})
    with Client(f"http://127.0.0.1:{port}", TOKEN, patience_seconds=120.0) as client:
        injector.arm(point)
        async with api_process(database, redis_url, port, injector) as killed:
            asking = asyncio.create_task(asyncio.to_thread(client.regrade, rollout.id, reward))
            assert await killed.wait() == -signal.SIGKILL
        assert injector.fired(point, 0.0)
        async with api_process(database, redis_url, port, injector):
            made = await asking
            again = await asyncio.to_thread(client.regrade, rollout.id, reward)
            back = await asyncio.to_thread(client.regrade, rollout.id, Reward.model_validate({"components": [OLD]}))
    assert (made.revision, again, back.revision) == (2, made, 3)
    async with database.read() as session:
        rows = (await session.scalars(select(tables.RolloutReward).order_by(tables.RolloutReward.revision))).all()
        entries = (await session.scalars(select(tables.AuditEntry).order_by(tables.AuditEntry.id))).all()
    assert [(one.revision, one.component) for one in rows] == [
        (1, "answer"),
        (2, "answer"),
        (2, "brief"),
        (3, "answer"),
    ]
    assert [one.detail["revision"] for one in entries if one.action == "create_regrade"] == [2, 3]
    found = {words: row for words, row in violations(database.dsn, rollout.run_id).items() if "regrades" in words}
    assert found == {}
