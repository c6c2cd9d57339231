"""Closes the connections that asyncio accepts while their server closes."""

from __future__ import annotations

from asyncio.base_events import BaseEventLoop
from asyncio.selector_events import BaseSelectorEventLoop
from typing import Any


def close_late_connections() -> None:
    """Closes a connection that a server accepted just before it closed; Python forgets it open (CPython issue 109564).

    The garbage collector found it tests later, and its warning failed a test that had nothing to do with it.
    Services run on uvloop, which makes the connection at once.
    """
    accept: Any = BaseSelectorEventLoop._accept_connection2  # type: ignore[attr-defined]  # typeshed omits it

    async def accept_or_close(
        loop: BaseEventLoop, factory: Any, connection: Any, extra: Any, context: Any, server: Any, *more: Any
    ) -> None:
        if server is not None and not server.sockets:
            connection.close()
            return
        await accept(loop, factory, connection, extra, context, server, *more)

    BaseSelectorEventLoop._accept_connection2 = accept_or_close  # type: ignore[attr-defined]
