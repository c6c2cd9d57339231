"""The control endpoints of an SGLang engine, as the controller uses them, with a journal of what came."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web


@dataclass
class FakeEngineControl:
    """One engine. `bad_paths` cannot be loaded; `url` is set while it runs."""

    weight_version: str = "default"
    paused: bool = False
    bad_paths: set[str] = field(default_factory=set)
    journal: list[str] = field(default_factory=list)
    url: str = ""

    async def model_info(self, _request: web.Request) -> web.Response:
        return web.json_response({"model_path": "m", "weight_version": self.weight_version})

    async def pause(self, request: web.Request) -> web.Response:
        self.journal.append(f"pause {(await request.json())['mode']}")
        self.paused = True
        return web.json_response({})

    async def resume(self, request: web.Request) -> web.Response:
        assert await request.json() == {}
        self.journal.append("continue")
        self.paused = False
        return web.json_response({})

    async def update(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.journal.append(f"update {body['model_path']} {body['weight_version']} flush={body['flush_cache']}")
        if body["model_path"] in self.bad_paths:
            return web.json_response({"success": False, "message": "no such file"}, status=400)
        self.weight_version = body["weight_version"]
        return web.json_response({"success": True, "message": "", "num_paused_requests": 0})


@asynccontextmanager
async def running(engine: FakeEngineControl, port: int = 0) -> AsyncIterator[FakeEngineControl]:
    """Serves the engine on loopback."""
    app = web.Application()
    app.router.add_get("/model_info", engine.model_info)
    app.router.add_post("/pause_generation", engine.pause)
    app.router.add_post("/continue_generation", engine.resume)
    app.router.add_post("/update_weights_from_disk", engine.update)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
    engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield engine
    finally:
        await runner.cleanup()
