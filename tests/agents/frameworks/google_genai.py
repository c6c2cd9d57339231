"""google-genai with a loop of its own over `generate_content`; the second answer is streamed."""

import sys

from google import genai
from google.genai import types

client = genai.Client(http_options=types.HttpOptions(retry_options=types.HttpRetryOptions(initial_delay=0.1)))


def get_weather(city):
    if city == "Atlantis":
        raise ValueError(f"city not found: {city}")
    return "light rain"


def get_time(city):
    return "12:30"


TOOLS = {"get_weather": get_weather, "get_time": get_time}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
DECLARATIONS = [types.FunctionDeclaration(name=name, description=name, parameters_json_schema=SCHEMA) for name in TOOLS]
CONFIG = types.GenerateContentConfig(
    system_instruction="You are a helpful assistant.", tools=[types.Tool(function_declarations=DECLARATIONS)]
)


def run_tool(call):
    try:
        result = {"output": TOOLS[call.name](**call.args)}
    except ValueError as error:
        result = {"error": str(error)}
    return types.Part(function_response=types.FunctionResponse(id=call.id, name=call.name, response=result))


def ask(contents, stream):
    arguments = {"model": "gemini-2.5-flash", "contents": contents, "config": CONFIG}
    if not stream:
        return client.models.generate_content(**arguments).candidates[0].content.parts
    parts = []
    for chunk in client.models.generate_content_stream(**arguments):
        for candidate in chunk.candidates or []:
            parts += (candidate.content and candidate.content.parts) or []
    return parts


contents = []
for number, question in enumerate(sys.argv[1:3]):
    contents.append(types.UserContent(question))
    while True:
        parts = ask(contents, stream=number == 1)
        contents.append(types.ModelContent(parts))
        calls = [part.function_call for part in parts if part.function_call]
        if not calls:
            break
        contents.append(types.UserContent([run_tool(call) for call in calls]))
    print("".join(part.text or "" for part in parts))
