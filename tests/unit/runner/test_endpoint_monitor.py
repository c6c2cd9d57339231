from __future__ import annotations

import time

from leyden.libs.store.database import StoreAway
from leyden.services.runner.endpoint_monitor import EndpointMonitor


async def test_a_store_that_did_not_answer_is_remembered_for_the_attempts_of_that_time() -> None:
    is_away = False

    async def ping() -> None:
        if is_away:
            raise StoreAway("gone")

    monitor = EndpointMonitor([], ping)
    started = time.monotonic()
    await monitor.check()
    assert monitor.down_since(started) is None
    is_away = True
    await monitor.check()
    is_away = False
    later = time.monotonic()
    await monitor.check()
    assert (monitor.down_since(started), monitor.down_since(later)) == ("the store", None)
