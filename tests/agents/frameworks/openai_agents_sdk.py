"""OpenAI Agents SDK: the Responses API, or with the argument `chat` chat completions; the second run is streamed."""

import asyncio
import sys

from agents import Agent, Runner, function_tool, set_default_openai_api

if "chat" in sys.argv[3:]:
    set_default_openai_api("chat_completions")


@function_tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    if city == "Atlantis":
        raise ValueError(f"city not found: {city}")
    return "light rain"


@function_tool
def get_time(city: str) -> str:
    """The time in a city."""
    return "12:30"


agent = Agent(name="Assistant", instructions="You are a helpful assistant.", tools=[get_weather, get_time])


async def main():
    first = await Runner.run(agent, sys.argv[1])
    print(first.final_output)
    second = Runner.run_streamed(agent, [*first.to_input_list(), {"role": "user", "content": sys.argv[2]}])
    async for _ in second.stream_events():
        pass
    print(second.final_output)


asyncio.run(main())
