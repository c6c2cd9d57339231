"""Replays a conversation: asks for each of its answers, which the policy `conversation` gives."""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path
from typing import Any


def main() -> None:
    """Asks for every message of the assistant after the messages before it, and reports success."""
    task = json.loads(Path(os.environ["LEYDEN_TASK_FILE"]).read_text())
    messages = [in_wire_format(message) for message in task["messages"]]
    for number, message in enumerate(messages):
        if number and message["role"] == "assistant":
            body = {"model": "conversation", "messages": messages[:number]}
            body |= {name: task[name] for name in ("tools", "chat_template_kwargs") if task.get(name)}
            request = urllib.request.Request(  # noqa: S310  # the platform's own address
                f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
                json.dumps(body).encode(),
                {"content-type": "application/json", "authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
            )
            urllib.request.urlopen(request, timeout=600).read()  # noqa: S310
    print(json.dumps({"reward": 1.0}))


def in_wire_format(message: dict[str, Any]) -> dict[str, Any]:
    """Returns the message with the arguments of its tool calls as text, where TRL's rows have objects."""
    calls = [{**call, "function": dict(call["function"])} for call in message.get("tool_calls") or ()]
    for function in (call["function"] for call in calls):
        if isinstance(function.get("arguments"), dict):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return {**message, "tool_calls": calls} if calls else message


if __name__ == "__main__":
    main()
