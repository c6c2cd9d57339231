"""A stub engine whose every answer names the length of its prompt, so that no two calls of a session are alike.

`python -m tests.bench.counting` serves on `COUNTING_LISTEN_FD`.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from leyden.services.gateway.render import ChatModel

WORDS = "the agent looked at the table and wrote down what it had found there before it went on "


def answer(model: ChatModel, prompt_tokens: int) -> list[int]:
    """What is sampled after so many tokens."""
    return [*model.encode(f"After {prompt_tokens} tokens {WORDS}{WORDS}").tolist(), max(model.eos_ids)]


async def _serve() -> None:
    model, version = ChatModel(Path(os.environ["COUNTING_MODEL"])), os.environ["COUNTING_WEIGHT_VERSION"]

    async def generate(request: web.Request) -> web.Response:
        asked: Mapping[str, Any] = orjson.loads(await request.read())
        sampled = answer(model, len(asked["input_ids"]))
        meta = {
            "finish_reason": {"type": "stop", "matched": sampled[-1]},
            "weight_versions": [{"version": version, "start": 0, "end": len(sampled)}],
            "output_token_logprobs": [[-0.5, token, None] for token in sampled],
        }
        document = orjson.dumps({"text": "", "output_ids": sampled, "meta_info": meta})
        return web.Response(body=document, content_type="application/json")

    app = web.Application(client_max_size=2**26)
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.SockSite(runner, socket.socket(fileno=int(os.environ["COUNTING_LISTEN_FD"]))).start()
    with os.fdopen(int(os.environ["COUNTING_READY_FD"]), "w") as ready:
        ready.write("ready\n")
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve())
