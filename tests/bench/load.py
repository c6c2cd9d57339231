"""A load generator on bare sockets: closed loops and streams. It runs in a process of its own.

An answer that is incomplete, or has another status than 200, is an error and ends the run.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import uvloop

T = TypeVar("T")


@dataclass(frozen=True)
class Load:
    """Seconds of each call, to its end and to its first byte of body."""

    seconds: Sequence[float]
    first_seconds: Sequence[float]


class Client(asyncio.Protocol):
    """One connection that stays open, with one request at a time."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._body_at = self._end_at = -1
        self._done: asyncio.Future[None] | None = None
        self.first_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not derive from asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    async def ask(self, request: bytes) -> None:
        """Returns when the answer is complete.

        Raises: RuntimeError: it broke off, or its status is not 200
        """
        self._done = asyncio.get_running_loop().create_future()
        self._buffer.clear()
        self._body_at = self._end_at = -1
        self.first_at = 0.0
        self._transport.write(request)
        await self._done

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._body_at < 0 and not self._read_head():
            return
        if not self.first_at and len(self._buffer) > self._body_at:
            self.first_at = time.perf_counter()
        # Only the last chunk of an event stream is empty.
        ends = self._buffer.endswith(b"\r\n0\r\n\r\n")
        if ends if self._end_at < 0 else len(self._buffer) >= self._end_at:
            self._finish()

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        head = bytes(self._buffer[:end]).lower()
        if not head.startswith(b"http/1.1 200"):
            self._fail(f"refused: {bytes(self._buffer[:500])!r}")
            return False
        self._body_at = end + 4
        if b"transfer-encoding: chunked" not in head:
            self._end_at = self._body_at + int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
        return True

    def _finish(self) -> None:
        if self._end_at < 0 and (b"data: [DONE]" not in self._buffer[-40:] or b'data: {"error"' in self._buffer):
            self._fail(f"a stream ended with {bytes(self._buffer[-200:])!r}")
        elif self._done is not None and not self._done.done():
            self._done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"connection lost: {exc}")

    def _fail(self, reason: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(RuntimeError(reason))

    def close(self) -> None:
        self._transport.close()


def closed_loop(url: str, requests: Sequence[bytes], *, clients: int, calls: int) -> Load:
    """So many clients that each ask again after each answer."""
    return _run(_closed_loop(url, requests, clients, calls))


def one_each(url: str, requests: Sequence[bytes], *, clients: int, spread_seconds: float = 0.0) -> Load:
    """One call of each client; the calls begin together, or over some time."""
    return _run(_one_each(url, requests, clients, spread_seconds))


def in_turns(asked: Sequence[tuple[str, bytes]], *, calls: int, warm_up: int = 20) -> list[Load]:
    """One client that asks each address in turn, so that other work on the machine disturbs all of them alike."""
    return _run(_in_turns(asked, calls, warm_up))


def _run(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


async def _connected(url: str, count: int) -> list[Client]:
    loop, address = asyncio.get_running_loop(), urlsplit(url)
    return [(await loop.create_connection(Client, address.hostname, address.port))[1] for _ in range(count)]


async def _closed_loop(url: str, requests: Sequence[bytes], clients: int, calls: int) -> Load:
    connected = await _connected(url, clients)
    each, remaining = itertools.cycle(requests), iter(range(calls))
    seconds: list[float] = []

    async def one(client: Client) -> None:
        for _ in remaining:
            asked = time.perf_counter()
            await client.ask(next(each))
            seconds.append(time.perf_counter() - asked)

    await _together(one(client) for client in connected)
    for client in connected:
        client.close()
    return Load(seconds, ())


async def _one_each(url: str, requests: Sequence[bytes], clients: int, spread_seconds: float) -> Load:
    connected = await _connected(url, clients)
    seconds: list[float] = []
    first: list[float] = []

    async def one(number: int, client: Client) -> None:
        await asyncio.sleep(spread_seconds * number / clients)
        asked = time.perf_counter()
        await client.ask(requests[number % len(requests)])
        seconds.append(time.perf_counter() - asked)
        first.append(client.first_at - asked)

    await _together(one(number, client) for number, client in enumerate(connected))
    for client in connected:
        client.close()
    return Load(seconds, first)


async def _in_turns(asked: Sequence[tuple[str, bytes]], calls: int, warm_up: int) -> list[Load]:
    clients = [(await _connected(url, 1))[0] for url, _ in asked]
    seconds: list[list[float]] = [[] for _ in asked]
    first: list[list[float]] = [[] for _ in asked]
    for number in range(-warm_up, calls):
        for index, (client, (_, request)) in enumerate(zip(clients, asked, strict=True)):
            began = time.perf_counter()
            await client.ask(request)
            if number >= 0:
                seconds[index].append(time.perf_counter() - began)
                first[index].append(client.first_at - began)
    for client in clients:
        client.close()
    return [Load(*one) for one in zip(seconds, first, strict=True)]


async def _together(work: Iterator[Awaitable[None]]) -> None:
    await asyncio.gather(*work)
