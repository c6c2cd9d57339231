"""LlamaIndex: the FunctionAgent, which streams, or with the argument `react` the ReActAgent."""

import asyncio
import sys

from llama_index.core.agent.workflow import FunctionAgent, ReActAgent
from llama_index.core.workflow import Context
from llama_index.llms.openai import OpenAI


def get_weather(city: str) -> str:
    """The weather in a city."""
    if city == "Atlantis":
        raise ValueError(f"city not found: {city}")
    return "light rain"


def get_time(city: str) -> str:
    """The time in a city."""
    return "12:30"


async def main():
    agent = (ReActAgent if "react" in sys.argv[3:] else FunctionAgent)(
        tools=[get_weather, get_time],
        llm=OpenAI(model="gpt-4.1"),
        system_prompt="You are a helpful assistant.",
    )
    context = Context(agent)
    print(await agent.run(sys.argv[1], ctx=context))
    print(await agent.run(sys.argv[2], ctx=context))


asyncio.run(main())
