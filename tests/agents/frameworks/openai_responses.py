"""openai-python with a loop of its own over the Responses API; the server has the conversation."""

import json
import sys

from openai import OpenAI

client = OpenAI()


def get_weather(city):
    if city == "Atlantis":
        raise ValueError(f"city not found: {city}")
    return "light rain"


def get_time(city):
    return "12:30"


TOOLS = {"get_weather": get_weather, "get_time": get_time}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
DEFINITIONS = [
    {"type": "function", "name": name, "description": name, "parameters": PARAMETERS, "strict": True} for name in TOOLS
]


def run_tool(call):
    try:
        return TOOLS[call.name](**json.loads(call.arguments))
    except ValueError as error:
        return f"Error: {error}"


def create(stream, **arguments):
    arguments |= {"model": "gpt-4.1", "tools": DEFINITIONS, "instructions": "You are a helpful assistant."}
    if not stream:
        return client.responses.create(**arguments)
    with client.responses.stream(**arguments) as events:
        return events.get_final_response()


previous = None
for number, question in enumerate(sys.argv[1:3]):
    stream = number == 1
    response = create(stream, input=question, **({"previous_response_id": previous} if previous else {}))
    while calls := [item for item in response.output if item.type == "function_call"]:
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": run_tool(call)} for call in calls
        ]
        response = create(stream, input=results, previous_response_id=response.id)
    previous = response.id
    print(response.output_text)
