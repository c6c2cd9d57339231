"""The gateway serves clients in Go, Rust, Java and Python over a socket: `clients/` has the requests of each."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leyden.libs.store.database import Database
from tests.contract.gateway.recorded_clients import CLIENTS, Answer, Client, Json, filled
from tests.contract.gateway.test_trouble import held_table
from tests.fakes.chat_model import CHATML_WITH_TOOLS
from tests.fakes.gateway import Scene, scene
from tests.frameworks.training import Trained, trained
from tests.support.waiting import eventually

RAIN, TIME = r"Par\u00efs <&> \/", r"Rome"
"""Arguments as the model spells them; `json.dumps` would write the first one otherwise."""
FIRST_ANSWER, SECOND_ANSWER = "Light rain, and it is 12:30.", "Nobody knows."

each_client = pytest.mark.parametrize("name", CLIENTS)
each_form = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
RETRYING = [name for name, recorded in CLIENTS.items() if len(recorded["retries"]["values"]) > 1]


@each_form
@each_client
async def test_a_task_of_two_questions_with_parallel_tools_is_served_recorded_and_trained(
    tmp_path, database, name, stream
):
    recorded = CLIENTS[name]
    async with playing(tmp_path, database, recorded, stream=stream) as (stage, client):
        answers = await play(client)
        calls = await stage.calls()
        credited = await trained(database, stage.rollout)
    assert [answer.text for answer in answers[1::2]] == [FIRST_ANSWER, SECOND_ANSWER]
    first, failing = answers[0].calls, answers[2].calls
    assert [call.name for call in [*first, *failing]] == ["get_weather", "get_time", "get_weather"]
    cities = [next(iter(json.loads(call.arguments).values())) for call in [*first, *failing]]
    assert cities == ["Parïs <&> /", "Rome", "Atlantis"]
    assert len({call.id for call in [*first, *failing]}) == 3
    assert {(call.status, call.dialect) for call in calls} == {("completed", recorded["dialect"])}
    assert {call.untrainable_reason for call in calls} == {recorded["untrainable"]}
    assert tokens(calls) == engine_tokens(stage)
    assert tree(calls) == recorded["tree"]
    sampled = sorted(token for _, answer in engine_tokens(stage) for token in answer)
    reason = recorded["untrainable"]
    assert credited == (Trained([], {reason: len(calls)}) if reason else Trained(sampled, {}))


@each_form
@pytest.mark.parametrize("name", RETRYING)
async def test_the_repeat_after_a_lost_answer_gets_the_one_that_was_sampled(tmp_path, database, name, stream):
    recorded = CLIENTS[name]
    first, again = recorded["retries"]["values"][:2]
    async with playing(tmp_path, database, recorded, stream=stream) as (stage, client):
        opening = recorded["turns"][0]
        async with held_table(database.dsn):
            asking = asyncio.create_task(asyncio.to_thread(client.ask, opening, mark=first))
            await eventually(lambda: bool(stage.engine.sampled))
            await asyncio.sleep(0.2)
            hang_up(client)
            await asyncio.wait({asking})
            assert asking.exception() is not None
            await asyncio.sleep(0.2)
        await eventually(lambda: has_calls(stage))
        client.close()
        answer = await asyncio.to_thread(client.ask, opening, mark=again)
        calls = await stage.calls()
    assert [call.name for call in answer.calls] == ["get_weather", "get_time"]
    assert len(stage.engine.requests) == 1
    assert tokens(calls) == engine_tokens(stage)


@each_client
async def test_a_stream_that_waits_is_read_to_its_end(tmp_path, database, name):
    waits: dict[str, Any] = {"keepalive_after_seconds": 0.1, "keepalive_seconds": 0.1, "engine": {"delay_seconds": 0.6}}
    async with playing(tmp_path, database, CLIENTS[name], stream=True, **waits) as (_, client):
        answer = await asyncio.to_thread(client.ask, CLIENTS[name]["turns"][0])
    assert [call.name for call in answer.calls] == ["get_weather", "get_time"]


@each_client
async def test_a_stream_that_fails_breaks_off(tmp_path, database, name):
    """Some clients ignore an event with an error and take a stream that ends properly as complete."""
    settings: dict[str, Any] = {
        "engine_urls": [],
        "keepalive_after_seconds": 0.1,
        "keepalive_seconds": 0.1,
        "hold_seconds": 1.0,
    }
    async with playing(tmp_path, database, CLIENTS[name], stream=True, **settings) as (_, client):
        response = await asyncio.to_thread(client.send, CLIENTS[name]["turns"][0])
        assert response.status == 200
        if CLIENTS[name]["dialect"] == "responses":
            # Its last event has the status `failed`, which every client reads.
            assert b'"response.failed"' in await asyncio.to_thread(response.read)
        else:
            with pytest.raises(http.client.IncompleteRead) as broken:
                await asyncio.to_thread(response.read)
            assert b"No engine" in broken.value.partial


@asynccontextmanager
async def playing(
    folder: Path, database: Database, recorded: Json, *, stream: bool, **settings: Any
) -> AsyncIterator[tuple[Scene, Client]]:
    """A gateway on an engine that samples the task's answers in order, and the client."""

    def call(name: str, city: str) -> str:
        arguments = f'{{"{recorded["argument"]}":  "{city}"}}'
        return f'<tool_call>\n{{"name":  "{name}",  "arguments":  {arguments}}}\n</tool_call>'

    says = [
        f"Let me see the two.\n{call('get_weather', RAIN)}\n{call('get_time', TIME)}",
        FIRST_ANSWER,
        call("get_weather", "Atlantis"),
        SECOND_ANSWER,
    ]
    options: dict[str, Any] = {"says": says, "template": CHATML_WITH_TOOLS, **settings}
    async with scene(folder, database, **options) as stage:
        client = Client(recorded, stage.gateway.base_url(stage.rollout_id), stage.gateway.key(stage.rollout_id), stream)
        try:
            yield stage, client
        finally:
            client.close()


async def play(client: Client) -> list[Answer]:
    """Plays the task on one connection."""
    items, answers = list[Json](), list[Answer]()
    for turn in client.recorded["turns"]:
        items += filled(turn, answers[-1]) if answers else turn
        answers.append(await asyncio.to_thread(client.ask, items))
    return answers


def hang_up(client: Client) -> None:
    """Closes the socket under a thread that reads from it."""
    assert client.connection is not None
    assert client.connection.sock is not None
    client.connection.sock.shutdown(2)


async def has_calls(stage: Scene) -> bool:
    return bool(await stage.calls())


def tokens(calls: Sequence[Any]) -> list[tuple[list[int], list[int]]]:
    """Prompt and sampled tokens of each call, as stored."""
    return [
        tuple(np.frombuffer(data, "<i4").tolist() for data in (call.prompt_ids, call.sampled_ids)) for call in calls
    ]


def engine_tokens(stage: Scene) -> list[tuple[list[int], list[int]]]:
    """The same from the engine's own log."""
    return [(body["input_ids"], stage.engine.sampled[body["rid"]]) for body in stage.engine.requests]


def tree(calls: Sequence[Any]) -> list[str]:
    """The calls in order: `fresh`, or how each call continues an earlier one."""
    said = tokens(calls)

    def relation(number: int) -> str:
        prompt, earlier = said[number][0], [before + sampled for before, sampled in said[:number]]
        if any(prompt[: len(ids)] == ids for ids in earlier):
            return "extends"
        return "forks" if calls[number].parent_call_id is not None else "fresh"

    return [relation(number) for number in range(len(calls))]
