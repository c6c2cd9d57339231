"""The flight agent as an AutoGen team: an assistant names a tool, and an agent of ours runs it."""

import asyncio
from collections.abc import Sequence

from autogen_agentchat.agents import AssistantAgent, BaseChatAgent
from autogen_agentchat.base import Response
from autogen_agentchat.conditions import FunctionalTermination
from autogen_agentchat.messages import BaseAgentEvent, BaseChatMessage, TextMessage
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core import CancellationToken
from autogen_core.model_context import UnboundedChatCompletionContext
from autogen_core.models import AssistantMessage, LLMMessage, ModelInfo, UserMessage
from autogen_ext.models.openai import OpenAIChatCompletionClient
from episode import MAX_TOKENS, MODEL, TEMPERATURE, TOOL_CALLS, read_task, use_tool
from grade import Transcript, verdict
from prompt import EXAMPLES, SYSTEM
from telemetry import telemetry
from world import Task, World


class ToolRunner(BaseChatAgent):
    """Answers the assistant with the result of the tool that its message names."""

    def __init__(self, world: World) -> None:
        super().__init__("tools", "Runs tools.")
        self.world = world
        self.used: list[str] = []

    @property
    def produced_message_types(self) -> Sequence[type[BaseChatMessage]]:
        """It sends text alone."""
        return (TextMessage,)

    async def on_messages(self, messages: Sequence[BaseChatMessage], cancellation_token: CancellationToken) -> Response:
        """Run the tool of the last message."""
        name, text = use_tool(self.world, messages[-1].to_model_text())
        self.used.append(name)
        return Response(chat_message=TextMessage(content=text, source=self.name))

    async def on_reset(self, cancellation_token: CancellationToken) -> None:
        """Forget the tools."""
        self.used.clear()


def examples() -> list[LLMMessage]:
    """Return the two examples as earlier messages of the conversation."""
    return [
        AssistantMessage(content=text, source="assistant") if turn % 2 else UserMessage(content=text, source="user")
        for turn, text in enumerate(EXAMPLES)
    ]


async def converse(task: Task) -> Transcript:
    """Run the team until the assistant has answered the traveller, or three tools were of no use."""
    client = OpenAIChatCompletionClient(
        model=MODEL,
        temperature=TEMPERATURE,
        max_tokens=MAX_TOKENS,
        model_info=ModelInfo(
            vision=False, function_calling=False, json_output=False, structured_output=False, family="unknown"
        ),
    )
    assistant = AssistantAgent(
        "assistant", client, system_message=SYSTEM, model_context=UnboundedChatCompletionContext(examples())
    )
    runner = ToolRunner(World(task))

    def is_over(messages: Sequence[BaseAgentEvent | BaseChatMessage]) -> bool:
        if messages[-1].source == assistant.name:
            return runner.world.found
        return len(runner.used) == TOOL_CALLS and not runner.world.found

    team = RoundRobinGroupChat([assistant, runner], termination_condition=FunctionalTermination(is_over))
    result = await team.run(task=task.question)
    await client.close()
    last = result.messages[-1]
    answer = last.to_model_text() if isinstance(last, TextMessage) and runner.world.found else None
    return Transcript(tuple(runner.used), answer, len(runner.used) + (answer is not None))


if __name__ == "__main__":
    task = read_task()
    with telemetry():
        transcript = asyncio.run(converse(task))
    print(verdict(transcript, task.carrier))
