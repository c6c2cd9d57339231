"""LangGraph's agent: ChatOpenAI, `greedy` at temperature 0, `anthropic` with ChatAnthropic; the second is streamed."""

import sys

from langchain.agents import create_agent
from langchain.agents.middleware import wrap_tool_call
from langchain.messages import ToolMessage
from langchain.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    if city == "Atlantis":
        raise ValueError(f"city not found: {city}")
    return "light rain"


@tool
def get_time(city: str) -> str:
    """The time in a city."""
    return "12:30"


@wrap_tool_call
def handle_tool_errors(request, handler):
    try:
        return handler(request)
    except ValueError as error:
        return ToolMessage(content=f"Tool error: {error}", tool_call_id=request.tool_call["id"], status="error")


model = "anthropic:claude-sonnet-4-5" if "anthropic" in sys.argv[3:] else "openai:gpt-4.1"
if "greedy" in sys.argv[3:]:
    model = ChatOpenAI(model="gpt-4.1", temperature=0)
agent = create_agent(
    model,
    tools=[get_weather, get_time],
    system_prompt="You are a helpful assistant.",
    middleware=[handle_tool_errors],
    checkpointer=InMemorySaver(),
)
config = {"configurable": {"thread_id": "1"}}
state = agent.invoke({"messages": [{"role": "user", "content": sys.argv[1]}]}, config)
print(state["messages"][-1].text)
text = ""
for chunk, _ in agent.stream({"messages": [{"role": "user", "content": sys.argv[2]}]}, config, stream_mode="messages"):
    text += chunk.text if chunk.type == "AIMessageChunk" else ""
print(text)
