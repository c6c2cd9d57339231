"""OpenAI Agents SDK with an output type."""

import sys

from agents import Agent, Runner, set_default_openai_api
from pydantic import BaseModel

if "chat" in sys.argv[2:]:
    set_default_openai_api("chat_completions")


class Report(BaseModel):
    weather: str
    time: str


agent = Agent(name="Reporter", instructions="You report.", output_type=Report)
print(Runner.run_sync(agent, sys.argv[1]).final_output.model_dump_json())
