"""The runner's loop with everything around it in this process."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from leyden.libs.queue.notifications import Notifications
from leyden.libs.queue.stream import RolloutQueue
from leyden.libs.store.database import Database
from leyden.services.runner.settings import Settings
from leyden.services.runner.worker import Runner


async def test_a_runner_one_of_whose_loops_has_died_ends_instead_of_doing_nothing(
    database: Database, redis_url: str
) -> None:
    async def die() -> None:
        await asyncio.sleep(0.1)
        raise RuntimeError("broken")

    context: Any = SimpleNamespace(settings=Settings(), endpoints=SimpleNamespace(run=die))
    queue, notifications = RolloutQueue(redis_url), Notifications(redis_url)
    try:
        async with asyncio.timeout(60):
            with pytest.raises(RuntimeError, match="broken"):
                await Runner("runner-a", database, queue, notifications, context).run(asyncio.Event())
    finally:
        await queue.close()
        await notifications.close()
