"""Claude Agent SDK: one session of two questions; its program streams every request."""

import asyncio
import sys

from claude_agent_sdk import (
    AssistantMessage,
    ClaudeAgentOptions,
    ClaudeSDKClient,
    TextBlock,
    create_sdk_mcp_server,
    tool,
)


@tool("get_weather", "The weather in a city.", {"city": str})
async def get_weather(arguments):
    if arguments["city"] == "Atlantis":
        raise ValueError(f"city not found: {arguments['city']}")
    return {"content": [{"type": "text", "text": "light rain"}]}


@tool("get_time", "The time in a city.", {"city": str})
async def get_time(arguments):
    return {"content": [{"type": "text", "text": "12:30"}]}


async def main():
    options = ClaudeAgentOptions(
        model="claude-sonnet-4-5",
        mcp_servers={"cities": create_sdk_mcp_server("cities", tools=[get_weather, get_time])},
        allowed_tools=["mcp__cities__get_weather", "mcp__cities__get_time"],
    )
    async with ClaudeSDKClient(options) as client:
        for question in sys.argv[1:3]:
            await client.query(question)
            async for message in client.receive_response():
                if isinstance(message, AssistantMessage):
                    print("".join(block.text for block in message.content if isinstance(block, TextBlock)))


asyncio.run(main())
