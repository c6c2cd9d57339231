"""A proxy before the gateway that loses its first answer, as an ingress does that gives up, and then answers itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

import aiohttp
from aiohttp import web
from sqlalchemy import text

from tests.fakes.gateway import Scene
from tests.support.waiting import eventually

Fault = Literal["500", "429", "dropped"]
HOP_BY_HOP = {"host", "connection", "content-length", "transfer-encoding", "content-encoding", "keep-alive"}
COLLECTOR = "/collector"
SAMPLING = ("/chat/completions", "/responses", "/messages", "/api/chat", ":generateContent")


class Proxy:
    """Passes every request on; the answer to the first model call is lost after the engine sampled it.

    Below `/collector` it takes whatever comes.
    """

    def __init__(self, stage: Scene, fault: Fault | None) -> None:
        self._stage, self._fault = stage, fault
        self.url = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Proxy]:
        """Serves on loopback inside the block."""
        app = web.Application(client_max_size=2**28)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        # Bodies stay as they are, compressed ones included.
        async with aiohttp.ClientSession(auto_decompress=False, timeout=aiohttp.ClientTimeout(total=120)) as self._http:
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            try:
                yield self
            finally:
                await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if request.path.startswith(COLLECTOR):
            # Spans are not looked at here.
            return web.Response()
        if self._fault is not None and request.method == "POST" and request.path.rstrip("/").endswith(SAMPLING):
            fault, self._fault = self._fault, None
            return await self._lose(request, fault)
        async with await self._send(request) as answer:
            headers = {name: value for name, value in answer.headers.items() if name.lower() not in HOP_BY_HOP}
            response = web.StreamResponse(status=answer.status, headers=headers)
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response

    async def _send(self, request: web.Request) -> aiohttp.ClientResponse:
        headers = [(name, value) for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP]
        body = await request.read()
        return await self._http.request(
            request.method, self._stage.gateway.url + request.raw_path, headers=headers, data=body
        )

    async def _lose(self, request: web.Request, fault: Fault) -> web.StreamResponse:
        """Leaves when all is sampled and the record waits for the database, then answers with the fault."""
        async with self._stage.database.engine.begin() as connection:
            await connection.execute(text("LOCK TABLE model_calls IN EXCLUSIVE MODE"))
            asking = asyncio.create_task(self._send(request))
            while not self._stage.engine.sampled:
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.2)
            asking.cancel()
            await asyncio.wait({asking})
            if not asking.cancelled():
                # A stream: its headers came before its record.
                asking.result().close()
            await asyncio.sleep(0.2)
        await eventually(lambda: self._stage.calls())
        if fault == "dropped":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        error = {"type": "error", "error": {"type": "api_error", "message": "injected", "code": None, "param": None}}
        return web.json_response(error, status=int(fault), headers={"retry-after": "1"})
