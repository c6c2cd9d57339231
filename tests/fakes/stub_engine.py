"""An engine that costs nothing: SGLang's protocol with the same short answer to everything, as a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator

import orjson
import uvloop
from aiohttp import web

SAID = range(40, 49)
"""The tokens of the answer, letters in a byte-level vocabulary; an end of turn follows."""


class StubEngine:
    """Loads whatever weights it is told to in no time, and answers as if it had sampled from them."""

    def __init__(self) -> None:
        self._version = "default"

    async def generate(self, request: web.Request) -> web.Response:
        """The whole answer at once; streams are not spoken here."""
        body = orjson.loads(await request.read())
        ids = [*SAID, body["sampling_params"]["stop_token_ids"][0]]
        meta = {
            "id": body["rid"],
            "finish_reason": {"type": "stop", "matched": ids[-1]},
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "weight_version": self._version,
            "weight_versions": [{"version": self._version, "start": 0, "end": len(ids)}],
            "output_token_logprobs": [[-5.0, token, None] for token in ids],
        }
        answer = orjson.dumps({"text": "", "output_ids": ids, "meta_info": meta})
        return web.Response(body=answer, content_type="application/json")

    async def model_info(self, _request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self._version})

    async def update(self, request: web.Request) -> web.Response:
        self._version = (await request.json())["weight_version"]
        return web.json_response({"success": True, "message": ""})

    async def nothing(self, request: web.Request) -> web.Response:
        await request.read()
        return web.json_response({})


async def _serve() -> None:
    engine, app = StubEngine(), web.Application()
    app.router.add_post("/generate", engine.generate)
    app.router.add_get("/model_info", engine.model_info)
    app.router.add_post("/update_weights_from_disk", engine.update)
    for path in ("/pause_generation", "/continue_generation", "/abort_request"):
        app.router.add_post(path, engine.nothing)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


@contextlib.contextmanager
def stub_engine() -> Iterator[str]:
    """The URL of a stub engine that runs as a process while the block lasts."""
    command = [sys.executable, "-m", "tests.fakes.stub_engine"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


if __name__ == "__main__":
    uvloop.run(_serve())
