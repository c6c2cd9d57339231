"""anthropic-python with a loop of its own over messages; the second answer is streamed."""

import sys

from anthropic import Anthropic

client = Anthropic()


def get_weather(city):
    if city == "Atlantis":
        raise ValueError(f"city not found: {city}")
    return "light rain"


def get_time(city):
    return "12:30"


TOOLS = {"get_weather": get_weather, "get_time": get_time}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
DEFINITIONS = [{"name": name, "description": name, "input_schema": SCHEMA} for name in TOOLS]


def run_tool(call):
    result = {"type": "tool_result", "tool_use_id": call.id}
    try:
        return {**result, "content": TOOLS[call.name](**call.input)}
    except ValueError as error:
        return {**result, "content": str(error), "is_error": True}


def create(messages, stream):
    arguments = {
        "model": "claude-sonnet-4-5",
        "max_tokens": 1024,
        "system": "You are a helpful assistant.",
        "messages": messages,
        "tools": DEFINITIONS,
    }
    if not stream:
        return client.messages.create(**arguments)
    with client.messages.stream(**arguments) as events:
        return events.get_final_message()


messages = []
for number, question in enumerate(sys.argv[1:3]):
    messages.append({"role": "user", "content": question})
    while True:
        message = create(messages, stream=number == 1)
        messages.append({"role": "assistant", "content": message.content})
        calls = [block for block in message.content if block.type == "tool_use"]
        if not calls:
            break
        messages.append({"role": "user", "content": [run_tool(call) for call in calls]})
    print("".join(block.text for block in message.content if block.type == "text"))
