"""The part of a trainer that sends versions, as a process: `python -m tests.fakes.weight_sender`, by its settings."""

import asyncio

import torch

from leyden.libs.queue.notifications import Notifications
from leyden.libs.store.database import Database
from leyden.services.trainer.sender import WeightSender
from leyden.services.trainer.settings import Settings


async def send_for_ever(settings: Settings) -> None:
    """Sends what the controller asks for until it is cancelled."""
    database, notifications = Database(settings.database_url, "leyden-trainer"), Notifications(settings.redis_url)
    try:
        async with WeightSender(settings, database, notifications, torch.device("cpu")).accepting(asyncio.Event()):
            await asyncio.Event().wait()
    finally:
        await notifications.close()
        await database.close()


if __name__ == "__main__":
    asyncio.run(send_for_ever(Settings()))  # type: ignore[call-arg]  # from the environment
