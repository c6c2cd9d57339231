"""A client of an engine's HTTP API, the same for the CPU engine and for SGLang."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import orjson

KEY, ADMIN_KEY = "inference-key", "control-key"


class EngineClient:
    """Sends requests with the API key, and control requests with the admin key."""

    def __init__(self, http: httpx.AsyncClient, model_path: str) -> None:
        self.http, self.model_path = http, model_path

    async def generate(self, **body: Any) -> Any:
        """The answer to a request that is expected to work."""
        answer = await self.http.post("/generate", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def control(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json=body, headers={"authorization": f"Bearer {ADMIN_KEY}"})

    async def stream(self, **body: Any) -> AsyncIterator[dict[str, Any]]:
        """Chunks as they come; the end mark is checked and left out."""
        async with self.http.stream("POST", "/generate", json={"stream": True, **body}) as answer:
            assert answer.status_code == 200
            done = False
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line:
                    yield orjson.loads(line.removeprefix("data: "))
            assert done

    async def reach(self, *, running: int, waiting: int) -> None:
        """Returns when so many requests run and wait in the queue."""
        async with asyncio.timeout(60):
            while True:
                load = (await self.http.get("/v1/loads")).json()["loads"][0]
                if (load["num_running_reqs"], load["num_waiting_reqs"]) == (running, waiting):
                    return
                await asyncio.sleep(0.02)
