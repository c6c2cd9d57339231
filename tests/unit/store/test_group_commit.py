"""Group commit: which items share a transaction, and which wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from leyden.libs.store import group_commit
from leyden.libs.store.database import Refused, StoreAway
from leyden.libs.store.group_commit import GroupCommit
from tests.support.waiting import eventually


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_commit, "RETRY_SECONDS", 0.01)


@dataclass
class Store:
    """Memory. `away` writes fail before the store is back; items named `bad` are refused, `broken` ones hit a bug."""

    away: int = 0
    batches: list[tuple[list[str], bool]] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    async def write(self, items: Sequence[str], may_exist: bool) -> None:
        await self.gate.wait()
        if self.away > 0:
            self.away -= 1
            raise StoreAway("no route")
        if "bad" in items:
            raise Refused("no partition")
        if "broken" in items:
            raise TypeError("a bug")
        self.batches.append((list(items), may_exist))


@asynccontextmanager
async def committing(
    store: Store, *, hold_seconds: float = 5.0, max_items: int = 512
) -> AsyncIterator[GroupCommit[str]]:
    commits = GroupCommit[str](store.write, max_items=max_items, hold_seconds=hold_seconds)
    loop = asyncio.create_task(commits.run())
    try:
        yield commits
    finally:
        loop.cancel()


async def submitted(commits: GroupCommit[str], *items: str) -> asyncio.Task[None]:
    """A submission that waits."""
    task = asyncio.create_task(commits.submit(items))
    await asyncio.sleep(0)
    return task


async def test_items_that_wait_for_a_commit_share_the_next_one():
    store = Store()
    async with committing(store) as commits:
        waiting = [await submitted(commits, name) for name in "abc"]
        waiting.append(await submitted(commits, "d", "e"))
        store.gate.set()
        await asyncio.gather(*waiting)
    assert [name for names, _ in store.batches for name in names] == ["a", "b", "c", "d", "e"]
    assert len(store.batches) <= 2


async def test_the_first_failure_after_a_commit_is_repeated_at_once_and_further_ones_after_a_pause(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(group_commit, "RETRY_SECONDS", 3600.0)
    store = Store()
    store.gate.set()
    async with committing(store) as commits:
        for name in "ab":
            store.away = 1
            async with asyncio.timeout(10):
                await commits.submit([name])
        store.away = 2
        waiting = await submitted(commits, "c")
        await eventually(lambda: store.away == 0)
        assert not waiting.done()
    assert store.batches == [(["a"], True), (["b"], True)]


async def test_a_transaction_has_at_most_so_many_items_but_never_part_of_a_submission():
    store = Store()
    async with committing(store, max_items=2) as commits:
        waiting = [await submitted(commits, *names) for names in ("a", "bcd", "e", "f", "g")]
        store.gate.set()
        await asyncio.gather(*waiting)
    assert [names for names, _ in store.batches] == [["a"], ["b", "c", "d"], ["e", "f"], ["g"]]


async def test_items_are_written_again_as_possibly_existing_after_an_outage():
    store = Store(away=2)
    store.gate.set()
    async with committing(store) as commits:
        await commits.submit(["a"])
        await commits.submit(["b"])
    assert store.batches == [(["a"], True), (["b"], False)]


async def test_items_fail_after_their_time_out_and_later_ones_continue():
    store = Store(away=3)
    store.gate.set()
    async with committing(store, hold_seconds=0.001) as commits:
        with pytest.raises(StoreAway):
            await commits.submit(["a"])
        store.away = 0
        await commits.submit(["b"])
    assert store.batches == [(["b"], False)]


@pytest.mark.parametrize("name", ["bad", "broken"])
async def test_a_refused_submission_fails_alone(name):
    store = Store()
    async with committing(store) as commits:
        waiting = [await submitted(commits, item) for item in ("first", "x", name, "y")]
        store.gate.set()
        results: list[Any] = await asyncio.gather(*waiting, return_exceptions=True)
        await commits.submit(["last"])
    assert [isinstance(result, Refused) for result in results] == [False, False, True, False]
    assert sorted(item for items, _ in store.batches for item in items) == ["first", "last", "x", "y"]


async def test_cancelling_the_wait_does_not_stop_the_write():
    store = Store()
    async with committing(store) as commits:
        waiting = await submitted(commits, "a")
        waiting.cancel()
        await asyncio.wait({waiting})
        store.gate.set()
        await commits.drain()
    assert store.batches == [(["a"], False)]
