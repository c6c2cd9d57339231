"""A scripted engine whose every answer names the length of its prompt, so that no two calls of a session are alike.

`python -m tests.bench.counting` serves on `COUNTING_LISTEN_FD`.
"""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

from leyden.services.gateway.prompt.template import ChatModel
from tests.fakes.scripted_engine import ScriptedEngine, running

WORDS = "the agent looked at the table and wrote down what it had found there before it went on "


def answer(model: ChatModel, prompt_tokens: int) -> list[int]:
    """The tokens that the engine samples after so many."""
    return [
        *model.tokenizer.encode(f"After {prompt_tokens} tokens {WORDS}{WORDS}").tolist(),
        max(model.tokenizer.eos_ids),
    ]


async def _serve() -> None:
    model, version = ChatModel(Path(os.environ["COUNTING_MODEL"])), os.environ["COUNTING_WEIGHT_VERSION"]
    engine = ScriptedEngine(
        lambda body: answer(model, len(body["input_ids"])),
        weight_version=version,
        tokens_per_chunk=10**6,
        inspects=False,
    )
    async with running(engine, listening=socket.socket(fileno=int(os.environ["COUNTING_LISTEN_FD"]))):
        with os.fdopen(int(os.environ["COUNTING_READY_FD"]), "w") as ready:
            ready.write("ready\n")
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve())
