"""smolagents: the ToolCallingAgent, or with the argument `code` the CodeAgent."""

import sys

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool


@tool
def get_weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: the city
    """
    if city == "Atlantis":
        raise ValueError(f"city not found: {city}")
    return "light rain"


@tool
def get_time(city: str) -> str:
    """The time in a city.

    Args:
        city: the city
    """
    return "12:30"


model = OpenAIModel(model_id="gpt-4.1")
kind = CodeAgent if "code" in sys.argv[3:] else ToolCallingAgent
agent = kind(tools=[get_weather, get_time], model=model)
print(agent.run(sys.argv[1]))
print(agent.run(sys.argv[2], reset=False))
