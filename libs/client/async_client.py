"""The client for asyncio: each method runs the one of `Client` in a thread, and `async for` reads lists.

Each request is defined in `Client` alone, and exceptions are its own. A cancelled call returns at once. A request that
was sent by then goes on to its end in its thread, and `close` waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import wraps
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from leyden.libs.client.attempts import Attempt, Result, RewardRefused, attempts_until
from leyden.libs.client.client import Client
from leyden.libs.client.export import Export
from leyden.libs.contracts.conversation import Json

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
Opened = dict[ThreadPoolExecutor, Callable[[], object]]
"""Threads of open lists, with the function that ends each."""

THREADS = 32
"""Requests at once; further ones wait for a thread. An open list has its own."""
END = object()


class Items(AsyncIterator[T], Generic[T]):
    """A list for one `async for`: its thread reads an item when it is asked for, and ends with the list."""

    def __init__(self, items: Iterable[T], opened: Opened, stop: Event | None = None) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="leyden list")
        self._items = _each(items)
        self._is_over = False
        # A list that is left by `break` ends when nothing refers to it any more.
        self._end = weakref.finalize(self, _end, self._items, self._thread, opened, stop)
        self._end.atexit = False
        opened[self._thread] = self._end

    async def __anext__(self) -> T:
        if self._is_over:
            raise StopAsyncIteration
        try:
            item: Any = await asyncio.wrap_future(self._thread.submit(next, self._items, END))
        except BaseException:
            self.end()
            raise
        if item is END:
            self.end()
            raise StopAsyncIteration
        return item  # type: ignore[no-any-return]  # END is the only other object

    def end(self) -> None:
        """Ends the list, after the item that its thread reads."""
        self._is_over = True
        self._end()


class AsyncExport(Items[Json]):
    """The rows of an export; after the last one, `left_out` has what is in none of them and why."""

    def __init__(self, export: Export, opened: Opened) -> None:
        super().__init__(export, opened)
        self._export = export

    @property
    def left_out(self) -> dict[str, int]:
        """See `Export.left_out`."""
        return self._export.left_out

    async def write_parquet(self, path: Path) -> int:
        """See `Export.write_parquet`."""
        try:
            return await asyncio.wrap_future(self._thread.submit(self._export.write_parquet, path))
        finally:
            self.end()


def _each(items: Iterable[T]) -> Generator[T, None, None]:
    yield from items


def _end(items: Generator[Any, None, None], thread: ThreadPoolExecutor, opened: Opened, stop: Event | None) -> None:
    if stop is not None:
        stop.set()
    # In the thread: closing gives back an attempt that nobody plays, which is a request.
    ended: Future[None] = thread.submit(items.close)
    ended.add_done_callback(lambda _: opened.pop(thread, None))
    thread.shutdown(wait=False)


def _made(method: Callable[Concatenate[Client, P], T]) -> Callable[Concatenate[AsyncClient, P], T]:
    """A method that sends nothing."""

    @wraps(method)
    def make(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(self._client, *args, **kwargs)

    return make


def _answer(
    method: Callable[Concatenate[Client, P], T],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    """A method to await."""

    @wraps(method)
    async def ask(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.wrap_future(self._pool.submit(method, self._client, *args, **kwargs))

    return ask


def _list(
    method: Callable[Concatenate[Client, P], Iterator[T]],
) -> Callable[Concatenate[AsyncClient, P], Items[T]]:
    """A list for `async for`; the first request is sent when the first item is asked for."""

    @wraps(method)
    def read(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> Items[T]:
        return Items(method(self._client, *args, **kwargs), self._opened)

    return read


def _export(
    method: Callable[Concatenate[Client, P], Export],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, AsyncExport]]:
    """An export to await, then to read by `async for`."""
    answer = _answer(method)

    @wraps(method)
    async def ask(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> AsyncExport:
        return AsyncExport(await answer(self, *args, **kwargs), self._opened)

    return ask


class AsyncClient:
    """A client of one platform, for asyncio. Its methods are those of `Client`, and so are its arguments.

    A cancelled call returns at once, and its request goes on in its thread: the platform may still do it, and `close`
    waits for it. A repeat does nothing twice where the method has a `key`, and both calls give the same one.
    """

    def __init__(
        self, base_url: str, token: str | None = None, *, timeout_seconds: float = 60.0, patience_seconds: float = 10.0
    ) -> None:
        self._client = Client(base_url, token, timeout_seconds=timeout_seconds, patience_seconds=patience_seconds)
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="leyden")
        self._opened: Opened = {}

    async def close(self) -> None:
        """Ends open lists, waits for requests that were sent, ends the threads and closes the connections."""
        opened = self._opened.copy()
        for end in opened.values():
            end()

        def close() -> None:
            for thread in (self._pool, *opened):
                thread.shutdown()
            self._client.close()

        closer = ThreadPoolExecutor(1, thread_name_prefix="leyden close")
        closed = closer.submit(close)
        closer.shutdown(wait=False)
        await asyncio.shield(asyncio.wrap_future(closed))

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def attempts(self, run_id: str, *, agent_name: str | None = None, worker: str = "client") -> Items[Attempt]:
        """Attempts until the run has ended, each for an `async with` of its own. Args: as those of `attempt`"""
        stop = Event()
        found = attempts_until(self._client._next_attempt(run_id, agent_name, worker), stop)
        return Items(found, self._opened, stop)

    async def work(
        self,
        run_id: str,
        agent: Callable[[Attempt], Awaitable[Result]],
        *,
        agent_name: str | None = None,
        at_once: int = 1,
        worker: str = "client",
    ) -> int:
        """Runs a coroutine function as the agent of a run until the run has ended; returns the number of attempts.

        Args:   agent: as that of `Client.work`, awaited; agent_name, worker: as those of `attempt`; at_once: tasks
        Raises: RewardRefused: as `Client.work`
        """

        async def play() -> int:
            played, attempts = 0, self.attempts(run_id, agent_name=agent_name, worker=worker)
            try:
                async for attempt in attempts:
                    played += 1
                    try:
                        async with attempt:
                            attempt.take(await agent(attempt))
                    except RewardRefused:
                        raise
                    except Exception:
                        leased = attempt.leased
                        log.warning("attempt %s of %s failed", leased.number, leased.rollout_id, exc_info=True)
            finally:
                attempts.end()
            return played

        tasks = [asyncio.create_task(play()) for _ in range(at_once)]
        try:
            return sum(await asyncio.gather(*tasks))
        finally:
            # The others of one that was refused.
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    health = _answer(Client.health)
    upload_dataset = _answer(Client.upload_dataset)
    dataset = _answer(Client.dataset)
    datasets = _list(Client.datasets)
    tasks = _list(Client.tasks)
    delete_dataset = _answer(Client.delete_dataset)
    create_run = _answer(Client.create_run)
    run = _answer(Client.run)
    find_run = _answer(Client.find_run)
    runs = _list(Client.runs)
    pause_run = _answer(Client.pause_run)
    resume_run = _answer(Client.resume_run)
    continue_run = _answer(Client.continue_run)
    cancel_run = _answer(Client.cancel_run)
    prune_run = _answer(Client.prune_run)
    delete_run = _answer(Client.delete_run)
    evaluate_run = _answer(Client.evaluate_run)
    evaluations = _list(Client.evaluations)
    evaluation = _answer(Client.evaluation)
    steps = _list(Client.steps)
    metrics = _answer(Client.metrics)
    alarms = _list(Client.alarms)
    compare_runs = _answer(Client.compare_runs)
    curves = _answer(Client.curves)
    changes = _list(Client.changes)
    agents = _list(Client.agents)
    run_tasks = _list(Client.run_tasks)
    policies = _list(Client.policies)
    version_files = _answer(Client.version_files)
    download_version = _answer(Client.download_version)
    samples = _list(Client.samples)
    rollouts = _list(Client.rollouts)
    causes = _answer(Client.causes)
    export = _export(Client.export)
    group = _answer(Client.group)
    rollout = _answer(Client.rollout)
    calls = _list(Client.calls)
    call_tokens = _answer(Client.call_tokens)
    trajectory = _list(Client.trajectory)
    artifact = _answer(Client.artifact)
    spans = _list(Client.spans)
    give_reward = _answer(Client.give_reward)
    rate = _answer(Client.rate)
    waiting = _list(Client.waiting)
    platform = _answer(Client.platform)
    grade = _answer(Client.grade)
    add_duel = _answer(Client.add_duel)
    duels = _list(Client.duels)
    regrade = _answer(Client.regrade)
    attempt = _made(Client.attempt)
    pools = _list(Client.pools)
    recipes = _list(Client.recipes)
    engines = _list(Client.engines)
    create_token = _answer(Client.create_token)
    rotate_token = _answer(Client.rotate_token)
    audit = _list(Client.audit)
    tokens = _list(Client.tokens)
    revoke_token = _answer(Client.revoke_token)
