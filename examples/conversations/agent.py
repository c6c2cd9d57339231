"""Replays a conversation: asks for each of its answers, which the policy `conversation` gives."""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path


def main() -> None:
    """Asks for every message of the assistant after the messages before it, and reports success."""
    task = json.loads(Path(os.environ["LEYDEN_TASK_FILE"]).read_text())
    for number, message in enumerate(task["messages"]):
        if number and message["role"] == "assistant":
            body = {"model": "conversation", "messages": task["messages"][:number]}
            body |= {name: task[name] for name in ("tools", "chat_template_kwargs") if task.get(name)}
            request = urllib.request.Request(  # noqa: S310  # the platform's own address
                f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
                json.dumps(body).encode(),
                {"content-type": "application/json", "authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
            )
            urllib.request.urlopen(request, timeout=600).read()  # noqa: S310
    print(json.dumps({"reward": 1.0}))


if __name__ == "__main__":
    main()
