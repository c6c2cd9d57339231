"""DSPy's ReAct module: a text protocol, each turn one prompt of its own."""

import sys

import dspy


def get_weather(city: str) -> str:
    """The weather in a city."""
    if city == "Atlantis":
        raise ValueError(f"city not found: {city}")
    return "light rain"


def get_time(city: str) -> str:
    """The time in a city."""
    return "12:30"


dspy.configure(lm=dspy.LM("openai/gpt-4.1", cache=False))
react = dspy.ReAct("question -> answer", tools=[get_weather, get_time])
for question in sys.argv[1:3]:
    print(react(question=question).answer)
