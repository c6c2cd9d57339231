"""An engine that says what a test tells it to, in SGLang's `/generate` protocol (see the gateway's sample.py)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web

Json = dict[str, Any]


@dataclass
class FakeEngine:
    """Answers with the tokens that `says` gives for a request's body, in cumulative chunks when streaming.

    `pace` is called before each token and may wait. `dies_after` tokens the connection is cut, once. A weight version
    set while an answer is under way counts for the tokens after it. The first `damaged` answers are told as `damage`
    makes them.
    """

    says: Callable[[Json], Sequence[int]]
    decode: Callable[[Sequence[int]], str]
    weight_version: str = "run-test:0"
    url: str = ""
    pace: Callable[[int], Any] | None = None
    dies_after: int | None = None
    refuses: tuple[int, Json] | None = None
    tokens_per_chunk: int = 1
    requests: list[Json] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    paused: asyncio.Event | None = None
    damage: Callable[[Json], Any] | None = None
    damaged: int = 0

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        self.requests.append(body)
        if self.refuses is not None:
            status, document = self.refuses
            return web.json_response(document, status=status)
        if not body["stream"]:
            document: Json = {}
            async for document in self._answer(body):  # noqa: B007 - the last one is the whole answer
                pass
            finished = bool(document) and document["meta_info"]["finish_reason"] is not None
            return web.json_response(self._told(document)) if finished else self._cut(request)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        finished = False
        async for document in self._answer(body):
            finished = document["meta_info"]["finish_reason"] is not None
            await response.write(b"data: " + orjson.dumps(self._told(document)) + b"\n\n")
        if not finished:
            return self._cut(request, response)
        await response.write(b"data: [DONE]\n\n")
        return response

    def _told(self, document: Json) -> Any:
        if self.damage is None or len(self.requests) > self.damaged:
            return document
        return self.damage(document)

    async def abort(self, request: web.Request) -> web.Response:
        self.aborted.append(orjson.loads(await request.read())["rid"])
        return web.Response()

    def _cut(self, request: web.Request, response: web.StreamResponse | None = None) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return response or web.Response()

    async def _answer(self, body: Json) -> AsyncIterator[Json]:
        said, spans = list(self.says(body)), list[Json]()
        ids: list[int] = []
        while True:
            if self.pace is not None:
                waiting = self.pace(len(ids))
                if waiting is not None:
                    await waiting
            if self.dies_after is not None and len(ids) >= self.dies_after:
                self.dies_after = None
                return
            if body["rid"] in self.aborted:
                yield self._document(body, ids, spans, {"type": "abort", "message": "Aborted"})
                return
            for token in said[len(ids) : len(ids) + self.tokens_per_chunk]:
                ids.append(token)
                if not spans or spans[-1]["version"] != self.weight_version:
                    spans.append({"version": self.weight_version, "start": len(ids) - 1, "end": len(ids)})
                spans[-1]["end"] = len(ids)
                if (finish := self._finish(body, ids)) is not None:
                    yield self._document(body, ids, spans, finish)
                    return
            yield self._document(body, ids, spans, None)

    def _finish(self, body: Json, ids: list[int]) -> Json | None:
        parameters = body["sampling_params"]
        if ids[-1] in parameters["stop_token_ids"]:
            return {"type": "stop", "matched": ids[-1]}
        text = self.decode(ids)
        for stop in parameters["stop"]:
            if stop in text:
                return {"type": "stop", "matched": stop}
        if len(ids) >= parameters["max_new_tokens"]:
            return {"type": "length", "length": len(ids)}
        return None

    def _document(self, body: Json, ids: list[int], spans: list[Json], finish: Json | None) -> Json:
        meta: Json = {
            "id": body["rid"],
            "finish_reason": finish,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "weight_version": self.weight_version,
            "weight_versions": [dict(span) for span in spans],
            "output_token_logprobs": [[logprob_of(position), token, None] for position, token in enumerate(ids)],
        }
        if body["top_logprobs_num"]:
            meta["output_top_logprobs"] = [
                [[logprob_of(position), token, None]] * body["top_logprobs_num"] for position, token in enumerate(ids)
            ]
        return {"text": self.decode(ids), "output_ids": ids, "meta_info": meta}


def logprob_of(position: int) -> float:
    """The log-probability that the fake claims for its token at a position of one engine request; exact in float32."""
    return -(position + 1) / 8


@asynccontextmanager
async def running(engine: FakeEngine) -> AsyncIterator[FakeEngine]:
    """The engine on a free port of the loopback, its `url` set."""
    app = web.Application()
    app.router.add_post("/generate", engine.generate)
    app.router.add_post("/abort_request", engine.abort)
    runner = web.AppRunner(app, shutdown_timeout=0.5)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield engine
    finally:
        await runner.cleanup()
