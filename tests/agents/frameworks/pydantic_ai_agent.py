"""Pydantic AI: the Responses API, or with the argument `chat` chat completions; the second run is streamed."""

import asyncio
import sys

from pydantic_ai import Agent, ModelRetry

model = "openai-chat:gpt-4.1" if "chat" in sys.argv[3:] else "openai:gpt-4.1"
agent = Agent(model, instructions="You are a helpful assistant.")


@agent.tool_plain
def get_weather(city: str) -> str:
    """The weather in a city."""
    if city == "Atlantis":
        raise ModelRetry(f"city not found: {city}")
    return "light rain"


@agent.tool_plain
def get_time(city: str) -> str:
    """The time in a city."""
    return "12:30"


async def main():
    first = await agent.run(sys.argv[1])
    print(first.output)
    async with agent.run_stream(sys.argv[2], message_history=first.all_messages()) as second:
        print(await second.get_output())


asyncio.run(main())
