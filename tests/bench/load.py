"""A load generator on bare sockets: closed loops, shares of what saturates, and streams; runs in a process of its own.

Whatever is not a whole answer with status 200 is an error and ends the run.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import deque
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import psycopg
import uvloop

T = TypeVar("T")


@dataclass(frozen=True)
class Load:
    """What a load saw: seconds of each call, to its end and to its first byte of body, and of all together."""

    seconds: Sequence[float]
    first_seconds: Sequence[float]
    wall_seconds: float
    events: int

    @property
    def rate(self) -> float:
        """Calls per second."""
        return len(self.seconds) / self.wall_seconds


@dataclass(frozen=True)
class Spells:
    """How calls come while a machine is at a share of what saturates it.

    Args: evenly: each connection's calls at even distances, as those of wrk2; otherwise by chance (Poisson), whether or
        not earlier ones were answered; saturating: calls that find the rate
    """

    connections: int
    evenly: bool
    share: float
    count: int
    saturating: int
    calls: int


class Client(asyncio.Protocol):
    """One connection that is kept; a request at a time."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._body_at = self._end_at = -1
        self._done: asyncio.Future[None] | None = None
        self.first_at = 0.0
        self.events = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    async def ask(self, request: bytes) -> None:
        """Returns when the answer is whole.

        Raises: RuntimeError: it is no 200, or broke off
        """
        self._done = asyncio.get_running_loop().create_future()
        self._buffer.clear()
        self._body_at = self._end_at = -1
        self.first_at, self.events = 0.0, 0
        self._transport.write(request)
        await self._done

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._body_at < 0 and not self._read_head():
            return
        if not self.first_at and len(self._buffer) > self._body_at:
            self.first_at = time.perf_counter()
        if self._end_at < 0:
            # Answers in chunks are event streams: only the last chunk is empty.
            self.events += data.count(b"data: {")
            whole = self._buffer.endswith(b"\r\n0\r\n\r\n")
        else:
            whole = len(self._buffer) >= self._end_at
        if whole:
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

    def _fail(self, why: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(RuntimeError(why))

    def close(self) -> None:
        self._transport.close()


def closed_loop(url: str, requests: Sequence[bytes], *, clients: int, calls: int) -> Load:
    """So many clients that each ask again as soon as they are answered."""
    return _run(_closed_loop(url, requests, clients, calls))


def at_share(url: str, requests: Sequence[bytes], beside: tuple[str, bytes], spells: Spells) -> tuple[Load, Load]:
    """Calls at a share of what saturates, and as many at the same rate of another address.

    A shared machine saturates at another rate a few seconds later, so each spell follows the rate that was found right
    before it. A call's seconds count from when it was due: one that waits for a free connection is late.
    """
    return _run(_at_share(url, requests, beside, spells))


def one_each(url: str, requests: Sequence[bytes], *, clients: int, spread_seconds: float = 0.0) -> Load:
    """One call of each client, begun together or over a time."""
    return _run(_one_each(url, requests, clients, spread_seconds))


def in_turns(asked: Sequence[tuple[str, bytes]], *, calls: int, warm_up: int = 20) -> list[Load]:
    """One client; calls go to each address in turn, so that a busy machine is busy for all of them."""
    return _run(_in_turns(asked, calls, warm_up))


def commits(dsn: str, *, size_bytes: int, count: int) -> list[float]:
    """Seconds of lone commits of one row of that size."""
    seconds = []
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS alone (content bytea)")
        for _ in range(count):
            began = time.perf_counter()
            connection.execute("INSERT INTO alone VALUES (%s)", [random.randbytes(size_bytes)])
            seconds.append(time.perf_counter() - began)
    return seconds


def _run(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


async def _connected(url: str, count: int) -> list[Client]:
    loop, address = asyncio.get_running_loop(), urlsplit(url)
    clients = []
    for _ in range(count):
        _, client = await loop.create_connection(Client, address.hostname, address.port)
        clients.append(client)
    return clients


def _closed(clients: Sequence[Client]) -> None:
    for client in clients:
        client.close()


async def _at_share(
    url: str, requests: Sequence[bytes], beside: tuple[str, bytes], spells: Spells
) -> tuple[Load, Load]:
    connected = await _connected(url, spells.connections)
    others = await _connected(beside[0], spells.connections)
    each, same = itertools.cycle(requests), itertools.repeat(beside[1])
    paced = _evenly if spells.evenly else _by_chance
    found = []
    for _ in range(spells.count):
        rate = spells.share * (await _saturating(connected, each, spells.saturating)).rate
        through = await paced(connected, each, rate, spells.calls)
        found.append((through, await paced(others, same, rate, spells.calls)))
    _closed([*connected, *others])
    through, direct = (_joined(loads) for loads in zip(*found, strict=True))
    return through, direct


def _joined(loads: Sequence[Load]) -> Load:
    return Load([one for load in loads for one in load.seconds], (), sum(load.wall_seconds for load in loads), 0)


async def _closed_loop(url: str, requests: Sequence[bytes], clients: int, calls: int) -> Load:
    connected = await _connected(url, clients)
    found = await _saturating(connected, itertools.cycle(requests), calls)
    _closed(connected)
    return found


async def _saturating(clients: Sequence[Client], each: Iterator[bytes], calls: int) -> Load:
    left = iter(range(calls))
    seconds: list[float] = []
    began = time.perf_counter()

    async def one(client: Client) -> None:
        for _ in left:
            asked = time.perf_counter()
            await client.ask(next(each))
            seconds.append(time.perf_counter() - asked)

    await _together(one(client) for client in clients)
    return Load(seconds, (), time.perf_counter() - began, 0)


async def _by_chance(clients: Sequence[Client], each: Iterator[bytes], rate: float, calls: int) -> Load:
    free = deque(clients)
    seconds: list[float] = []
    freed = asyncio.Condition()

    async def one(due: float) -> None:
        async with freed:
            await freed.wait_for(lambda: free)
            client = free.popleft()
        await client.ask(next(each))
        seconds.append(time.perf_counter() - due)
        async with freed:
            free.append(client)
            freed.notify()

    began = due = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(calls):
            due += random.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            group.create_task(one(due))
    return Load(seconds, (), time.perf_counter() - began, 0)


async def _evenly(clients: Sequence[Client], each: Iterator[bytes], rate: float, calls: int) -> Load:
    numbers = iter(range(calls))
    seconds: list[float] = []
    began = time.perf_counter()

    async def one(client: Client, place: int) -> None:
        for number in itertools.count():
            if next(numbers, None) is None:
                return
            due = began + (place + number * len(clients)) / rate
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            await client.ask(next(each))
            seconds.append(time.perf_counter() - due)

    await _together(one(client, place) for place, client in enumerate(clients))
    return Load(seconds, (), time.perf_counter() - began, 0)


async def _one_each(url: str, requests: Sequence[bytes], clients: int, spread_seconds: float) -> Load:
    connected = await _connected(url, clients)
    each = itertools.cycle(requests)
    seconds: list[float] = []
    firsts: list[float] = []

    async def one(client: Client, number: int) -> None:
        await asyncio.sleep(spread_seconds * number / clients)
        asked = time.perf_counter()
        await client.ask(next(each))
        seconds.append(time.perf_counter() - asked)
        firsts.append(client.first_at - asked)

    began = time.perf_counter()
    await _together(one(client, number) for number, client in enumerate(connected))
    events = sum(client.events for client in connected)
    _closed(connected)
    return Load(seconds, firsts, time.perf_counter() - began, events)


async def _in_turns(asked: Sequence[tuple[str, bytes]], calls: int, warm_up: int) -> list[Load]:
    clients = [(await _connected(url, 1))[0] for url, _ in asked]
    seconds: list[list[float]] = [[] for _ in asked]
    firsts: list[list[float]] = [[] for _ in asked]
    began = time.perf_counter()
    for number in range(warm_up + calls):
        for place, (client, (_, request)) in enumerate(zip(clients, asked, strict=True)):
            sent = time.perf_counter()
            await client.ask(request)
            if number >= warm_up:
                seconds[place].append(time.perf_counter() - sent)
                firsts[place].append(client.first_at - sent)
    wall = time.perf_counter() - began
    events = [client.events for client in clients]
    _closed(clients)
    return [Load(*each, wall, told) for *each, told in zip(seconds, firsts, events, strict=True)]


async def _together(works: Iterator[Coroutine[Any, Any, None]]) -> None:
    async with asyncio.TaskGroup() as group:
        for work in works:
            group.create_task(work)
