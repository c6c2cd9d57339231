"""The calls that change an engine's weights."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from leyden.services.controller.engines.client import EngineClient
from leyden.services.controller.engines.targets import TargetVersion
from leyden.services.controller.settings import Settings

TARGET = TargetVersion("run-1", 1, "/weights", "0" * 64)


async def test_an_update_that_is_cancelled_ends_although_the_engine_is_gone() -> None:
    loading = asyncio.Event()

    async def engine(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/update_weights_from_disk":
            loading.set()
            await asyncio.Event().wait()
        if request.url.path == "/continue_generation":
            raise httpx.ConnectError("the engine is gone")
        return httpx.Response(200, json={})

    async with httpx.AsyncClient(transport=httpx.MockTransport(engine)) as http:
        update = asyncio.create_task(EngineClient("http://engine", http, Settings()).update(TARGET))
        await loading.wait()
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(update, 5)
