"""A client follows what changes in a run: through a killed API, and where no stream comes through."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest
from fastapi import FastAPI, Response

from leyden.libs.client import Client, changes
from leyden.libs.contracts.api.runs import RUN_PARTS
from leyden.libs.faults import FaultInjector
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from tests.contract.api.test_killed_regrades import TOKEN, api_process
from tests.fakes.served import served
from tests.support import builders
from tests.support.shared import ROOT, free_port


async def add_step(database: Database, run: tables.Run, number: int) -> None:
    async with database.session() as session:
        moment = datetime.now(tz=UTC)
        session.add(tables.Step(run_id=run.id, number=number, metrics={}, checkpoint="", started_at=moment))


async def named(found: Iterator[tuple[str, ...]]) -> tuple[str, ...]:
    """The next names; looks without any are passed over."""
    async with asyncio.timeout(120):
        while True:
            if names := await asyncio.to_thread(next, found):
                return names


async def test_no_change_is_lost_or_doubled_by_an_api_that_is_killed(
    database: Database, redis_url: str, tmp_path: Path
) -> None:
    run, port, injector = await builders.add_run(database), free_port(), FaultInjector(tmp_path / "faults")
    with Client(f"http://127.0.0.1:{port}", TOKEN) as client, closing(client.changes(run.id)) as found:
        async with api_process(database, redis_url, port, injector) as killed:
            assert await named(found) == RUN_PARTS
            await add_step(database, run, 1)
            assert await named(found) == ("steps",)
            killed.kill()
            assert await killed.wait() == -signal.SIGKILL
        await add_step(database, run, 2)
        await builders.add_group(database, run)
        # Looks go on while nobody answers.
        assert [await asyncio.to_thread(next, found) for _ in range(2)] == [(), ()]
        async with api_process(database, redis_url, port, injector):
            assert await named(found) == ("steps", "rollouts")
            await add_step(database, run, 3)
            assert await named(found) == ("steps",)


async def test_a_watch_prints_each_step_once_though_the_api_is_killed(
    database: Database, redis_url: str, tmp_path: Path
) -> None:
    run, port, injector = await builders.add_run(database), free_port(), FaultInjector(tmp_path / "faults")
    words = ["--url", f"http://127.0.0.1:{port}", "--token", TOKEN, "run", "watch", run.id, "--json"]
    pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.DEVNULL}

    async def printed() -> tuple[str, int | str]:
        assert watch.stdout is not None
        async with asyncio.timeout(120):
            found = json.loads(await watch.stdout.readline())
        return found["type"], found.get("number", "")

    async with api_process(database, redis_url, port, injector) as killed:
        watch = await asyncio.create_subprocess_exec(sys.executable, "-m", "leyden.libs.cli", *words, cwd=ROOT, **pipes)
        try:
            for number in (1, 2):
                await add_step(database, run, number)
                assert await printed() == ("step", number)
            killed.kill()
            await killed.wait()
            await add_step(database, run, 3)
            async with api_process(database, redis_url, port, injector):
                assert await printed() == ("step", 3)
                await add_step(database, run, 4)
                assert await printed() == ("step", 4)
                await builders.end_run(database, run)
                assert await printed() == ("run", "")
                assert await watch.wait() == 0
        finally:
            if watch.returncode is None:
                watch.kill()
                await watch.wait()


@pytest.mark.parametrize("status", [200, 404])
def test_all_is_named_again_and_again_where_no_stream_comes_through(
    monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr(changes, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(changes, "POLLS", 2)
    asked = list[str]()
    proxy = FastAPI()

    @proxy.get("/v1/events")
    def events(run: str) -> Response:
        asked.append(run)
        return Response("<html>", status, media_type="text/html")

    with served(proxy) as url, Client(url, TOKEN) as client, closing(client.changes("a")) as found:
        assert list(itertools.islice(found, 5)) == [RUN_PARTS] * 5
    # The stream is tried again after a while.
    assert asked == ["a"] * 3


def test_looks_go_on_while_a_proxy_says_that_the_api_is_away() -> None:
    proxy = FastAPI()
    asked = list[int]()

    @proxy.get("/v1/events")
    def events(run: str) -> Response:
        asked.append(len(asked))
        if len(asked) < 3:
            return Response("<html>", 502, media_type="text/html")
        return Response('id: 1\ndata: ["steps"]\n\n', media_type="text/event-stream")

    with served(proxy) as url, Client(url, TOKEN) as client, closing(client.changes("a")) as found:
        assert list(itertools.islice(found, 3)) == [(), (), ("steps",)]


def test_a_proxy_that_keeps_the_events_is_told_by_its_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "SILENCE_SECONDS", 0.2)
    proxy = FastAPI()

    @proxy.get("/v1/events")
    async def events(run: str) -> None:
        await asyncio.sleep(3600)

    with served(proxy) as url, Client(url, TOKEN) as client, closing(client.changes("a")) as found:
        assert next(found) == RUN_PARTS
