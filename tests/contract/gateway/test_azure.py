"""OpenAI's client for Azure against the gateway, with the variables that the runner gives to agents;
`clients/azure-openai.json` has its wire."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from openai import AsyncAzureOpenAI, AsyncOpenAI

from tests.contract.gateway.test_calls import ids
from tests.fakes.chat_model import CHATML_WITH_TOOLS
from tests.fakes.gateway import Scene, attempt_environment, scene
from tests.frameworks.training import Trained, trained

VERSION = {"OPENAI_API_VERSION": "2025-04-01-preview"}
HI: list[Any] = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city":  "Rome"}}\n</tool_call>'


@pytest.fixture
def enter(monkeypatch):
    """Gives this process the variables of the attempt's agent."""

    def variables(stage: Scene) -> None:
        for name, value in attempt_environment(stage, stage.gateway.url, "http://nowhere", {}, **VERSION).items():
            monkeypatch.setenv(name, value)

    return variables


def openai_of(stage: Scene) -> str:
    return f"{stage.gateway.base_url(stage.rollout_id).removesuffix('/v1')}/openai"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("deployment", [None, "gpt-of-ours"])
async def test_a_conversation_with_tools_has_the_deployment_as_its_model(tmp_path, database, enter, deployment, stream):
    async with scene(tmp_path, database, says=[CALL, "It rains."], template=CHATML_WITH_TOOLS) as stage:
        enter(stage)
        async with AsyncAzureOpenAI(azure_deployment=deployment, max_retries=0) as client:
            messages, answers = list(HI), []
            for _ in range(2):
                asked: dict[str, Any] = {"model": "m", "messages": messages, "tools": TOOLS}
                answers.append(await (streamed(client, asked) if stream else client.chat.completions.create(**asked)))
                message = answers[-1].choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                messages += [
                    {"role": "tool", "tool_call_id": one.id, "content": "rain"} for one in message.tool_calls or ()
                ]
        first, last = await stage.calls()
        credited = await trained(database, stage.rollout)
    assert [answer.model for answer in answers] == [deployment or "m"] * 2
    assert answers[0].choices[0].message.tool_calls[0].function.arguments == '{"city":  "Rome"}'
    assert answers[1].choices[0].message.content == "It rains."
    assert {(call.dialect, call.status, call.trainable) for call in (first, last)} == {
        ("chat_completions", "completed", True)
    }
    assert first.request["model"] == (deployment or "m")
    assert [ids(call.sampled_ids) for call in (first, last)] == list(stage.engine.sampled.values())
    assert credited == Trained(sorted(ids(first.sampled_ids) + ids(last.sampled_ids)), {})
    # The second prompt begins with every token of the first call.
    known = ids(first.prompt_ids) + ids(first.sampled_ids)
    assert ids(last.prompt_ids)[: len(known)] == known


async def streamed(client: AsyncAzureOpenAI, asked: dict[str, Any]) -> Any:
    """The completion that the SDK gathers from a stream."""
    async with client.chat.completions.stream(**asked) as stream:
        return await stream.get_final_completion()


async def test_the_name_of_a_deployment_may_be_a_path_and_its_body_no_model(tmp_path, database, enter):
    async with scene(tmp_path, database) as stage:
        enter(stage)
        async with AsyncAzureOpenAI(max_retries=0) as client:
            answer = await client.chat.completions.create(model="Qwen/Qwen3-8B", messages=HI)
        url = f"{openai_of(stage)}/deployments/plain/chat/completions"
        headers = {"api-key": stage.gateway.key(stage.rollout_id)}
        async with httpx.AsyncClient() as http:
            plain = await http.post(url, headers=headers, json={"messages": HI})
            broken = await http.post(url, headers=headers, content=b"[]")
            refused = await http.post(url, headers={"api-key": "none"}, json={"messages": HI})
    assert (answer.model, plain.json()["model"]) == ("Qwen/Qwen3-8B", "plain")
    assert (broken.status_code, broken.json()["error"]["code"]) == (400, "invalid_json")
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")


async def test_equal_bodies_of_two_deployments_are_two_calls(tmp_path, database, enter):
    async with scene(tmp_path, database) as stage:
        enter(stage)
        for deployment in ("a", "b"):
            async with AsyncAzureOpenAI(
                azure_deployment=deployment, default_headers={"x-stainless-retry-count": "1"}
            ) as client:
                await client.chat.completions.create(model="m", messages=HI)
        assert [call.request["model"] for call in await stage.calls()] == ["a", "b"]


async def test_responses_and_text_completions_are_there_and_belong_to_the_attempt(tmp_path, database, enter):
    async with scene(tmp_path, database) as stage:
        enter(stage)
        async with AsyncAzureOpenAI(azure_deployment="d", max_retries=0) as client:
            response = await client.responses.create(model="m", input="hi")
            assert (await client.responses.retrieve(response.id)).output_text == response.output_text == "Hello."
            text = await client.completions.create(model="m", prompt="hi", max_tokens=32)
        assert (text.model, text.choices[0].text) == ("d", "Hello.")
        assert [call.dialect for call in await stage.calls()] == ["responses", "completions"]


async def test_the_versionless_api_serves_openais_own_client(tmp_path, database, enter):
    async with scene(tmp_path, database) as stage:
        enter(stage)
        key = stage.gateway.key(stage.rollout_id)
        async with AsyncOpenAI(base_url=f"{openai_of(stage)}/v1/", api_key=key, max_retries=0) as client:
            answer = await client.chat.completions.create(model="m", messages=HI)
            response = await client.responses.create(model="m", input="hi")
            assert (answer.choices[0].message.content, response.output_text) == ("Hello.", "Hello.")
            assert [one.id async for one in client.models.list()]


async def test_the_variables_of_both_servers_leave_openais_module_usable(tmp_path, database, enter, monkeypatch):
    """Its module of functions refuses to work with the variables of both, unless one more says which."""
    async with scene(tmp_path, database) as stage:
        enter(stage)
        # The module read its variables as this process began.
        monkeypatch.setattr(openai, "api_type", attempt_environment(stage, "u", "u", {}, **VERSION)["OPENAI_API_TYPE"])
        monkeypatch.setattr(openai, "_client", None)
        assert type(openai._load_client()).__name__ == "_ModuleClient"
