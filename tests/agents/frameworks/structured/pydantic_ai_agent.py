"""Pydantic AI with an output type, which is a tool to the model."""

import sys

from pydantic import BaseModel
from pydantic_ai import Agent


class Report(BaseModel):
    weather: str
    time: str


agent = Agent("openai-chat:gpt-4.1" if "chat" in sys.argv[2:] else "openai:gpt-4.1", output_type=Report)
print(agent.run_sync(sys.argv[1]).output.model_dump_json())
