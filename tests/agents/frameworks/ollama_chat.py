"""ollama-python with a loop of its own over chat; the second answer is streamed."""

import sys

from ollama import Client, Message

client = Client()


def get_weather(city: str) -> str:
    """The weather of a city."""
    if city == "Atlantis":
        raise ValueError(f"city not found: {city}")
    return "light rain"


def get_time(city: str) -> str:
    """The time in a city."""
    return "12:30"


TOOLS = {"get_weather": get_weather, "get_time": get_time}


def run_tool(call):
    try:
        content = TOOLS[call.function.name](**call.function.arguments)
    except ValueError as error:
        content = f"Error: {error}"
    return {"role": "tool", "tool_name": call.function.name, "content": content}


def ask(messages, stream):
    if not stream:
        return client.chat(model="qwen3", messages=messages, tools=list(TOOLS.values())).message
    content, calls = "", []
    for part in client.chat(model="qwen3", messages=messages, tools=list(TOOLS.values()), stream=True):
        content += part.message.content or ""
        calls += part.message.tool_calls or []
    return Message(role="assistant", content=content, tool_calls=calls or None)


messages = [{"role": "system", "content": "You are a helpful assistant."}]
for number, question in enumerate(sys.argv[1:3]):
    messages.append({"role": "user", "content": question})
    while True:
        message = ask(messages, stream=number == 1)
        messages.append(message)
        if not message.tool_calls:
            break
        messages += [run_tool(call) for call in message.tool_calls]
    print(message.content)
