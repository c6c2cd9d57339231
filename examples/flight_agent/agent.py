"""An agent that gets a stranded traveller to their destination with three tools and a chat model.

It needs `OPENAI_BASE_URL` and `OPENAI_API_KEY`, and a task: JSON in `LEYDEN_TASK`, or a file as the first argument.
The last line it prints is the grade of the conversation, as JSON.
"""

import gc

if __name__ == "__main__":
    # A process of one task: searching for cycles among the client's types, most of all at the exit, is a third of
    # its work. Before the first large import.
    gc.disable()

from episode import MAX_TOKENS, MODEL, TEMPERATURE, TOOL_CALLS, read_task, use_tool
from grade import Transcript, verdict
from openai import OpenAI
from prompt import opening
from telemetry import telemetry, trace_headers
from world import Task, World

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


def converse(client: OpenAI, task: Task) -> Transcript:
    """Let the model call up to three tools, then, if a search worked, answer the traveller."""
    world = World(task)
    messages = opening(task.question)
    tools: list[str] = []
    for turn in range(1, TOOL_CALLS + 1):
        name, result = use_tool(world, *ask(client, messages))
        tools.append(name)
        messages.append({"role": "user", "content": result})
        if world.found:
            answer, _ = ask(client, messages)
            return Transcript(tuple(tools), answer, turn + 1)
    return Transcript(tuple(tools), None, TOOL_CALLS)


def main() -> None:
    task = read_task()
    with telemetry(), OpenAI() as client:
        transcript = converse(client, task)
    print(verdict(transcript, task.carrier))


if __name__ == "__main__":
    main()
    gc.freeze()
