from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trustme

from leyden.libs.attempts.endpoint_monitor import EndpointMonitor, attribute_failure
from leyden.libs.contracts.states import OutcomeKind
from leyden.libs.queue.leases import Outcome
from leyden.libs.store.database import StoreAway

ANSWER = b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\n\r\n"


async def test_a_store_that_did_not_answer_is_remembered_for_the_attempts_of_that_time() -> None:
    is_away = False

    async def ping() -> None:
        if is_away:
            raise StoreAway("gone")

    monitor = EndpointMonitor([], ping)
    started = time.monotonic()
    await monitor.check()
    assert monitor.down_since(started) is None
    is_away = True
    await monitor.check()
    is_away = False
    later = time.monotonic()
    await monitor.check()
    assert (monitor.down_since(started), monitor.down_since(later)) == ("the store", None)


async def test_an_https_gateway_that_answers_is_not_down() -> None:
    started = time.monotonic()
    async with _server(certificate=True) as server, _monitor(f"https://localhost:{server.port}/r") as monitor:
        await monitor.check()
        await monitor.check()
        assert (monitor.down_since(started), server.connections) == (None, 1)


async def test_an_attempts_key_never_leaves_in_clear_for_an_https_address() -> None:
    async with _server() as server, _monitor() as monitor:
        assert not await monitor.refuses_key(f"https://127.0.0.1:{server.port}/r/1/v1/models", "secret-key")
        assert server.connections == 1
        assert b"secret-key" not in server.received


async def test_a_refused_key_is_noticed() -> None:
    async with _server() as server, _monitor() as monitor:
        assert await monitor.refuses_key(f"http://127.0.0.1:{server.port}/r/1/v1/models", "secret-key")
        assert b"authorization: bearer secret-key" in bytes(server.received).lower()


async def test_a_gateway_that_was_replaced_between_two_checks_was_down() -> None:
    async with _server() as first, _monitor(f"http://127.0.0.1:{first.port}") as monitor:
        started = time.monotonic()
        await monitor.check()
        assert monitor.down_since(started) is None
        await first.stop()
        async with _server(port=first.port):
            await monitor.check()
            assert monitor.down_since(started) == f"127.0.0.1:{first.port}"
            later = time.monotonic()
            await monitor.check()
            assert monitor.down_since(later) is None


@pytest.mark.parametrize(
    "last", [ANSWER.replace(b"content-length", b"Connection: close\r\ncontent-length"), ANSWER.replace(b"1.1", b"1.0")]
)
async def test_a_connection_that_ends_as_the_answer_announced_is_no_outage(last: bytes) -> None:
    async with _server() as server, _monitor(f"http://127.0.0.1:{server.port}") as monitor:
        started = time.monotonic()
        for answer in (ANSWER, last, ANSWER, last, last):
            server.answer = answer
            await monitor.check()
        await asyncio.gather(monitor.check(), monitor.check())
        assert (monitor.down_since(started), server.connections) == (None, 5)
        server.answer = ANSWER
        await monitor.check()
        await monitor.check()
        await server.cut()
        await monitor.check()
        assert monitor.down_since(started) == f"127.0.0.1:{server.port}"


async def test_an_address_that_nobody_serves_is_down() -> None:
    async with _server() as server:
        pass
    async with _monitor(f"http://127.0.0.1:{server.port}") as monitor:
        started = time.monotonic()
        await monitor.check()
        assert monitor.down_since(started) == f"127.0.0.1:{server.port}"


@pytest.mark.parametrize("kind", [OutcomeKind.AGENT_ERROR, OutcomeKind.TIMEOUT])
async def test_a_failure_is_the_agents_only_where_its_whole_time_was_watched(kind: OutcomeKind) -> None:
    async with _server() as server, _monitor(f"http://127.0.0.1:{server.port}") as monitor:
        watched, earlier = time.monotonic(), monitor.watching_since - 10
        found = [await attribute_failure(Outcome(kind), started, monitor) for started in (watched, earlier)]
    assert [one.kind for one in found] == [kind, OutcomeKind.INFRA_ERROR]


@pytest.mark.parametrize("reward", [None, 0.0, 1.0])
async def test_an_end_of_which_nobody_watched_the_beginning_says_so(reward: float | None) -> None:
    async with _server() as server, _monitor(f"http://127.0.0.1:{server.port}") as monitor:
        watched, earlier = time.monotonic(), monitor.watching_since - 10
        ended = Outcome(OutcomeKind.SUCCEEDED, reward=reward)
        assert await attribute_failure(ended, watched, monitor) == ended
        found = await attribute_failure(ended, earlier, monitor)
        assert (found.kind, found.reward, found.gateway_down_at) == (ended.kind, reward, monitor.watching_since)
        assert found.endpoint_down == ("not watched" if reward is None else None)
        await server.stop()
        found = await attribute_failure(ended, earlier, monitor)
        assert found.gateway_down_at is not None and found.gateway_down_at > watched
        assert (found.endpoint_down is None) == (reward is not None)


class _Server:
    """Answers 401 to every request, and remembers each byte that clients sent."""

    port: int
    _server: asyncio.Server

    def __init__(self) -> None:
        self.received = bytearray()
        self.connections = 0
        self.answer = ANSWER
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self, port: int, context: ssl.SSLContext | None) -> None:
        self._server = await asyncio.start_server(
            self._serve, "localhost" if context else "127.0.0.1", port, ssl=context
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stops and cuts all connections; again is harmless."""
        self._server.close()
        await self.cut()
        await self._server.wait_closed()

    async def cut(self) -> None:
        """Cuts all connections."""
        for writer in self._writers:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.append(writer)
        while block := await reader.read(65536):
            self.received += block
            if not self.received.endswith(b"\r\n\r\n"):
                # A greeting of TLS, for a server that does not speak it.
                break
            writer.write(self.answer)
            if self.answer != ANSWER:
                break
        writer.close()


@asynccontextmanager
async def _server(port: int = 0, *, certificate: bool = False) -> AsyncIterator[_Server]:
    context = None
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        trustme.CA().issue_cert("localhost").configure_cert(context)
    server = _Server()
    await server.start(port, context)
    try:
        yield server
    finally:
        await server.stop()


@asynccontextmanager
async def _monitor(*urls: str) -> AsyncIterator[EndpointMonitor]:
    async def ping() -> None:
        pass

    monitor = EndpointMonitor(urls, ping)
    try:
        yield monitor
    finally:
        await monitor.close()
