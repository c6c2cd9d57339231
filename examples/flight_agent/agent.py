"""An agent that gets a stranded traveller to their destination with three tools and a chat model.

It needs `OPENAI_BASE_URL` and `OPENAI_API_KEY`, and a task: JSON in `LEYDEN_TASK`, or a file as the first argument.
The last line it prints is the grade of the conversation, as JSON.
"""

import gc

if __name__ == "__main__":
    # A process of one task: searching for cycles among the client's types, most of all at the exit, is a third of
    # its work. Before the first large import.
    gc.disable()

import json
import os
import sys
from pathlib import Path

from grade import Transcript, verdict
from openai import OpenAI
from prompt import opening
from telemetry import execute, telemetry, trace_headers
from world import ANSWER, NEXT, Task, ToolError, World

MODEL = os.environ.get("OPENAI_MODEL", "SmolLM2-135M-Instruct")
TEMPERATURE = 0.8
MAX_TOKENS = 16
TOOL_CALLS = 3

Messages = list[dict[str, str]]


def ask(client: OpenAI, messages: Messages) -> tuple[str, str]:
    """Return the model's reply and the id of its response; append the reply unchanged to the messages."""
    response = client.chat.completions.create(
        model=MODEL,
        messages=messages,  # type: ignore[arg-type]  # plain dicts are what the SDK sends
        temperature=TEMPERATURE,
        max_tokens=MAX_TOKENS,
        extra_headers=trace_headers(),
    )
    reply = response.choices[0].message.content or ""
    messages.append({"role": "assistant", "content": reply})
    return reply, response.id


def parse(reply: str, tools: tuple[str, ...]) -> tuple[str, str] | None:
    """Split `tool: question`; None where the reply does not start with the name of a tool."""
    name, colon, query = reply.partition(":")
    name = name.strip().lower()
    return (name, query.strip()) if colon and name in tools else None


def use_tool(world: World, reply: str, response_id: str) -> tuple[str | None, str]:
    """Do what the reply asks for: the name of the tool, if it named one, and what to tell the model."""
    tools = world.tools()
    call = parse(reply, tuple(tools))
    if call is None:
        return None, "Error: name a tool."
    name, query = call
    try:
        return name, execute(name, tools[name], query, response_id)
    except ToolError as error:
        return name, f"Error: {error}"


def converse(client: OpenAI, task: Task) -> Transcript:
    """Let the model call up to three tools, then, if a search worked, answer the traveller."""
    world = World(task)
    messages = opening(task.question)
    tools: list[str] = []
    for turn in range(1, TOOL_CALLS + 1):
        name, result = use_tool(world, *ask(client, messages))
        tools.append(name or "none")
        messages.append({"role": "user", "content": f"{result} {ANSWER if world.found else NEXT}"})
        if world.found:
            answer, _ = ask(client, messages)
            return Transcript(tuple(tools), answer, turn + 1)
    return Transcript(tuple(tools), None, TOOL_CALLS)


def read_task() -> Task:
    text = Path(sys.argv[1]).read_text() if len(sys.argv) > 1 else os.environ.get("LEYDEN_TASK")
    if not text:
        sys.exit("no task: set LEYDEN_TASK to a JSON object, or name a JSON file as the first argument")
    return Task.from_row(json.loads(text))


def main() -> None:
    task = read_task()
    with telemetry(), OpenAI() as client:
        transcript = converse(client, task)
    print(verdict(transcript, task.carrier))


if __name__ == "__main__":
    main()
    gc.freeze()
