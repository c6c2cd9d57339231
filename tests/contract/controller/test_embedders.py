"""A pool that embeds: the controller follows its engines, tells which of them embed, and gives them no weights."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from leyden.libs.queue.notifications import Notifications
from leyden.libs.store.database import Database
from leyden.libs.store.engines import embedding_engines, serving_engines
from leyden.services.controller.engines.discovery import StaticEngines
from leyden.services.controller.settings import Settings
from leyden.services.controller.worker import make_embedders, take_over
from tests.support.waiting import eventually


async def test_engines_serve_while_their_model_embeds_and_get_no_weights(database: Database, redis_url: str) -> None:
    asked, says = list[str](), dict[str, Any]({"model_path": "/models/e", "is_generation": False})

    async def answer(request: web.Request) -> web.Response:
        asked.append(f"{request.method} {request.path}")
        return web.json_response(says)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server:
        url = str(server.make_url("")).rstrip("/")
        settings = Settings(
            pools={"default": {"engine_urls": ["http://a:1"]}, "e": {"embeddings": True, "engine_urls": [url]}},
            engine_poll_seconds=0.05,
        )
        await take_over(settings, database)

        async def seen() -> list[tuple[str, str | None]]:
            async with database.read() as session:
                assert await embedding_engines(session, "default") is None
                return [(one.state, one.detail) for one in await embedding_engines(session, "e") or ()]

        notifications = Notifications(redis_url)
        fleet = make_embedders(settings, StaticEngines(frozenset({url})), database, notifications, "e")
        following = asyncio.create_task(fleet.run())
        try:
            await eventually(lambda: is_seen(seen, "serving", None))
            async with database.read() as session:
                assert await serving_engines(session) == []
            # A restart with another model.
            says["is_generation"] = True
            await eventually(lambda: is_seen(seen, "unreachable", "start SGLang with --is-embedding"))
            says["is_generation"] = False
            await eventually(lambda: is_seen(seen, "serving", None))
            await server.close()
            await eventually(lambda: is_seen(seen, "unreachable", "Error"))
        finally:
            following.cancel()
            await asyncio.wait({following})
            await notifications.close()
    assert set(asked) == {"GET /model_info"}


async def is_seen(seen: Any, state: str, words: str | None) -> bool:
    found: list[tuple[str, str | None]] = await seen()
    if [one for one, _ in found] != [state]:
        return False
    [(_, detail)] = found
    return detail is None if words is None else words in (detail or "")
