"""Two hundred agents in three dialects while their engine, their gateway and Postgres die: nothing lost or doubled."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import httpx2
import numpy as np
import pytest

from leyden.libs.capability import KeyRing, write_keys
from leyden.libs.embedded.servers import EmbeddedPostgres
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.libs.store.migrate import migrate
from tests.fakes.chat_model import EOS, make_chat_model
from tests.fakes.gateway import GatewayUnderTest, all_calls
from tests.fakes.scripted_engine import EngineProcess, engine_process
from tests.fakes.sdk_agents import (
    ChatAgent,
    MessagesAgent,
    Received,
    ResponsesAgent,
    SdkAgent,
    may_be_repeated,
)
from tests.support import builders
from tests.support.long import long_only
from tests.support.shared import ROOT, free_port
from tests.support.waiting import eventually

AGENTS, TURNS = 200, 3
DIALECTS = ("chat_completions", "responses", "messages")
LETTERS = 12
SECONDS = 400.0
HELD_SECONDS = 10.0
ENGINE = {"letters": LETTERS, "delay_seconds": 0.1, "pace_seconds": 0.05, "is_incremental": True}


@dataclass
class Agent:
    """An agent of one attempt; it asks `TURNS` questions and repeats each until it gets the answer."""

    number: int
    rollout_id: str
    speaker: SdkAgent
    received: list[Received] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)

    @property
    def dialect(self) -> str:
        """The wire format that it speaks."""
        return DIALECTS[self.number % len(DIALECTS)]

    async def work(self) -> None:
        """Every second answer is a stream."""
        for turn in range(TURNS):
            self.received.append(await self._answer(f"question {turn} of agent {self.number}", turn))

    async def _answer(self, question: str, turn: int) -> Received:
        while True:
            try:
                return await self.speaker.ask(question, stream=(self.number // len(DIALECTS) + turn) % 2 == 0)
            except Exception as error:
                self.errors.append(error)
                if not may_be_repeated(error):
                    raise
                await asyncio.sleep(0.5)


@dataclass
class Stage:
    """Processes that a test kills; each starts again where it was."""

    folder: Path
    postgres: EmbeddedPostgres
    dsn: str
    run_id: str
    engine_port: int
    gateway_port: int
    engine: EngineProcess | None = None
    gateway: asyncio.subprocess.Process | None = None
    moment: str = "the start"

    def has_held_a_record(self) -> bool:
        """Whether a gateway had an answer that it could not record at once."""
        return b'"store away"' in (self.folder / "gateway.log").read_bytes()

    def end_of_log(self) -> str:
        """The gateway's last lines."""
        return (self.folder / "gateway.log").read_text()[-5000:]

    @property
    def log(self) -> Path:
        """The engines' complete answers, one JSON object a line."""
        return self.folder / "sampled.jsonl"

    def sampled(self) -> list[dict[str, Any]]:
        """The finished answers of the engines, across their deaths."""
        return [json.loads(line) for line in self.log.read_bytes().splitlines()] if self.log.exists() else []

    @contextlib.contextmanager
    def running_engine(self) -> Iterator[None]:
        """An engine until the block ends or somebody kills it."""
        script = ENGINE | {"log": str(self.log), "weight_version": f"{self.run_id}:0"}
        with engine_process(self.engine_port, **script) as self.engine:
            yield

    @asynccontextmanager
    async def running_gateway(self) -> AsyncIterator[None]:
        """A gateway until the block ends."""
        environment = {
            "PATH": os.environ["PATH"],
            "GATEWAY_PORT": str(self.gateway_port),
            "GATEWAY_MODEL_PATH": str(self.folder / "model"),
            "GATEWAY_ENGINE_URLS": f'["http://127.0.0.1:{self.engine_port}"]',
            "GATEWAY_RECORD_HOLD_SECONDS": "120",
            "LEYDEN_DATABASE_URL": self.dsn,
            "LEYDEN_CAPABILITY_KEYS_FILE": str(self.folder / "keys.json"),
        }
        command = (sys.executable, "-m", "leyden.services.gateway")
        with (self.folder / "gateway.log").open("ab") as log:
            self.gateway = await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=environment, stdout=log)
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                self.gateway.kill()
            await self.gateway.wait()


@asynccontextmanager
async def stage(folder: Path) -> AsyncIterator[Stage]:
    """Postgres of its own with a run, a model and a key ring; no engine and no gateway yet."""
    postgres = EmbeddedPostgres(folder / "postgres", durable=False)
    try:
        dsn = postgres.start()
        migrate(dsn)
        make_chat_model(folder / "model")
        write_keys(folder / "keys.json", {"test": "s" * 40})
        database = Database(dsn)
        run = await builders.add_run(database)
        await database.close()
        yield Stage(folder, postgres, dsn, run.id, free_port(), free_port())
    finally:
        postgres.stop()


async def attempts(dsn: str, run_id: str) -> list[str]:
    """The rollouts of a group, each with an attempt that runs for longer than the test."""
    database = Database(dsn)
    async with database.read() as session:
        run = await session.get_one(tables.Run, run_id)
    _, rollouts = await builders.add_group(database, run, size=AGENTS)
    for rollout in rollouts:
        await builders.add_attempt(database, rollout)
    await database.close()
    return [rollout.id for rollout in rollouts]


@asynccontextmanager
async def agents_of(gateway: GatewayUnderTest, rollouts: list[str]) -> AsyncIterator[list[Agent]]:
    """One agent for each rollout, every third of the same dialect, with the SDKs' own number of retries."""
    limits = {"max_connections": None, "max_keepalive_connections": None}
    # Each client of its own would load the certificates of HTTPS.
    openais = httpx.AsyncClient(limits=httpx.Limits(**limits), timeout=SECONDS)
    anthropics = httpx2.AsyncClient(limits=httpx2.Limits(**limits), timeout=SECONDS)
    kinds: list[Callable[[str], SdkAgent]] = [
        lambda rollout: ChatAgent(gateway.client(rollout, http_client=openais, max_retries=2)),
        lambda rollout: ResponsesAgent(gateway.client(rollout, http_client=openais, max_retries=2)),
        lambda rollout: MessagesAgent(gateway.anthropic(rollout, http_client=anthropics, max_retries=2)),
    ]
    async with openais, anthropics:
        yield [Agent(number, rollout, kinds[number % 3](rollout)) for number, rollout in enumerate(rollouts)]


async def disturb(on: Stage, agents: list[Agent]) -> None:
    """Kills engine, gateway and Postgres, one after the other and together, while calls are in flight."""

    def received() -> int:
        return sum(len(agent.received) for agent in agents)

    async def answers(count: int) -> None:
        while received() < count:
            await asyncio.sleep(0.05)

    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(on.running_engine())
        await stack.enter_async_context(on.running_gateway())
        assert on.engine is not None
        assert on.gateway is not None
        await answers(AGENTS // 4)
        on.moment = "the engine's death"
        on.engine.process.kill()
        on.engine.process.wait()
        stack.enter_context(on.running_engine())
        await answers(AGENTS)
        on.moment = "the gateway's death"
        on.gateway.kill()
        await on.gateway.wait()
        await stack.enter_async_context(on.running_gateway())
        await answers(AGENTS + AGENTS // 2)
        # An answer is sampled to its end, and its record waits. Where every call waits for Postgres before it is
        # sampled, as it may right after the gateway's death, this takes another outage.
        while not on.has_held_a_record():
            on.moment = "the end of Postgres"
            on.postgres.stop()
            with contextlib.suppress(TimeoutError):
                await eventually(lambda: on.has_held_a_record())
            assert on.postgres.start() == on.dsn
            await answers(received() + 10)
        on.moment = "the return of Postgres"
        await answers(2 * AGENTS)
        on.moment = "the death of engine and gateway"
        on.engine.process.kill()
        on.gateway.kill()
        await on.gateway.wait()
        await stack.enter_async_context(on.running_gateway())
        stack.enter_context(on.running_engine())
        await answers(TURNS * AGENTS)


@long_only
@pytest.mark.timeout(600)
async def test_no_call_is_lost_or_doubled_when_engine_gateway_and_postgres_die(tmp_path: Path) -> None:
    async with stage(tmp_path) as on, contextlib.AsyncExitStack() as stack:
        ring = KeyRing(tmp_path / "keys.json")
        gateway = GatewayUnderTest(f"http://127.0.0.1:{on.gateway_port}", ring, asyncio.Event().wait, on.run_id)
        agents = await stack.enter_async_context(agents_of(gateway, await attempts(on.dsn, on.run_id)))
        try:
            async with asyncio.timeout(SECONDS), asyncio.TaskGroup() as group:
                for agent in agents:
                    group.create_task(agent.work())
                group.create_task(disturb(on, agents))
        except TimeoutError:
            pytest.fail(f"after {on.moment}: {Counter(map(state, agents))}\n{on.end_of_log()}")
        database = Database(on.dsn)
        calls = [call for call in await all_calls(database) if call.status == "completed"]
        await database.close()
        sampled = on.sampled()

    # Every agent saw trouble of some kind or another, and none that it could not repeat.
    assert [error for agent in agents for error in agent.errors if not may_be_repeated(error)] == []
    # The record holds each received answer once, in its rollout and dialect.
    of = {call.request_id: call for call in calls}
    received = [(agent, one) for agent in agents for one in agent.received]
    assert Counter(one.request_id for _, one in received) == Counter(call.request_id for call in calls)
    assert len(received) == TURNS * AGENTS
    for agent, one in received:
        call = of[one.request_id]
        assert (call.rollout_id, call.dialect) == (agent.rollout_id, agent.dialect)
        assert one.text == call.answer["content"] == text_of(call)
    # And it is what the engines have sampled, token for token.
    complete = {(*answer["input_ids"], *answer["ids"]) for answer in sampled}
    assert len(complete) == len(sampled)
    assert {(*ids(call.prompt_ids), *ids(call.sampled_ids)) for call in calls} <= complete


def state(agent: Agent) -> tuple[str, int, str]:
    """Its dialect, how many answers it has, and the kind of its last error."""
    return agent.dialect, len(agent.received), type(agent.errors[-1]).__name__ if agent.errors else "no error"


def ids(data: bytes) -> list[int]:
    return np.frombuffer(data, "<i4").tolist()


def text_of(call: tables.ModelCall) -> str:
    """The letters of the sampled tokens, of which the last one ends the turn."""
    *letters, end = ids(call.sampled_ids)
    assert end == EOS
    # The vocabulary begins with the printable ASCII characters after the space.
    return "".join(chr(letter + 33) for letter in letters)
