"""The addresses and keys that clients get, and the watch over gateway and collector."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fastapi import Request

from leyden.libs.attempts import EndpointMonitor
from leyden.libs.capability import KeyRing
from leyden.libs.queue.notifications import Notifications
from leyden.libs.service import Problem
from leyden.libs.store.database import Database
from leyden.services.api.attempts.looks import Looks
from leyden.services.api.settings import Settings


@dataclass(frozen=True)
class AttemptContext:
    """Everything that the attempts of clients share."""

    gateway_url: str
    collector_url: str
    keys: KeyRing
    notifications: Notifications
    monitor: EndpointMonitor
    looks: Looks


def context_of(request: Request) -> AttemptContext:
    """Returns the context that the lifespan opened. Raises: Problem: the settings name no addresses"""
    context: AttemptContext | None = request.app.state.attempts
    if context is None:
        detail = "the API knows no gateway: set API_GATEWAY_URL and API_COLLECTOR_URL (chart: api.externalAgents)"
        raise Problem(409, detail, cause="not_configured")
    return context


@asynccontextmanager
async def attempt_context(
    settings: Settings, database: Database, notifications: Notifications
) -> AsyncIterator[AttemptContext | None]:
    """Watches the endpoints of agents inside the block; None where the settings name none.

    Raises: KeyRingError: the key ring file cannot be read
    """
    gateway, collector = settings.gateway_url, settings.collector_url
    if gateway is None or collector is None:
        yield None
        return
    keys = KeyRing(settings.capability_keys_file)
    # Connections of its own: ends of attempts hold those of the API while they ask whether the store answers.
    own = Database(settings.database_url, "leyden-api-monitor", pool_size=1)
    monitor = EndpointMonitor([gateway, collector], own.ping)
    await monitor.check()
    watching = asyncio.create_task(monitor.run(), name="endpoints of agents")
    looks = Looks(database)
    try:
        yield AttemptContext(gateway, collector, keys, notifications, monitor, looks)
    finally:
        await looks.close()
        watching.cancel()
        await asyncio.wait([watching])
        await monitor.close()
        await own.close()
