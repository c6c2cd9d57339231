"""The runner's loop with everything around it in this process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from libs.queue.stream import RolloutQueue
from libs.queue.wake import Wake
from libs.store.database import Database
from services.runner.settings import Settings
from services.runner.worker import Runner


async def test_a_runner_one_of_whose_loops_has_died_ends_instead_of_doing_nothing(
    database: Database, redis_url: str
) -> None:
    async def keep() -> None:
        await asyncio.sleep(0.1)
        raise RuntimeError("broken")

    place: Any = SimpleNamespace(folders=SimpleNamespace(root=Path("runner-a")), doors=SimpleNamespace(keep=keep))
    queue, wake = RolloutQueue(redis_url), Wake(redis_url)
    try:
        async with asyncio.timeout(60):
            with pytest.raises(RuntimeError, match="broken"):
                await Runner(Settings(), database, queue, wake, place).run(asyncio.Event())
    finally:
        await queue.close()
        await wake.close()
