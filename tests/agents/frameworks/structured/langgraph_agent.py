"""LangChain's agent with a response format."""

import sys

from langchain.agents import create_agent
from pydantic import BaseModel


class Report(BaseModel):
    weather: str
    time: str


model = "anthropic:claude-sonnet-4-5" if "anthropic" in sys.argv[2:] else "openai:gpt-4.1"
agent = create_agent(model, tools=[], response_format=Report)
state = agent.invoke({"messages": [{"role": "user", "content": sys.argv[1]}]})
print(state["structured_response"].model_dump_json())
