"""What a client gets of a call as it grows: all of it, in order, and no more at once than it takes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest

from leyden.services.gateway.answer import KEEPALIVE
from leyden.services.gateway.stream import Follower

LONG = 60.0


class Growing:
    """A call, and the stream of its only choice: what is said is showable at once."""

    def __init__(self) -> None:
        self._showable = b""
        self._tells: list[Callable[[], None]] = []
        self.task = asyncio.get_running_loop().create_future()

    @contextmanager
    def watched(self, tell: Callable[[], None]) -> Iterator[None]:
        self._tells.append(tell)
        yield
        self._tells.remove(tell)

    def say(self, text: bytes) -> None:
        self._showable += text
        for tell in self._tells:
            tell()

    def end(self) -> None:
        self.task.set_result(None)
        self.say(b"")

    def event(self) -> bytes:
        if self._showable == b"unspeakable":
            raise LookupError("no such token")
        text, self._showable = self._showable, b""
        return text


class Client:
    """Takes what is sent to it while it `reads`; `got` is each piece, with the way that it came."""

    def __init__(self) -> None:
        self.got: list[tuple[str, bytes]] = []
        self.reads = asyncio.Event()
        self.reads.set()

    async def send(self, data: bytes) -> None:
        await self.reads.wait()
        self.got.append(("sent", data))

    def write(self, data: bytes) -> bool:
        self.got.append(("written", data))
        return self.reads.is_set()

    async def has(self, count: int) -> None:
        async with asyncio.timeout(LONG):
            while len(self.got) < count:
                await asyncio.sleep(0.001)


@asynccontextmanager
async def followed(
    client: Client, *, writes: bool = True, seconds: float = LONG
) -> AsyncIterator[tuple[Growing, asyncio.Task[None]]]:
    call: Any = Growing()
    follower = Follower([call], client.send, client.write if writes else None, seconds)
    following = asyncio.create_task(follower.follow(call, call.task, seconds))
    await asyncio.sleep(0)
    try:
        yield call, following
    finally:
        following.cancel()
        await asyncio.wait({following})


async def test_after_the_first_piece_each_is_written_before_who_tells_of_it_goes_on():
    client = Client()
    async with followed(client) as (call, following):
        call.say(b"a")
        await client.has(1)
        call.say(b"b")
        call.say(b"c")
        assert client.got == [("sent", b"a"), ("written", b"b"), ("written", b"c")]
        call.end()
        await following
    assert client.got == [("sent", b"a"), ("written", b"b"), ("written", b"c")]


async def test_a_client_that_is_behind_gets_nothing_more_until_it_reads_and_then_all_of_it_in_order():
    client = Client()
    async with followed(client) as (call, _):
        call.say(b"a")
        await client.has(1)
        client.reads.clear()
        call.say(b"b")
        for _ in range(3):
            call.say(b"c")
            await asyncio.sleep(0.01)
        assert client.got == [("sent", b"a"), ("written", b"b")]
        client.reads.set()
        # Whoever waited has not gone on yet: nothing may pass what it holds.
        call.say(b"d")
        await client.has(3)
        call.say(b"e")
        await client.has(4)
    assert b"".join(data for _, data in client.got) == b"abcccde"


async def test_a_server_that_cannot_be_written_past_is_sent_everything():
    client = Client()
    async with followed(client, writes=False) as (call, _):
        for count, text in enumerate((b"a", b"b"), 1):
            call.say(text)
            await client.has(count)
    assert client.got == [("sent", b"a"), ("sent", b"b")]


async def test_a_pause_is_filled_before_the_first_piece_and_after_it():
    client = Client()
    async with followed(client, seconds=0.05) as (call, _):
        await client.has(1)
        call.say(b"a")
        await client.has(len(client.got) + 1)
    assert (client.got[0], client.got[-1]) == (("sent", KEEPALIVE), ("sent", KEEPALIVE))
    assert [piece for piece in client.got if piece != ("sent", KEEPALIVE)] == [("written", b"a")]


async def test_a_pause_after_the_first_piece_is_filled_though_the_first_piece_had_longer():
    client = Client()
    call: Any = Growing()
    follower = Follower([call], client.send, client.write, 0.05)
    following = asyncio.create_task(follower.follow(call, call.task, LONG))
    await asyncio.sleep(0)
    call.say(b"a")
    await client.has(2)
    following.cancel()
    await asyncio.wait({following})
    assert client.got[:2] == [("sent", b"a"), ("sent", KEEPALIVE)]


async def test_what_cannot_be_shown_is_the_listeners_trouble_and_not_the_engines():
    client = Client()
    async with followed(client) as (call, following):
        call.say(b"a")
        await client.has(1)
        call.say(b"unspeakable")
        with pytest.raises(LookupError, match="no such token"):
            await following
    assert client.got == [("sent", b"a")]
