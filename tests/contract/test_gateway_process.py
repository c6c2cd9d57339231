"""The gateway as a process: it starts from its environment, stops when told, and may be killed at any moment."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from tests.fakes.gateway import Scene, scene

ROOT = Path(__file__).parents[2]
HI: list[Any] = [{"role": "user", "content": "hi"}]


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@asynccontextmanager
async def gateway_process(stage: Scene, port: int, **more: str) -> AsyncIterator[asyncio.subprocess.Process]:
    environment = {
        "PATH": os.environ["PATH"],
        "GATEWAY_PORT": str(port),
        "GATEWAY_MODEL_PATH": str(stage.folder / "model"),
        "GATEWAY_ENGINE_URLS": f'["{stage.engine.url}"]',
        "GATEWAY_SHUTDOWN_SECONDS": "1",
        "LEYDEN_DATABASE_URL": stage.database.dsn,
        "LEYDEN_CAPABILITY_KEYS_FILE": str(stage.folder / "keys.json"),
        **more,
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.gateway", cwd=ROOT, env=environment, stdout=asyncio.subprocess.DEVNULL
    )
    try:
        await _ready(port)
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _ready(port: int) -> None:
    async with asyncio.timeout(60), httpx.AsyncClient() as http:
        while True:
            try:
                await http.head(f"http://127.0.0.1:{port}/")
                return
            except httpx.TransportError:
                await asyncio.sleep(0.05)


def client_of(stage: Scene, port: int, **options: Any) -> AsyncOpenAI:
    base_url = f"http://127.0.0.1:{port}/r/{stage.rollout_id}/1/v1"
    return AsyncOpenAI(base_url=base_url, api_key=stage.gateway.key(stage.rollout_id), **options)


async def test_a_gateway_killed_in_the_middle_of_an_answer_loses_nothing_that_was_seen(tmp_path, database):
    port, go = free_port(), asyncio.Event()

    def pace(tokens: int) -> Any:
        return go.wait() if tokens == 3 else None

    async with scene(tmp_path, database, engine={"pace": pace}) as stage:
        async with client_of(stage, port, max_retries=0) as client:
            create: Any = client.chat.completions.create
            async with gateway_process(stage, port) as first:
                asking = asyncio.create_task(create(model="m", messages=HI))
                while not stage.engine.requests:
                    await asyncio.sleep(0.01)
                first.send_signal(signal.SIGKILL)
                with pytest.raises(openai.APIConnectionError):
                    await asking
            go.set()
            async with gateway_process(stage, port):
                # What the client would send by itself, after waiting for seconds.
                answer = await create(model="m", messages=HI, extra_headers={"x-stainless-retry-count": "1"})
        calls = await stage.calls()
    assert answer.choices[0].message.content == "Hello."
    assert [(call.status, f"chatcmpl-{call.id}") for call in calls] == [("completed", answer.id)]


async def test_a_gateway_told_to_stop_records_what_it_cuts_and_ends_well(tmp_path, database):
    port = free_port()

    async def pace(tokens: int) -> None:
        while tokens == 3 and not stage.engine.aborted:
            await asyncio.sleep(0.01)

    async with scene(tmp_path, database, engine={"pace": pace}) as stage:
        async with gateway_process(stage, port) as process, client_of(stage, port, max_retries=0) as client:
            asking = asyncio.create_task(client.chat.completions.create(model="m", messages=HI))
            while not stage.engine.requests:
                await asyncio.sleep(0.01)
            process.terminate()
            async with asyncio.timeout(20):
                status = await process.wait()
            await asyncio.wait({asking})
        (call,) = await stage.calls()
    assert status == 0
    assert asking.exception() is not None
    assert (call.status, call.completion_tokens) == ("aborted", 3)
