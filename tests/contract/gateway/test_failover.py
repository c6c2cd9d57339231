"""An engine dies in mid-call, in each dialect: the call moves, or its stream ends as failed, never as complete."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leyden.libs.store.database import Database
from tests.fakes.chat_model import EOS
from tests.fakes.gateway import GatewayUnderTest, Scene, scene
from tests.fakes.scripted_engine import ScriptedEngine, running
from tests.fakes.sdk_agents import ChatAgent, MessagesAgent, ResponsesAgent, SdkAgent, may_be_repeated

ANSWER = "Hello, world."
START_OF_TURN, OPENING = 258, "assistant\n"
Dialect = tuple[Callable[[GatewayUnderTest, str], Any], Callable[[Any], SdkAgent]]
DIALECTS: dict[str, Dialect] = {
    "chat_completions": (GatewayUnderTest.client, ChatAgent),
    "responses": (GatewayUnderTest.client, ResponsesAgent),
    "messages": (GatewayUnderTest.anthropic, MessagesAgent),
}
in_each_dialect = pytest.mark.parametrize("dialect", DIALECTS)
streamed_or_not = pytest.mark.parametrize("stream", [False, True])


@dataclass
class Pair:
    """Two engines behind a gateway, and an agent whose first answer came from `first`; `ids` are those of ANSWER."""

    stage: Scene
    agent: SdkAgent
    first: ScriptedEngine
    other: ScriptedEngine
    ids: list[int]

    async def latest(self) -> tuple[str, bool, list[int]]:
        """Status, whether it trains, and sampled tokens of the only call since the first one."""
        _, call = await self.stage.calls()
        return call.status, call.trainable, np.frombuffer(call.sampled_ids, "<i4").tolist()


@asynccontextmanager
async def two_engines(folder: Path, database: Database, dialect: str, **settings: Any) -> AsyncIterator[Pair]:
    """Both say ANSWER, and the rest of it where a request holds its beginning."""
    async with scene(folder, database) as stage:
        ids = [*stage.model.tokenizer.encode(ANSWER).tolist(), EOS]

        def says(body: dict[str, Any]) -> list[int]:
            since_start = body["input_ids"][::-1].index(START_OF_TURN)
            return ids[since_start - len(OPENING) :]

        engines = [stage.engine, ScriptedEngine(says, stage.model.tokenizer.decode, stage.engine.weight_version)]
        stage.engine.says = says
        async with running(engines[1]):
            urls = [engine.url for engine in engines]
            client_of, kind = DIALECTS[dialect]
            async with (
                stage.another_gateway(engine_urls=urls, **settings) as gateway,
                client_of(gateway, stage.rollout_id) as client,
            ):
                agent = kind(client)
                assert (await agent.ask("first", stream=False)).text == ANSWER
                first, other = sorted(engines, key=lambda engine: len(engine.requests), reverse=True)
                yield Pair(stage, agent, first, other, ids)


@in_each_dialect
@streamed_or_not
async def test_a_call_without_tokens_moves_to_the_other_engine(tmp_path, database, dialect, stream):
    async with two_engines(tmp_path, database, dialect) as pair:
        pair.first.dies_after = 0
        answer = await pair.agent.ask("second", stream=stream)
        latest = await pair.latest()
        (moved,) = pair.other.requests
    assert (answer.text, latest) == (ANSWER, ("completed", True, pair.ids))
    assert moved["input_ids"] == pair.first.requests[-1]["input_ids"]


@in_each_dialect
async def test_a_stream_continues_on_the_other_engine_after_the_tokens_that_it_has_sent(tmp_path, database, dialect):
    async with two_engines(tmp_path, database, dialect) as pair:
        pair.first.dies_after, pair.first.pace_seconds = 3, 0.05
        answer = await pair.agent.ask("second", stream=True)
        latest = await pair.latest()
        (continued,) = pair.other.requests
    assert (answer.text, latest) == (ANSWER, ("completed", True, pair.ids))
    assert continued["input_ids"] == [*pair.first.requests[-1]["input_ids"], *pair.ids[:3]]


@in_each_dialect
@streamed_or_not
async def test_a_call_that_no_engine_finishes_fails_and_never_looks_complete(tmp_path, database, dialect, stream):
    async with two_engines(tmp_path, database, dialect, hold_seconds=1.0) as pair:
        gone = (503, {"error": {"message": "gone"}})

        def pace(tokens: int) -> None:
            if tokens == 3:
                pair.first.refuses = gone

        pair.other.refuses, pair.first.pace = gone, pace
        pair.first.dies_after, pair.first.pace_seconds = 3, 0.05
        with pytest.raises(Exception) as failed:
            await pair.agent.ask("second", stream=stream)
        status, is_trainable, _ = await pair.latest()
    assert may_be_repeated(failed.value), repr(failed.value)
    assert pair.agent.shown == ("Hel" if stream else "")
    assert (status, is_trainable) == ("failed", False)
