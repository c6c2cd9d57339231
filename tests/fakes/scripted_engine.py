"""The one scripted engine of the tests: SGLang's protocol as far as the gateway and the controller use it.

A test scripts answers, delays, failures and deaths in Python, or over HTTP where the engine is a process of its own:
`POST /script` sets fields of `ScriptedEngine`, `GET /script` reports the requests. Every request and every undamaged
answer must hold before SGLang's own types.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import orjson
import uvloop
from aiohttp import web

from tests.fakes.sglang_types import api_types

if TYPE_CHECKING:
    # It imports torch, which an engine without one does not need.
    from tests.fakes.receiver import Receiver

Json = dict[str, Any]
Says = Callable[[Json], Sequence[int]]

LETTERS = range(40, 49)
TRANSFER_ROUTES = (
    "/init_weights_update_group",
    "/begin_weight_update",
    "/update_weights_from_distributed",
    "/end_weight_update",
    "/update_weight_version",
    "/destroy_weights_update_group",
)
SCRIPTABLE = {
    *("weight_version", "delay_seconds", "pace_seconds", "dies_after", "refuses", "tokens_per_chunk"),
    *("is_incremental", "paused", "bad_paths", "log", "updates"),
}


def say_letters(body: Json) -> list[int]:
    """Nine letters of a byte-level vocabulary, ended by the first stop token."""
    return [*LETTERS, *body["sampling_params"]["stop_token_ids"][:1]]


def say_by_request(count: int) -> Says:
    """So many capital letters, which the request's `rid` chooses, ended by the first stop token."""

    def says(body: Json) -> list[int]:
        letters = random.Random(body["rid"]).choices(range(32, 58), k=count)
        return [*letters, *body["sampling_params"]["stop_token_ids"][:1]]

    return says


def logprob_of(position: int) -> float:
    """The log-probability that the engine claims for its token at a position of one request; exact in float32."""
    return -(position + 1) / 8


@dataclass
class ScriptedEngine:
    """Answers with the tokens that `says` gives for a request's body; streams send `tokens_per_chunk` with each event.

    `is_incremental`: events list the new tokens alone, as with `--incremental-streaming-output`.
    `pace` is called before each chunk with the number of tokens so far and may wait; `delay_seconds` pass before each
    answer and `pace_seconds` before each chunk. A weight version set during an answer counts for the tokens after it.
    After `dies_after` tokens the connection is cut, once. `damage` changes the first `damaged` answers. `refuses` is a
    status with a body for every request. Weights at `bad_paths` cannot be loaded. `updates`: "never"
    leaves an update without an answer, "ignored" answers 200 and keeps the weights. `receiver`: receives
    weights over the network; its routes in `failing` refuse. `adapters`: folders of loaded LoRA
    adapters by name; the engine refuses requests of others. `frees`: unloading waits for it, and other changes of
    adapters for that, as in SGLang. `inspects`: whether requests are checked and retained, and the tokens of each
    complete answer by its `rid`; the benchmarks do without. `log` names a file that gets a
    JSON line with `rid`, `input_ids` and `ids` of each complete answer before its end is sent.
    """

    says: Says = say_letters
    decode: Callable[[Sequence[int]], str] = lambda _: ""
    weight_version: str = "default"
    url: str = ""
    pace: Callable[[int], Any] | None = None
    delay_seconds: float = 0.0
    pace_seconds: float = 0.0
    dies_after: int | None = None
    refuses: tuple[int, Json] | None = None
    tokens_per_chunk: int = 1
    is_incremental: bool = False
    damage: Callable[[Json], Any] | None = None
    damaged: int = 0
    paused: bool = False
    bad_paths: set[str] = field(default_factory=set)
    updates: str = "loaded"
    receiver: Receiver | None = None
    failing: set[str] = field(default_factory=set)
    adapters: dict[str, str] = field(default_factory=dict)
    frees: asyncio.Event | None = None
    _adapters_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    inspects: bool = True
    log: str | None = None
    requests: list[Json] = field(default_factory=list)
    sampled: dict[str, list[int]] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)
    journal: list[str] = field(default_factory=list)
    _live: set[str] = field(default_factory=set)

    def script(self, changes: Json) -> None:
        """Sets fields; `tokens` is the answer to every request, `letters` the length of answers by request.

        Raises: ValueError: a field cannot be set over HTTP
        """
        for name, value in changes.items():
            if name == "tokens":
                self.says = lambda _, tokens=value: tokens
            elif name == "letters":
                self.says = say_by_request(value)
            elif name in SCRIPTABLE:
                setattr(self, name, set(value) if name == "bad_paths" else value)
            else:
                raise ValueError(f"{name} cannot be scripted")

    def app(self) -> web.Application:
        """The routes."""
        app = web.Application(client_max_size=2**28)
        app.add_routes(
            [
                web.post("/generate", self.generate),
                web.post("/abort_request", self.abort),
                web.post("/pause_generation", self.pause),
                web.post("/continue_generation", self.resume),
                web.post("/update_weights_from_disk", self.update),
                *(web.post(path, self.receive) for path in TRANSFER_ROUTES if self.receiver),
                web.post("/load_lora_adapter", self.load_adapter),
                web.post("/unload_lora_adapter", self.unload_adapter),
                web.get("/v1/models", self.models),
                web.post("/flush_cache", self.flush),
                web.get("/model_info", self.model_info),
                web.get("/server_info", self.server_info),
                web.get("/health", self.health),
                web.get("/script", self.report),
                web.post("/script", self.set_script),
            ]
        )
        return app

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await _body_of(request)
        is_damaged = self.damage is not None and len(self.requests) < self.damaged
        if (refused := self._refusal(body)) is not None:
            return refused
        # SGLang gives an id to a request without one, and answers in one body.
        body["rid"] = body.get("rid") or uuid4().hex
        body.setdefault("stream", False)
        self._live.add(body["rid"])
        try:
            return await self._respond(request, body, is_damaged=is_damaged)
        finally:
            self._live.discard(body["rid"])

    def _refusal(self, body: Json) -> web.Response | None:
        if self.inspects:
            self.requests.append(body)
            types = api_types()
            try:
                types.GenerateRequest.from_json_value(body)
            except types.JsonContractError as error:
                return _json({"error": str(error)}, 400)
        if self.refuses is not None:
            return _json(self.refuses[1], self.refuses[0])
        if (adapter := body.get("lora_path")) is not None and adapter not in self.adapters:
            return _json({"error": {"message": f"Got LoRA adapter that has never been loaded: {adapter}"}}, 400)
        if body.get("rid") in self._live:
            return _json({"error": {"message": f"Duplicate request ID detected: {body['rid']}"}}, 400)
        return None

    async def _respond(self, request: web.Request, body: Json, *, is_damaged: bool) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        answer, sent = _Answer(body), 0
        interval = body["sampling_params"].get("stream_interval") or 1
        if body["stream"]:
            await response.prepare(request)
        async for _ in self._sampled(answer):
            due = sent + (interval if sent else 1)
            if body["stream"] and (answer.finish is not None or len(answer.ids) >= due):
                document = self._document(answer, sent if self.is_incremental else 0, is_damaged=is_damaged)
                await response.write(b"data: " + orjson.dumps(document) + b"\n\n")
                sent = len(answer.ids)
        if answer.finish is None:
            assert request.transport is not None
            request.transport.abort()
            return response
        if self.inspects:
            self.sampled[body["rid"]] = answer.ids
        if not body["stream"]:
            return _json(self._document(answer, 0, is_damaged=is_damaged))
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _sampled(self, answer: _Answer) -> AsyncIterator[None]:
        """Yields after each chunk; the answer stays unfinished where the engine dies."""
        body, ids = answer.body, answer.ids
        said = list(self.says(body))
        await asyncio.sleep(self.delay_seconds)
        while answer.finish is None:
            if self.pace is not None and (waiting := self.pace(len(ids))) is not None:
                await waiting
            if self.pace_seconds:
                await asyncio.sleep(self.pace_seconds)
            while self.paused and body["rid"] not in self.aborted:
                await asyncio.sleep(0.005)
            if self.dies_after is not None and len(ids) >= self.dies_after:
                self.dies_after = None
                return
            if body["rid"] in self.aborted:
                message = "Aborted" if ids else "Abort in waiting queue"
                answer.finish = {"type": "abort", "message": message}
            chunk = said[len(ids) : len(ids) + self.tokens_per_chunk]
            assert chunk or answer.finish, "the script says nothing more, and no parameter ends the answer"
            for token in chunk:
                if answer.finish is None:
                    answer.add(token, self.weight_version)
                    answer.finish = self._finish(body, ids)
            if answer.finish is not None and self.log is not None:
                _append(Path(self.log), {"rid": body["rid"], "input_ids": body["input_ids"], "ids": ids})
            yield

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

    def _document(self, answer: _Answer, first: int, *, is_damaged: bool) -> Any:
        """The event that lists the tokens from number `first` on."""
        body, new = answer.body, list(enumerate(answer.ids))[first:]
        meta: Json = {
            "id": body["rid"],
            "finish_reason": answer.finish,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(answer.ids),
            "cached_tokens": 0,
            "weight_version": self.weight_version,
            "output_token_logprobs": [[logprob_of(position), token, None] for position, token in new],
        }
        if answer.finish is not None:
            # SGLang 0.5.23 knows the spans only at the end.
            meta["weight_versions"] = [dict(span) for span in answer.spans]
        if not answer.ids and answer.finish is not None:
            del meta["prompt_tokens"], meta["cached_tokens"]
        if body["top_logprobs_num"]:
            meta["output_top_logprobs"] = [
                [[logprob_of(position), token, None]] * body["top_logprobs_num"] for position, token in new
            ]
        ids = answer.ids[first:]
        document = {"text": self.decode(ids), "output_ids": ids, "meta_info": meta}
        if self.inspects:
            api_types().GenerateResponse.from_json_value(document)
        return self.damage(document) if is_damaged and self.damage is not None else document

    async def abort(self, request: web.Request) -> web.Response:
        body = await _body_of(request)
        self.aborted += self._live if body.get("abort_all") else [body["rid"]]
        return web.Response()

    async def pause(self, request: web.Request) -> web.Response:
        mode = (await _body_of(request)).get("mode", "abort")
        self.journal.append(f"pause {mode}")
        self.paused = True
        if mode == "abort":
            self.aborted += self._live
        return _json({"status": "ok"})

    async def resume(self, request: web.Request) -> web.Response:
        await _body_of(request)
        self.journal.append("continue")
        self.paused = False
        return _json({"status": "ok"})

    async def update(self, request: web.Request) -> web.Response:
        body = await _body_of(request)
        self.journal.append(f"update {body['model_path']} {body['weight_version']} flush={body['flush_cache']}")
        if body["model_path"] in self.bad_paths:
            return _json({"success": False, "message": "no such file"}, 400)
        if self.updates == "never":
            await asyncio.Event().wait()
        if self.updates != "ignored":
            self.weight_version = body["weight_version"]
        return _json({"success": True, "message": "", "num_paused_requests": 0})

    async def receive(self, request: web.Request) -> web.Response:
        body = await _body_of(request)
        label = body.get("new_version", "")
        self.journal.append(f"{request.path[1:]} {label}".strip())
        assert self.receiver is not None
        try:
            if request.path in self.failing:
                raise RuntimeError("it was told to fail")
            await self.receiver.answer(request.path, body)
        except RuntimeError as error:
            return _json({"success": False, "message": f"Failed to receive weights: {error}"}, 400)
        self.weight_version = label or self.weight_version
        return _json({"success": True, "message": ""})

    async def load_adapter(self, request: web.Request) -> web.Response:
        body = await _body_of(request)
        self.journal.append(f"load {body['lora_name']} {body['lora_path']}")
        async with self._adapters_lock:
            if body["lora_name"] in self.adapters or body["lora_path"] in self.bad_paths:
                message = "already loaded" if body["lora_name"] in self.adapters else "no such file"
                return _json({"success": False, "error_message": message}, 400)
            if self.updates != "ignored":
                self.adapters[body["lora_name"]] = body["lora_path"]
            return _json({"success": True, "error_message": "", "loaded_adapters": self.adapters})

    async def unload_adapter(self, request: web.Request) -> web.Response:
        name = (await _body_of(request))["lora_name"]
        self.journal.append(f"unload {name}")
        async with self._adapters_lock:
            known = self.adapters.pop(name, None) is not None
            if self.frees is not None:
                await self.frees.wait()
        return _json({"success": known, "error_message": "" if known else "not loaded"}, 200 if known else 400)

    async def models(self, _request: web.Request) -> web.Response:
        base = {"id": "m", "object": "model", "root": "m", "parent": None}
        adapters = [{"id": name, "root": path, "parent": "m"} for name, path in self.adapters.items()]
        return _json({"object": "list", "data": [base, *adapters]})

    async def flush(self, _request: web.Request) -> web.Response:
        return web.Response(status=400 if self._live else 200)

    async def model_info(self, _request: web.Request) -> web.Response:
        return _json({"model_path": "m", "weight_version": self.weight_version})

    async def server_info(self, _request: web.Request) -> web.Response:
        receiver = self.receiver
        sizes = {"tp_size": receiver.processes, "dp_size": 1, "pp_size": 1} if receiver else {}
        return _json({"version": "0.5.23", "incremental_streaming_output": self.is_incremental, **sizes})

    async def health(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def report(self, _request: web.Request) -> web.Response:
        return _json({"requests": self.requests, "aborted": self.aborted, "journal": self.journal})

    async def set_script(self, request: web.Request) -> web.Response:
        try:
            self.script(await _body_of(request))
        except ValueError as error:
            raise web.HTTPBadRequest(text=str(error)) from error
        return _json({})


@dataclass
class _Answer:
    """One request's tokens while they are sampled."""

    body: Json
    ids: list[int] = field(default_factory=list)
    spans: list[Json] = field(default_factory=list)
    finish: Json | None = None

    def add(self, token: int, version: str) -> None:
        if not self.spans or self.spans[-1]["version"] != version:
            self.spans.append({"version": version, "start": len(self.ids), "end": len(self.ids)})
        self.ids.append(token)
        self.spans[-1]["end"] = len(self.ids)


def _append(log: Path, line: Json) -> None:
    with log.open("ab") as file:
        file.write(orjson.dumps(line) + b"\n")


async def _body_of(request: web.Request) -> Json:
    """SGLang answers 400 to a body that is empty or no JSON."""
    try:
        body: Json = orjson.loads(await request.read())
    except orjson.JSONDecodeError as error:
        raise web.HTTPBadRequest(text=str(error)) from error
    return body


def _json(document: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(document), status=status, content_type="application/json")


@asynccontextmanager
async def running(
    engine: ScriptedEngine, port: int = 0, *, listening: socket.socket | None = None
) -> AsyncIterator[ScriptedEngine]:
    """The engine on loopback, its `url` set; the block's end is its death."""
    runner = web.AppRunner(engine.app(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    if listening is not None:
        await web.SockSite(runner, listening).start()
    else:
        await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
    engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield engine
    finally:
        await runner.cleanup()


@dataclass(frozen=True)
class EngineProcess:
    """An engine that is a process of its own."""

    url: str
    process: subprocess.Popen[str]


@contextlib.contextmanager
def engine_process(port: int = 0, **script: Any) -> Iterator[EngineProcess]:
    """An engine in a process of its own while the block lasts; a test may kill it earlier."""
    command = [sys.executable, "-m", "tests.fakes.scripted_engine", str(port), json.dumps(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield EngineProcess(process.stdout.readline().strip(), process)
        finally:
            process.terminate()


async def _serve(port: int, script: Json) -> None:
    engine = ScriptedEngine(inspects=False)
    engine.script(script)
    async with running(engine, port):
        print(engine.url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1]), json.loads(sys.argv[2])))
