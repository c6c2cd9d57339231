"""LiteLLM's completion with a loop of its own; the second answer is streamed."""

import json
import sys

import litellm


def get_weather(city):
    if city == "Atlantis":
        raise ValueError(f"city not found: {city}")
    return "light rain"


def get_time(city):
    return "12:30"


TOOLS = {"get_weather": get_weather, "get_time": get_time}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
DEFINITIONS = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": PARAMETERS}} for name in TOOLS
]


def run_tool(call):
    try:
        return TOOLS[call.function.name](**json.loads(call.function.arguments))
    except ValueError as error:
        return f"Error: {error}"


def answer(messages, stream):
    while True:
        response = litellm.completion(model="openai/gpt-4.1", messages=messages, tools=DEFINITIONS, stream=stream)
        if stream:
            response = litellm.stream_chunk_builder(list(response), messages=messages)
        message = response.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": run_tool(call)}
            )


messages = [{"role": "system", "content": "You are a helpful assistant."}]
for number, question in enumerate(sys.argv[1:3]):
    messages.append({"role": "user", "content": question})
    print(answer(messages, stream=number == 1))
