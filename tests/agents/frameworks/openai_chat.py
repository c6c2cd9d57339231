"""openai-python with a loop of its own over chat completions; the second answer is streamed."""

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
    {"type": "function", "function": {"name": name, "description": name, "parameters": PARAMETERS, "strict": True}}
    for name in TOOLS
]


def run_tool(call):
    try:
        return TOOLS[call.function.name](**json.loads(call.function.arguments))
    except ValueError as error:
        return f"Error: {error}"


def answer(messages, stream):
    while True:
        if stream:
            with client.chat.completions.stream(model="gpt-4.1", messages=messages, tools=DEFINITIONS) as events:
                message = events.get_final_completion().choices[0].message
        else:
            completion = client.chat.completions.create(model="gpt-4.1", messages=messages, tools=DEFINITIONS)
            message = completion.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": run_tool(call)})


messages = [{"role": "system", "content": "You are a helpful assistant."}]
for number, question in enumerate(sys.argv[1:3]):
    messages.append({"role": "user", "content": question})
    print(answer(messages, stream=number == 1))
