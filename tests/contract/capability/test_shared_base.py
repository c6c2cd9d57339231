"""A service that reads its base URL once serves many attempts: the key of a request alone names its attempt."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI, AuthenticationError, PermissionDeniedError

from leyden.libs.contracts import ids
from leyden.libs.contracts.capability import Scope
from leyden.libs.store.database import Database
from tests.fakes.gateway import Scene, all_calls, scene
from tests.support import builders

HI = [{"role": "user", "content": "hi"}]


def client_at(stage: Scene, key: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{stage.gateway.url}/v1", api_key=key, max_retries=0)


async def test_calls_of_several_attempts_at_one_base_url_belong_to_their_keys(
    tmp_path: Path, database: Database
) -> None:
    async with scene(tmp_path, database) as stage, client_at(stage, "none") as service:
        rollouts = [ids.rollout_id(stage.rollout.group_id, sibling) for sibling in range(3)]
        clients = [service.with_options(api_key=stage.gateway.key(rollout)) for rollout in rollouts]
        asked = [one.chat.completions.create(model="m", messages=HI, max_tokens=4) for one in clients]
        answers = await asyncio.gather(*asked)
        recorded = {f"chatcmpl-{call.request_id}": call.rollout_id for call in await all_calls(database)}
        assert [recorded[answer.id] for answer in answers] == rollouts


async def test_anthropics_clients_and_the_responses_api_work_there_too(tmp_path: Path, database: Database) -> None:
    async with scene(tmp_path, database) as stage:
        key = stage.gateway.key(stage.rollout_id)
        async with AsyncAnthropic(base_url=stage.gateway.url, api_key=key, max_retries=0) as anthropic:
            await anthropic.messages.create(model="m", messages=HI, max_tokens=4)
        async with client_at(stage, key) as client:
            response = await client.responses.create(model="m", input="hi", max_output_tokens=4)
            assert (await client.responses.retrieve(response.id)).id == response.id
        assert {call.rollout_id for call in await all_calls(database)} == {stage.rollout_id}


@pytest.mark.parametrize("scope", [Scope.TELEMETRY, Scope.REWARD])
async def test_a_key_without_the_right_and_no_key_are_refused(tmp_path: Path, database: Database, scope: Scope) -> None:
    async with scene(tmp_path, database) as stage:
        async with client_at(stage, stage.gateway.key(stage.rollout_id, scope=scope)) as client:
            with pytest.raises(PermissionDeniedError, match="does not allow"):
                await client.models.list()
        async with client_at(stage, "none") as client:
            with pytest.raises(AuthenticationError):
                await client.models.list()


async def test_the_key_of_an_attempt_that_has_ended_opens_nothing(tmp_path: Path, database: Database) -> None:
    async with scene(tmp_path, database) as stage:
        await builders.end_attempt(database, stage.rollout_id)
        async with client_at(stage, stage.gateway.key(stage.rollout_id)) as client:
            with pytest.raises(PermissionDeniedError, match="has ended"):
                await client.chat.completions.create(model="m", messages=HI)
