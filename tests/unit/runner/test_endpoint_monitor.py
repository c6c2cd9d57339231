from __future__ import annotations

import time

from sqlalchemy import exc

from leyden.services.runner.endpoint_monitor import EndpointMonitor


async def test_a_store_that_did_not_answer_is_remembered_for_the_attempts_of_that_time() -> None:
    is_away = False

    async def ping() -> None:
        if is_away:
            raise exc.OperationalError("SELECT 1", None, Exception("away"))

    monitor = EndpointMonitor([], ping)
    began = time.monotonic()
    await monitor.check()
    assert monitor.down_since(began) is None
    is_away = True
    await monitor.check()
    is_away = False
    later = time.monotonic()
    await monitor.check()
    assert (monitor.down_since(began), monitor.down_since(later)) == ("the store", None)
