"""The rules of an episode, shared by the versions of the agent: model, limits, task, and what a reply does."""

import json
import os
import sys
from pathlib import Path

from telemetry import execute
from world import ANSWER, NEXT, Task, ToolError, World

MODEL = os.environ.get("OPENAI_MODEL", "SmolLM2-135M-Instruct")
TEMPERATURE = 0.8
MAX_TOKENS = 16
TOOL_CALLS = 3


def read_task() -> Task:
    """Return the task of `LEYDEN_TASK`, or of the file that the first argument names."""
    text = Path(sys.argv[1]).read_text() if len(sys.argv) > 1 else os.environ.get("LEYDEN_TASK")
    if not text:
        sys.exit("no task: set LEYDEN_TASK to a JSON object, or name a JSON file as the first argument")
    return Task.from_row(json.loads(text))


def parse(reply: str, tools: tuple[str, ...]) -> tuple[str, str] | None:
    """Split `tool: question`; None where the reply does not start with the name of a tool."""
    name, colon, query = reply.partition(":")
    name = name.strip().lower()
    return (name, query.strip()) if colon and name in tools else None


def use_tool(world: World, reply: str, response_id: str = "") -> tuple[str, str]:
    """Do what the reply asks for: the name of the tool, or `none`, and the user's next message."""
    tools = world.tools()
    call = parse(reply, tuple(tools))
    if call is None:
        return "none", f"Error: name a tool. {NEXT}"
    name, query = call
    try:
        result = execute(name, tools[name], query, response_id)
    except ToolError as error:
        result = f"Error: {error}"
    return name, f"{result} {ANSWER if world.found else NEXT}"
