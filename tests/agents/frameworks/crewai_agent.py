"""CrewAI: a crew of one agent with two tasks in sequence."""

import sys

from crewai import Agent, Crew, Process, Task
from crewai.tools import tool


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


agent = Agent(
    role="Assistant",
    goal="Answer questions about cities",
    backstory="You are a helpful assistant.",
    tools=[get_weather, get_time],
    llm="gpt-4.1",
)
tasks = [Task(description=question, expected_output="A short answer", agent=agent) for question in sys.argv[1:3]]
result = Crew(agents=[agent], tasks=tasks, process=Process.sequential).kickoff()
for output in result.tasks_output:
    print(output.raw)
