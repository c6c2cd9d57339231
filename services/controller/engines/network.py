"""Asks the trainer of a run to send a version to an engine over the network, in place of the disk."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from leyden.libs.queue.notifications import Notifications, Topic
from leyden.libs.store.database import Database, Refused, StoreAway
from leyden.libs.store.transfers import WeightTransfer, end_transfer, read_sender, request_transfer
from leyden.libs.telemetry import logger
from leyden.services.controller.engines.client import EngineClient, IncomingWeights
from leyden.services.controller.engines.targets import TargetVersion

log = logger()

ACCEPT_SECONDS = 5.0
"""Longest wait for the trainer; the engine serves meanwhile."""
POLL_SECONDS = 0.05


@asynccontextmanager
async def requested_transfer(
    database: Database, notifications: Notifications, client: EngineClient, target: TargetVersion
) -> AsyncIterator[IncomingWeights | None]:
    """Yields the group in which the engine receives the version; None where the disk is the way.

    The engine serves until the block: it cannot receive, no trainer sends the version, or it has joined the group.

    Raises: StoreAway
    """
    # A run's version 0 is a model that engines have on their disks, or a copy made before its trainer runs.
    world_size = await client.processes() if target.version else None
    if world_size is None:
        yield None
        return
    name = f"leyden-{secrets.token_hex(8)}"
    transfer = WeightTransfer(client.url, target.run_id, target.version, name, 1 + world_size)
    try:
        incoming = await _requested(database, notifications, transfer)
        if incoming is None:
            yield None
            return
        try:
            yield incoming if await client.join(incoming) else None
        finally:
            # After a join that failed, too: some processes of the engine may have joined.
            await client.leave(incoming)
    finally:
        # The next request for this engine replaces a row that stays.
        with suppress(StoreAway):
            async with database.session() as session:
                await end_transfer(session, transfer)


async def _requested(
    database: Database, notifications: Notifications, transfer: WeightTransfer
) -> IncomingWeights | None:
    try:
        async with database.session() as session:
            await request_transfer(session, transfer)
    except Refused:
        # The run is deleted.
        return None
    await notifications.notify(Topic.TRANSFERS)
    deadline = time.monotonic() + ACCEPT_SECONDS
    while time.monotonic() < deadline:
        async with database.read() as session:
            if (sender := await read_sender(session, transfer)) is not None:
                return IncomingWeights(transfer.group_name, transfer.world_size, sender)
        await asyncio.sleep(POLL_SECONDS)
    log.info("no trainer sends the version", run_id=transfer.run_id, version=transfer.policy_version)
    return None
