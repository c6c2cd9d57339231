from __future__ import annotations

import asyncio

from leyden.services.engine.gate import Gate


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_an_update_waits_for_requests_and_delays_new_ones() -> None:
    gate, seen, leave = Gate(), [], asyncio.Event()

    async def request(name: str) -> None:
        async with gate.request():
            seen.append(name)
            await leave.wait()

    async def update() -> None:
        async with gate.update():
            seen.append("update")

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(request("first"))
        await settled()
        tasks.create_task(update())
        await settled()
        tasks.create_task(request("second"))
        await settled()
        assert seen == ["first"]
        leave.set()
    assert seen == ["first", "update", "second"]


async def test_a_pause_delays_requests_and_allows_updates() -> None:
    gate, seen, leave = Gate(), [], asyncio.Event()

    async def request(name: str) -> None:
        async with gate.request():
            seen.append(name)
            await leave.wait()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(request("first"))
        await settled()
        await gate.set_paused(True)
        tasks.create_task(request("second"))
        await settled()
        async with gate.update():
            seen.append("update")
        assert seen == ["first", "update"]
        await gate.set_paused(False)
        await settled()
        assert seen == ["first", "update", "second"]
        leave.set()
