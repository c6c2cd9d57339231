"""Leyden trains the language model inside any AI agent with reinforcement learning.

>>> from leyden import Client
>>> with Client("http://127.0.0.1:8000", token) as client:  # doctest: +SKIP
...     client.upload_dataset("questions", Path("train.jsonl"))

`leyden.services`, `leyden.libs` and `leyden.examples` are the folders of these names in the repository (ADR 1).
"""

from __future__ import annotations

# Read by type checkers, as the one of `typing` is, whose import would make the start of each agent slower.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from leyden.libs.client import (
        AsyncClient,
        Attempt,
        Client,
        Conflict,
        Forbidden,
        LeydenError,
        NoTask,
        NotFound,
        Refused,
        RewardRefused,
        RunEnded,
        Unauthorised,
        Unreachable,
    )

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


def __getattr__(name: str) -> object:
    """Imports the client on first use: services start without httpx."""
    if name in __all__:
        from leyden.libs import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
