"""The real API behind a real port, for tests whose own code is synchronous."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from leyden.services.api.app import create_app
from leyden.services.api.settings import Settings
from tests.fakes.served import served

TOKEN = "secret-of-tests"


@contextmanager
def served_api(dsn: str) -> Iterator[str]:
    """Serves inside the block and gives the address."""
    with served(create_app(Settings(database_url=dsn, admin_token=TOKEN))) as url:
        yield url
