"""No answer without a record. A model call is durable before its last byte leaves for the agent."""

from __future__ import annotations

import asyncio
import itertools
import signal
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from leyden.libs.faults import FaultInjector
from leyden.libs.store.database import Database
from tests.contract.gateway.test_deliveries import deliveries
from tests.contract.gateway.test_process import client_of, free_port, gateway_process
from tests.contract.gateway.test_trouble import database_away
from tests.fakes.gateway import Scene, scene
from tests.support.waiting import eventually

# Where the gateway dies, how the answer is asked for, and how often the engine samples it in all.
DEATHS = [
    ("gateway.answered", False, 2),
    ("gateway.answered", True, 2),
    ("gateway.recorded", False, 1),
    ("gateway.recorded", True, 1),
    ("gateway.streamed", True, 1),
]


class Agent:
    """An agent with OpenAI's client, who asks with or without streaming and notes what it has got."""

    def __init__(self, stage: Scene, port: int, question: str, *, stream: bool) -> None:
        self._stage, self._port, self._question, self._stream = stage, port, question, stream
        self.answers: list[str] = []
        self.text = ""

    async def ask(self, retry: int = 0) -> None:
        """Adds the answer's id to `answers` once its end has come; `retry` is what the client counts by itself."""
        async with client_of(self._stage, self._port, max_retries=0) as client:
            create: Any = client.chat.completions.create
            messages = [{"role": "user", "content": self._question}]
            headers = {"x-stainless-retry-count": str(retry)}
            answer = await create(model="m", messages=messages, stream=self._stream, extra_headers=headers)
            if not self._stream:
                self.answers.append(answer.id)
                self.text = answer.choices[0].message.content
                return
            self.text = ""
            async for chunk in answer:
                self.text += "".join(choice.delta.content or "" for choice in chunk.choices)
                self.answers += [chunk.id for choice in chunk.choices if choice.finish_reason is not None]


async def until_delivered(database: Database, count: int) -> None:
    async with asyncio.timeout(60):
        while sum(row.delivered is True for row in await deliveries(database)) < count:
            await asyncio.sleep(0.02)


@pytest.mark.timeout(900)
async def test_killing_the_gateway_around_the_record_leaves_no_answer_without_a_record(
    tmp_path: Path, database: Database
) -> None:
    port, injector = free_port(), FaultInjector(tmp_path / "faults")
    async with scene(tmp_path, database, says="Hello, world.") as stage:
        agents = [Agent(stage, port, f"question {number}", stream=one[1]) for number, one in enumerate(DEATHS)]
        asked: list[int] = []
        previous: Agent | None = None
        for agent, (point, _, _) in zip(agents, DEATHS, strict=True):
            async with gateway_process(stage, port, **injector.environment) as process:
                if previous is not None:
                    # The gateway before died and could not write that its answer was delivered: this one does.
                    await previous.ask(retry=1)
                    await until_delivered(database, len(asked))
                asked.append(len(stage.engine.requests))
                injector.arm(point)
                with pytest.raises((openai.APIError, httpx.TransportError)):
                    await agent.ask()
                assert (point, await process.wait()) == (point, -signal.SIGKILL)
                assert agent.answers == []
                previous = agent
        async with gateway_process(stage, port):
            await agents[-1].ask(retry=1)
            await until_delivered(database, len(agents))
        asked.append(len(stage.engine.requests))
        calls = await stage.calls()

    assert [later - before for before, later in itertools.pairwise(asked)] == [times for *_, times in DEATHS]
    assert [(agent.answers, agent.text) for agent in agents] == [
        ([f"chatcmpl-{call.request_id}"], "Hello, world.") for call in calls
    ]
    assert [call.status for call in calls] == ["completed"] * len(DEATHS)


async def test_answers_wait_while_postgres_is_down_and_are_sent_when_it_is_back(
    tmp_path: Path, database: Database
) -> None:
    port, go = free_port(), asyncio.Event()

    def pace(tokens: int) -> Any:
        return go.wait() if tokens == 3 else None

    async with scene(tmp_path, database, says="Hello, world.", engine={"pace": pace}) as stage:
        agents = [Agent(stage, port, f"stream {stream}", stream=stream) for stream in (False, True)]
        async with gateway_process(stage, port, GATEWAY_RECORD_HOLD_SECONDS="120"):
            asking = [asyncio.create_task(agent.ask()) for agent in agents]
            await eventually(lambda: len(stage.engine.requests) >= 2)
            async with database_away(database.dsn):
                go.set()
                await asyncio.wait(asking, timeout=2)
                assert [agent.answers for agent in agents] == [[], []]
            async with asyncio.timeout(120):
                await asyncio.gather(*asking)
            calls = {call.turns[0]["content"]: call for call in await stage.calls()}
    assert [agent.answers for agent in agents] == [
        [f"chatcmpl-{calls[f'stream {stream}'].id}"] for stream in (False, True)
    ]
    assert {call.status for call in calls.values()} == {"completed"}


async def test_an_answer_that_cannot_be_recorded_in_time_is_503_with_retry_after(
    tmp_path: Path, database: Database
) -> None:
    port, go = free_port(), asyncio.Event()
    async with scene(tmp_path, database, engine={"pace": lambda tokens: go.wait() if tokens == 3 else None}) as stage:
        agent = Agent(stage, port, "hi", stream=False)
        async with gateway_process(stage, port, GATEWAY_RECORD_HOLD_SECONDS="3"):
            asking = asyncio.create_task(agent.ask())
            await eventually(lambda: stage.engine.requests)
            async with database_away(database.dsn):
                go.set()
                with pytest.raises(openai.InternalServerError) as refused:
                    await asking
            assert await stage.calls() == []
            await agent.ask(retry=1)
        (call,) = await stage.calls()
    assert (refused.value.status_code, refused.value.code) == (503, "store_unavailable")
    assert int(refused.value.response.headers["retry-after"]) > 0
    assert agent.answers == [f"chatcmpl-{call.id}"]
