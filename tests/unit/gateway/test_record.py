"""Group commit: what shares a transaction, and what waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from leyden.libs.store.calls import CallRefused, NewCall, StoreAway
from leyden.services.gateway import record
from leyden.services.gateway.errors import GatewayError, Unavailable
from leyden.services.gateway.record import Recorder


@dataclass
class Row:
    id: str


@dataclass
class FakeWriter:
    """Memory. `away` writes fail before the store is back; rows named `bad` are refused."""

    away: int = 0
    lose_answer: bool = False
    batches: list[tuple[list[str], bool]] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    async def write(self, calls: Sequence[NewCall], *, may_exist: bool = False) -> None:
        await self.gate.wait()
        names = [call.id for call in calls]
        if self.away > 0:
            self.away -= 1
            raise StoreAway("no route")
        if "bad" in names:
            raise CallRefused("no partition")
        if "broken" in names:
            raise TypeError("a bug")
        self.batches.append((names, may_exist))

    async def close(self) -> None:
        pass


def rows(*names: str) -> list[NewCall]:
    return [cast(NewCall, Row(name)) for name in names]


@asynccontextmanager
async def recording(writer: FakeWriter, *, hold_seconds: float = 5.0) -> AsyncIterator[Recorder]:
    recorder = Recorder(writer, hold_seconds=hold_seconds)
    loop = asyncio.create_task(recorder.run())
    try:
        yield recorder
    finally:
        loop.cancel()


async def test_calls_that_wait_for_a_commit_share_the_next_one():
    writer = FakeWriter()
    async with recording(writer) as recorder:
        waiting = [asyncio.create_task(recorder.record(rows(name))) for name in "abc"]
        await asyncio.sleep(0)
        waiting.append(asyncio.create_task(recorder.record(rows("d", "e"))))
        await asyncio.sleep(0)
        writer.gate.set()
        await asyncio.gather(*waiting)
    assert [name for names, _ in writer.batches for name in names] == ["a", "b", "c", "d", "e"]
    assert len(writer.batches) <= 2


async def test_a_store_that_comes_back_gets_the_calls_again_as_possibly_known(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(record, "RETRY_SECONDS", 0.01)
    writer = FakeWriter(away=2)
    writer.gate.set()
    async with recording(writer) as recorder:
        await recorder.record(rows("a"))
        await recorder.record(rows("b"))
    assert writer.batches == [(["a"], True), (["b"], False)]


async def test_a_call_whose_hold_is_over_fails_and_later_ones_go_on(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(record, "RETRY_SECONDS", 0.01)
    writer = FakeWriter(away=3)
    writer.gate.set()
    async with recording(writer, hold_seconds=0.001) as recorder:
        with pytest.raises(Unavailable):
            await recorder.record(rows("a"))
        writer.away = 0
        await recorder.record(rows("b"))
    assert writer.batches == [(["b"], False)]


@pytest.mark.parametrize("name", ["bad", "broken"])
async def test_a_refused_call_fails_alone(name):
    writer = FakeWriter()
    async with recording(writer) as recorder:
        first = asyncio.create_task(recorder.record(rows("first")))
        await asyncio.sleep(0)
        refused = asyncio.create_task(recorder.record(rows(name)))
        writer.gate.set()
        await first
        with pytest.raises(GatewayError):
            await refused
        if name == "bad":
            others = [asyncio.create_task(recorder.record(rows(n))) for n in ("x", "bad", "broken", "y")]
            results: list[Any] = await asyncio.gather(*others, return_exceptions=True)
            assert [isinstance(result, GatewayError) for result in results] == [False, True, True, False]
        await recorder.record(rows("last"))


async def test_whoever_stops_waiting_does_not_stop_the_write():
    writer = FakeWriter()
    async with recording(writer) as recorder:
        waiting = asyncio.create_task(recorder.record(rows("a")))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.wait({waiting})
        writer.gate.set()
        await recorder.drain()
    assert writer.batches == [(["a"], False)]
