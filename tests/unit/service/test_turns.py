"""The order in which requests begin."""

from __future__ import annotations

import asyncio

import pytest

from leyden.libs.service import turns
from leyden.libs.service.turns import Turns


@pytest.fixture(autouse=True)
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """No turn takes long."""
    monkeypatch.setattr(turns, "SECONDS_APART", 60.0)


class Requests:
    """Each takes some steps, one a turn of the loop; `steps` is what was done, in order."""

    def __init__(self) -> None:
        self.turns = Turns(asyncio.get_running_loop())
        self.steps: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []

    def come(self, name: str) -> None:
        self.turns.take(lambda: self.tasks.append(asyncio.create_task(self._work(name))))

    async def _work(self, name: str) -> None:
        for step in range(3):
            self.steps.append(f"{name}{step}")
            await asyncio.sleep(0)

    async def ended(self, count: int) -> None:
        async with asyncio.timeout(60):
            while sum(task.done() for task in self.tasks) < count:
                await asyncio.sleep(0)


async def test_requests_begin_as_they_came_and_what_has_begun_goes_first() -> None:
    requests = Requests()
    for name in "abc":
        requests.come(name)
    await requests.ended(3)
    assert requests.steps == ["a0", "a1", "a2", "b0", "b1", "b2", "c0", "c1", "c2"]


async def test_a_request_that_comes_while_another_waits_begins_after_it() -> None:
    requests = Requests()
    requests.come("a")
    requests.come("b")
    await requests.ended(1)
    requests.come("c")
    await requests.ended(3)
    assert requests.steps == ["a0", "a1", "a2", "b0", "b1", "b2", "c0", "c1", "c2"]


async def test_a_lone_request_begins_at_once() -> None:
    requests = Requests()
    requests.come("a")
    assert len(requests.tasks) == 1
    await requests.ended(1)
    await asyncio.sleep(0.01)
    requests.come("b")
    assert len(requests.tasks) == 2
    await requests.ended(2)


async def test_where_turns_take_long_a_request_begins_with_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "SECONDS_APART", 0.0)
    requests = Requests()
    for name in "abc":
        requests.come(name)
    await requests.ended(3)
    begun = [requests.steps.index(f"{name}0") for name in "abc"]
    assert begun == sorted(begun)
    assert begun[1] < requests.steps.index("a2")
