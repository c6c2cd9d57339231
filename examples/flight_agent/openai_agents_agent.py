"""The flight agent with OpenAI's Agents SDK, which calls the Responses API: code runs the agent once for each turn."""

import asyncio

from agents import Agent, ModelSettings, Runner, TResponseInputItem
from episode import MAX_TOKENS, MODEL, TEMPERATURE, TOOL_CALLS, read_task, use_tool
from grade import Transcript, verdict
from prompt import SYSTEM, opening
from telemetry import telemetry
from world import Task, World

AGENT = Agent(
    name="Flight agent",
    instructions=SYSTEM,
    model=MODEL,
    model_settings=ModelSettings(temperature=TEMPERATURE, max_tokens=MAX_TOKENS),
)


async def converse(task: Task) -> Transcript:
    """Let the agent reply until it has answered the traveller, or three tools were of no use."""
    world = World(task)
    # The SDK sends the instructions as the first message.
    messages: list[TResponseInputItem] = opening(task.question)[1:]
    tools: list[str] = []
    while world.found or len(tools) < TOOL_CALLS:
        result = await Runner.run(AGENT, messages)
        if world.found:
            return Transcript(tuple(tools), result.final_output, len(tools) + 1)
        name, text = use_tool(world, result.final_output, result.raw_responses[-1].response_id or "")
        tools.append(name)
        messages = [*result.to_input_list(), {"role": "user", "content": text}]
    return Transcript(tuple(tools), None, len(tools))


if __name__ == "__main__":
    task = read_task()
    with telemetry():
        transcript = asyncio.run(converse(task))
    print(verdict(transcript, task.carrier))
