"""A typed client of the REST API, and the same for asyncio.

>>> with Client("http://127.0.0.1:8000", token) as leyden:  # doctest: +SKIP
...     leyden.upload_dataset("questions", Path("train.jsonl"))
...     run = leyden.create_run({"name": "first", "dataset": "questions", "agent": {"command": ["./agent"]}})
"""

from leyden.libs.client.async_client import AsyncClient
from leyden.libs.client.attempts import Attempt, NoTask, RewardRefused, RunEnded
from leyden.libs.client.client import Client
from leyden.libs.client.errors import Conflict, Forbidden, LeydenError, NotFound, Refused, Unauthorised, Unreachable

__all__ = [
    "AsyncClient",
    "Attempt",
    "Client",
    "Conflict",
    "Forbidden",
    "LeydenError",
    "NoTask",
    "NotFound",
    "Refused",
    "RewardRefused",
    "RunEnded",
    "Unauthorised",
    "Unreachable",
]
