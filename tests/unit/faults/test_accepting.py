"""Servers of the tests leave no connection open."""

from __future__ import annotations

import asyncio
import gc
import socket


async def test_a_connection_that_is_accepted_while_its_server_closes_is_closed() -> None:
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    loop = asyncio.get_running_loop()
    with socket.create_connection(server.sockets[0].getsockname()) as client:
        client.setblocking(False)
        # The next iteration accepts; in the one after it the server closes before the connection is made.
        loop.call_soon(loop.call_soon, server.close)
        async with asyncio.timeout(60):
            assert await loop.sock_recv(client, 1) == b""
    gc.collect()
