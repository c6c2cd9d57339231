"""`AsyncClient` against the real API: the methods of `Client`, a free event loop, threads that end."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import threading
from collections.abc import AsyncIterator, Callable
from types import CodeType
from typing import Any, cast

import psycopg
import pytest

from leyden import AsyncClient, Attempt, Client, Conflict, NotFound, Refused, Unreachable
from leyden.libs.client import attempts
from leyden.libs.client.transport import Transport
from tests.contract.client.test_attempts import endpoints, ends, leyden, waiting
from tests.fakes.served_api import TOKEN
from tests.support.builders import run_document
from tests.support.shared import ROOT, refusing_port
from tests.support.waiting import until

__all__ = ["endpoints", "leyden"]

HOW_TO = ROOT / "docs/how-to/python.md"


def threads() -> list[str]:
    """Names of the client's threads that live."""
    return [one.name for one in threading.enumerate() if one.name.startswith(("leyden", "attempt", "heartbeat"))]


def no_threads() -> None:
    # A thread lives a moment longer than its last work.
    until(lambda: not threads(), "the threads end", 60)


@pytest.fixture
async def client(api_url: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(api_url, TOKEN, patience_seconds=0.0) as client:
        yield client
    no_threads()


class Slow:
    """Holds each GET until `go` is set; `asked` counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.asked = threading.Event(), threading.Semaphore(0)
        self.paths: list[str] = []
        get = Transport.get

        def slow(transport: Transport, path: str, *more: Any) -> bytes:
            self.paths.append(path)
            self.asked.release()
            assert self.go.wait(60)
            return get(transport, path, *more)

        monkeypatch.setattr(Transport, "get", slow)


def test_its_methods_and_their_parameters_are_those_of_the_client() -> None:
    def public(kind: type) -> dict[str, Callable[..., Any]]:
        return {name: method for name, method in vars(kind).items() if not name.startswith("_")}

    def parameters(method: Callable[..., Any]) -> list[str]:
        return list(inspect.signature(method).parameters)

    assert {name: parameters(method) for name, method in public(AsyncClient).items()} == {
        name: parameters(method) for name, method in public(Client).items()
    }
    assert inspect.signature(AsyncClient) == inspect.signature(Client)
    for name, method in public(Client).items():
        lists = inspect.signature(method).return_annotation.startswith(("Iterator", "Generator"))
        waits = not lists and name != "attempt"
        assert inspect.iscoroutinefunction(getattr(AsyncClient, name)) == waits, name


async def test_it_creates_lists_and_cancels_a_run(client: AsyncClient) -> None:
    dataset = await client.upload_dataset("questions", ({"number": number} for number in range(450)))
    assert await client.dataset("questions") == dataset
    assert [task.number async for task in client.tasks("questions")] == list(range(450))
    made = await client.create_run(run_document(name="first"), key="k")
    assert await client.create_run(run_document(name="first"), key="k") == made == await client.find_run("first")
    assert [run.id async for run in client.runs(name="first")] == [made.id]
    rows = await client.export(made.id, "openai")
    assert ([row async for row in rows], rows.left_out) == ([], {})
    assert (await client.cancel_run(made.id)).allowed_actions == []


async def test_errors_are_those_of_the_client(client: AsyncClient) -> None:
    await client.upload_dataset("questions", b'{"a": 1}')
    run = await client.create_run(run_document())
    await client.cancel_run(run.id)
    with pytest.raises(NotFound, match="list runs"):
        await client.find_run("nobody")
    with pytest.raises(Conflict) as conflict:
        await client.pause_run(run.id)
    assert conflict.value.problem is not None and conflict.value.problem.allowed_actions == []
    with pytest.raises(Refused, match="no format is called"):
        await client.export(run.id, "csv")
    with pytest.raises(NotFound):
        [task async for task in client.tasks("nothing")]
    with pytest.raises(Conflict, match="the platform's to start"):
        await client.work(run.id, lambda _: asyncio.sleep(0), at_once=2)
    with refusing_port() as port:
        async with AsyncClient(f"http://127.0.0.1:{port}", patience_seconds=0.0) as unreachable:
            with pytest.raises(Unreachable, match="leyden up"):
                await unreachable.health()


async def test_twenty_requests_wait_at_once_and_the_loop_goes_on(
    client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.upload_dataset("questions", b'{"a": 1}')
    slow = Slow(monkeypatch)
    asked = [asyncio.create_task(client.dataset("questions")) for _ in range(20)]
    for _ in range(20):
        # Each is held in its thread: a loop that was blocked would not start the next one.
        assert await asyncio.to_thread(slow.asked.acquire, timeout=60)
    assert not any(task.done() for task in asked)
    slow.go.set()
    assert {dataset.name for dataset in await asyncio.gather(*asked)} == {"questions"}


async def test_a_list_that_is_cancelled_or_left_reads_no_further_page(
    client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.upload_dataset("many", ({"number": number} for number in range(450)))
    slow = Slow(monkeypatch)
    seen: list[int] = []

    async def read() -> None:
        async for task in client.tasks("many"):
            seen.append(task.number)

    reading = asyncio.create_task(read())
    assert await asyncio.to_thread(slow.asked.acquire, timeout=60)
    slow.go.set()
    while not seen:
        await asyncio.sleep(0)
    slow.go.clear()
    # The first page is read to its end; the second one is asked for, and never comes.
    assert await asyncio.to_thread(slow.asked.acquire, timeout=60)
    reading.cancel()
    await asyncio.wait([reading])
    assert reading.cancelled() and seen == list(range(200)) and len(slow.paths) == 2
    slow.go.set()
    until(lambda: not [name for name in threads() if name.startswith("leyden list")], "its thread ends", 60)
    async for task in client.tasks("many"):
        if task.number == 10:
            break
    until(lambda: not [name for name in threads() if name.startswith("leyden list")], "its thread ends", 60)
    assert len(slow.paths) == 3


async def test_closing_ends_an_open_list_which_then_says_so(api_url: str) -> None:
    async with AsyncClient(api_url, TOKEN, patience_seconds=0.0) as client:
        await client.upload_dataset("many", ({"number": number} for number in range(450)))
        tasks = client.tasks("many")
        assert (await anext(tasks)).number == 0
    no_threads()
    with pytest.raises(RuntimeError, match="after shutdown"):
        await anext(tasks)
    with pytest.raises(RuntimeError, match="after shutdown"):
        await client.health()


def asynchronous(leyden: Client) -> AsyncClient:
    """A client with the address and the token of another."""
    http = leyden._http._client
    return AsyncClient(str(http.base_url), http.headers["authorization"].removeprefix("Bearer "), patience_seconds=0.0)


def test_a_coroutine_function_works_until_the_run_has_ended(leyden: Client, postgres_dsn: str) -> None:
    run = waiting(postgres_dsn, 6)

    async def agent(attempt: Attempt) -> Any:
        with psycopg.connect(postgres_dsn, autocommit=True) as connection:
            # Ends with the last task, once all are leased.
            connection.execute(
                "UPDATE run_status SET phase = 'completed' WHERE (SELECT count(*) FROM attempts) = 6 AND run_id = %s",
                [run],
            )
        await asyncio.sleep(0)
        if attempt.leased.number == 1 and not failed:
            failed.append(attempt)
            raise ValueError("the first one fails")
        return 1.0

    async def work() -> int:
        async with asynchronous(leyden) as client:
            return await client.work(run, agent, at_once=3)

    failed: list[Attempt] = []
    assert asyncio.run(work()) == 6
    assert sorted(kind for kind, *_ in ends(postgres_dsn)) == ["agent_error"] + ["succeeded"] * 5
    no_threads()


def test_cancelled_work_gives_its_attempts_back(
    leyden: Client, postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = waiting(postgres_dsn, 1)
    monkeypatch.setattr("leyden.libs.client.client.WAIT_SECONDS", 1.0)
    monkeypatch.setattr(attempts, "WAIT_SECONDS", 1.0)

    async def cancel() -> None:
        begun = asyncio.Event()

        async def agent(_: Attempt) -> None:
            begun.set()
            await asyncio.Event().wait()

        async with asynchronous(leyden) as client:
            working = asyncio.create_task(client.work(run, agent, at_once=2))
            await begun.wait()
            working.cancel()
            await asyncio.wait([working])
            assert working.cancelled()

    asyncio.run(cancel())
    no_threads()
    with psycopg.connect(postgres_dsn) as connection:
        assert connection.execute("SELECT count(*) FROM attempts WHERE state = 'running'").fetchone() == (0,)
    assert {kind for kind, *_ in ends(postgres_dsn)} == {"infra_error"}


def test_an_attempt_of_a_list_whose_block_never_began_is_given_back(leyden: Client, postgres_dsn: str) -> None:
    run = waiting(postgres_dsn, 1)

    async def leave() -> None:
        async with asynchronous(leyden) as client:
            async for attempt in client.attempts(run):
                assert attempt.task
                break

    asyncio.run(leave())
    no_threads()
    assert [kind for kind, *_ in ends(postgres_dsn)] == ["infra_error"]


async def test_the_examples_of_the_how_to_run(
    api_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LEYDEN_URL", api_url)
    monkeypatch.setenv("LEYDEN_TOKEN", TOKEN)
    cells = re.findall(r"```python\n(.*?)```", HOW_TO.read_text(), re.DOTALL)
    assert len(cells) == 2
    for cell in cells:
        # As notebooks run a cell.
        code = cast(CodeType, compile(cell, str(HOW_TO), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT))
        names: dict[str, Any] = {}
        ran = eval(code, names)  # the document's
        if inspect.isawaitable(ran):
            await ran
    printed = capsys.readouterr().out
    assert printed.count("0 2+3\n1 4+4\n") == 2 and "\nsums " in printed
    no_threads()
