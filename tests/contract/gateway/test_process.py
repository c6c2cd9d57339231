"""The gateway as a process: it starts from its environment, stops when told, and may be killed at any moment."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from sqlalchemy import text

from leyden.libs.attempts import EndpointMonitor, attribute_failure
from leyden.libs.contracts.states import OutcomeKind
from leyden.libs.queue.external import lock_attempt
from leyden.libs.queue.leases import Outcome, settle_all
from leyden.libs.store import tables
from leyden.libs.store.runs.rollouts import AttemptFacts, ended_attempts
from tests.fakes.gateway import Scene, scene
from tests.support.long import long_only
from tests.support.shared import ROOT, free_port
from tests.support.waiting import eventually

POINTS = ("gateway.refused",)
HI: list[Any] = [{"role": "user", "content": "hi"}]
LATER: list[Any] = [{"role": "user", "content": "and now?"}]
"""Another request: an equal one may be taken for a repeat of one whose answer died with its gateway."""


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
        sys.executable, "-m", "leyden.services.gateway", cwd=ROOT, env=environment, stdout=asyncio.subprocess.DEVNULL
    )
    try:
        await _ready(port)
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _ready(port: int) -> None:
    await eventually(lambda: answers(port))


async def answers(port: int) -> bool:
    """Whether a gateway takes new connections."""
    try:
        async with httpx.AsyncClient() as http:
            await http.head(f"http://127.0.0.1:{port}/")
    except httpx.TransportError:
        return False
    return True


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


@pytest.mark.parametrize("tries_again", [False, True])
async def test_a_reward_counts_only_if_an_answer_came_after_the_gateway_was_killed(tmp_path, database, tries_again):
    port = free_port()
    async with scene(tmp_path, database) as stage, client_of(stage, port, max_retries=0) as client:
        create: Any = client.chat.completions.create
        monitor = EndpointMonitor([f"http://127.0.0.1:{port}"], database.ping)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(monitor.close)
            started = time.monotonic()
            async with gateway_process(stage, port) as first:
                await monitor.check()
                await create(model="m", messages=HI)
                first.kill()
                await first.wait()
                # The agent catches this, and ends with a verdict on nothing.
                with pytest.raises(openai.APIConnectionError):
                    await create(model="m", messages=LATER)
            if tries_again:
                async with gateway_process(stage, port):
                    down = time.monotonic()
                    await monitor.check()
                    await create(model="m", messages=LATER)
                    # A store that was away for longer than the answer took changes nothing.
                    facts = await _judged(stage, monitor, started, hold_seconds=time.monotonic() - down)
            else:
                facts = await _judged(stage, monitor, started)
    assert (facts.reward, facts.lost_gateway) == (0.0, not tries_again)


async def _judged(stage: Scene, monitor: EndpointMonitor, started: float, *, hold_seconds: float = 0.0) -> AttemptFacts:
    """The attempt prints a reward of 0 now, which is stored after a hold; returns the facts that the controller reads
    of it."""
    outcome = await attribute_failure(Outcome(OutcomeKind.SUCCEEDED, reward=0.0), started, monitor)
    assert outcome.gateway_down_at is not None
    await asyncio.sleep(hold_seconds)
    async with stage.database.session() as session:
        attempt = await session.get_one(tables.Attempt, (stage.rollout_id, 1))
        status = await lock_attempt(session, attempt.run_id, attempt.lease_id)
        assert status is not None
        assert await settle_all(session, [(status.lease, outcome)])

    async def ended() -> AttemptFacts | None:
        async with stage.database.read() as session:
            return next(iter(await ended_attempts(session)), None)

    return await eventually(ended, "the controller may judge")


async def test_a_repeat_without_a_word_gets_the_answer_that_died_with_its_gateway(tmp_path, database):
    port, faults = free_port(), tmp_path / "faults"
    faults.mkdir()
    (faults / "gateway.recorded").touch()
    async with scene(tmp_path, database) as stage:
        async with client_of(stage, port, max_retries=0) as client:
            create: Any = client.chat.completions.create
            async with gateway_process(stage, port, LEYDEN_FAULTS=str(faults)):
                with pytest.raises(openai.APIConnectionError):
                    await create(model="m", messages=HI)
            async with gateway_process(stage, port):
                repeated, voted = await create(model="m", messages=HI), await create(model="m", messages=HI)
        calls = await stage.calls()
    assert [f"chatcmpl-{call.id}" for call in calls] == [repeated.id, voted.id]


@pytest.mark.parametrize("headers", [{}, {"x-stainless-retry-count": "1"}], ids=["without a word", "declared"])
async def test_a_repeat_gets_the_refusal_that_died_with_its_gateway(tmp_path, database, headers):
    port, faults, long = free_port(), tmp_path / "faults", [{"role": "user", "content": "hi " * 4096}]
    faults.mkdir()
    (faults / POINTS[0]).touch()
    async with scene(tmp_path, database) as stage:
        async with client_of(stage, port, max_retries=0) as client:
            create: Any = client.chat.completions.create
            async with gateway_process(stage, port, LEYDEN_FAULTS=str(faults)):
                with pytest.raises(openai.APIConnectionError):
                    await create(model="m", messages=long)
            async with gateway_process(stage, port):
                with pytest.raises(openai.BadRequestError) as repeated:
                    await create(model="m", messages=long, extra_headers=headers)
                assert len(await stage.calls()) == 1
                # Not a repeat: the agent has its answer, and asks again.
                with pytest.raises(openai.BadRequestError) as again:
                    await create(model="m", messages=long)
        calls = await stage.calls()
    assert [(call.status, call.finish_reason) for call in calls] == [("refused", "context_length_exceeded")] * 2
    assert repeated.value.body == again.value.body


async def test_a_repeat_without_a_word_gets_the_answer_that_its_client_did_not_wait_for(tmp_path, database):
    async with scene(tmp_path, database) as stage, stage.client(timeout=2.0) as client:
        create: Any = client.chat.completions.create
        async with database.engine.begin() as connection:
            # Its record waits, and its client does not.
            await connection.execute(text("LOCK TABLE model_calls IN EXCLUSIVE MODE"))
            with pytest.raises(openai.APITimeoutError):
                await create(model="m", messages=HI)
        calls = await eventually(lambda: stage.calls())
        repeated, voted = await create(model="m", messages=HI), await create(model="m", messages=HI)
        assert repeated.id == f"chatcmpl-{calls[0].id}"
        assert voted.id != repeated.id


def held_at_three(stage: Callable[[], Scene], go: asyncio.Event) -> Any:
    """An engine that pauses after three tokens until it is told to go on, or to abort."""

    async def pace(tokens: int) -> None:
        while tokens == 3 and not go.is_set() and not stage().engine.aborted:
            await asyncio.sleep(0.01)

    return pace


async def test_a_stopping_gateway_finishes_the_streams_in_flight(tmp_path, database):
    port, go = free_port(), asyncio.Event()
    pace = held_at_three(lambda: stage, go)
    async with scene(tmp_path, database, engine={"pace": pace}) as stage:
        settings = {"GATEWAY_SHUTDOWN_SECONDS": "100"}
        async with gateway_process(stage, port, **settings) as process, client_of(stage, port, max_retries=0) as client:
            stream = await client.chat.completions.create(model="m", messages=HI, stream=True)
            chunks = [await anext(stream)]
            process.terminate()
            while await answers(port):
                await asyncio.sleep(0.01)
            go.set()
            chunks += [chunk async for chunk in stream]
            async with asyncio.timeout(60):
                status = await process.wait()
        (call,) = await stage.calls()
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert (status, text, call.status) == (0, "Hello.", "completed")


@pytest.mark.parametrize("how", ["its patience is over", "it is told again"])
async def test_a_gateway_that_must_stop_aborts_calls_with_retry_after_and_records_them(tmp_path, database, how):
    port = free_port()
    pace = held_at_three(lambda: stage, asyncio.Event())
    async with scene(tmp_path, database, engine={"pace": pace}) as stage:
        settings = {"GATEWAY_SHUTDOWN_SECONDS": "1" if how == "its patience is over" else "1000"}
        async with gateway_process(stage, port, **settings) as process, client_of(stage, port, max_retries=0) as client:
            stream = await client.chat.completions.create(model="m", messages=HI, stream=True)
            await anext(stream)
            whole = asyncio.create_task(client.chat.completions.create(model="m", messages=[*HI, *HI]))
            while len(stage.engine.requests) < 2:
                await asyncio.sleep(0.01)
            process.terminate()
            while await answers(port):
                await asyncio.sleep(0.01)
            if how == "it is told again":
                process.terminate()
            # Once a stream has begun, an event says it; else a status that SDKs try again by themselves.
            with pytest.raises(openai.APIError, match="stopping"):
                async for _ in stream:
                    pass
            with pytest.raises(openai.InternalServerError) as refused:
                await whole
            async with asyncio.timeout(60):
                status = await process.wait()
        calls = await stage.calls()
    assert (status, refused.value.status_code, refused.value.response.headers["retry-after"]) == (0, 503, "1")
    assert [(call.status, call.untrainable_reason) for call in calls] == [("aborted", "the gateway was stopped")] * 2


GREEDY = """
import socket, sys
held = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(3000)]
for one in held[::3]:
    one.sendall(b"POST /r/a/1/v1/chat/completions HTTP/1.1\\r\\nhost: a\\r\\n")
print(len(held), flush=True)
sys.stdin.read()
"""


@long_only
async def test_an_agent_with_thousands_of_connections_does_not_block_its_siblings(tmp_path, database):
    port = free_port()
    pipe = asyncio.subprocess.PIPE
    async with scene(tmp_path, database) as stage, gateway_process(stage, port) as gateway:
        command = [sys.executable, "-I", "-S", "-c", GREEDY, str(port)]
        greedy = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        assert greedy.stdin is not None
        assert greedy.stdout is not None
        assert await greedy.stdout.readline() == b"3000\n"
        async with client_of(stage, port) as client:
            create: Any = client.chat.completions.create
            answers = [await create(model="m", messages=HI) for _ in range(5)]
        greedy.stdin.close()
        await greedy.wait()
        assert gateway.returncode is None
    assert [answer.choices[0].message.content for answer in answers] == ["Hello."] * 5
