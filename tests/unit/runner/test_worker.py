"""The runner's loop with everything around it in this process."""

from __future__ import annotations

import asyncio
from pathlib import Path
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
    async def keep() -> None:
        await asyncio.sleep(0.1)
        raise RuntimeError("broken")

    place: Any = SimpleNamespace(folders=SimpleNamespace(root=Path("runner-a")), doors=SimpleNamespace(keep=keep))
    queue, notifications = RolloutQueue(redis_url), Notifications(redis_url)
    try:
        async with asyncio.timeout(60):
            with pytest.raises(RuntimeError, match="broken"):
                await Runner(Settings(), database, queue, notifications, place).run(asyncio.Event())
    finally:
        await queue.close()
        await notifications.close()
