"""AutoGen's AssistantAgent; the second run is streamed."""

import asyncio
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient


async def get_weather(city: str) -> str:
    """The weather in a city."""
    if city == "Atlantis":
        raise ValueError(f"city not found: {city}")
    return "light rain"


async def get_time(city: str) -> str:
    """The time in a city."""
    return "12:30"


async def main():
    client = OpenAIChatCompletionClient(model="gpt-4.1")
    agent = AssistantAgent(
        "assistant",
        model_client=client,
        tools=[get_weather, get_time],
        system_message="You are a helpful assistant.",
        max_tool_iterations=5,
        model_client_stream=True,
    )
    print((await agent.run(task=sys.argv[1])).messages[-1].content)
    async for event in agent.run_stream(task=sys.argv[2]):
        last = event
    print(last.messages[-1].content)
    await client.close()


asyncio.run(main())
