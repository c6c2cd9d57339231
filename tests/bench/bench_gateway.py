"""What the gateway adds to a call: against an engine that answers at once, with the durable record in Postgres."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import psycopg
from aiohttp import web

from libs.capability import KeyRing, sign, write_keys
from libs.contracts.capability import Capability, Scope
from libs.store.database import Database
from libs.store.embedded import EmbeddedPostgres
from libs.store.migrate import migrate
from tests import builders
from tests.fakes.chat_model import EOS, make_chat_model

SAMPLED = [*range(40, 56), EOS]
WARM_UP, ALONE_CALLS, CROWD_CALLS, CLIENTS = 50, 300, 1500, 32


def rows() -> list[dict[str, Any]]:
    """Added median of one client, and calls per second of CPU at 32 clients."""
    with tempfile.TemporaryDirectory(prefix="bench-gateway-") as folder:
        server = EmbeddedPostgres(Path(folder) / "postgres")
        dsn = server.start()
        try:
            migrate(dsn)
            return asyncio.run(_measure(Path(folder), dsn))
        finally:
            server.stop()


async def _measure(folder: Path, dsn: str) -> list[dict[str, Any]]:
    database = Database(dsn)
    run = await builders.add_run(database)
    _, (rollout, _) = await builders.add_group(database, run)
    await builders.add_attempt(database, rollout)
    await database.close()
    make_chat_model(folder / "model")
    write_keys(folder / "keys.json", {"bench": "s" * 40})
    with _Process(_serve_engine, run.id) as engine, _Process(_serve_gateway, str(folder), dsn, engine.url) as gateway:
        async with AsyncExitStack() as stack:
            http = await stack.enter_async_context(aiohttp.ClientSession())
            postgres = await stack.enter_async_context(await psycopg.AsyncConnection.connect(dsn, autocommit=True))
            asks = _direct(http, engine.url), _through(http, gateway.url, folder, run.id), await _commit(postgres)
            direct, through, commit = await _median_seconds(*asks)
            before = gateway.cpu_seconds()
            began = time.perf_counter()
            await _crowd(_through(http, gateway.url, folder, run.id))
            wall, busy = time.perf_counter() - began, gateway.cpu_seconds() - before
    return [
        _row("gateway: added median, 1 client", (through - direct) * 1000, "ms", "one commit alone", commit * 1000),
        _row(
            "gateway: calls per CPU second, 32 clients",
            CROWD_CALLS / busy,
            "calls/s",
            "per wall second",
            CROWD_CALLS / wall,
        ),
    ]


def _row(name: str, value: float, unit: str, baseline_name: str, baseline: float) -> dict[str, Any]:
    return {
        "name": name,
        "value": value,
        "unit": unit,
        "baseline_name": baseline_name,
        "baseline": baseline,
        "ratio": value / baseline,
    }


Ask = Callable[[], Awaitable[None]]


def _direct(http: aiohttp.ClientSession, url: str) -> Ask:
    body = json.dumps({"input_ids": list(range(60)), "stream": False, "rid": "x"})

    async def ask() -> None:
        async with http.post(f"{url}/generate", data=body) as response:
            assert response.status == 200
            await response.read()

    return ask


def _through(http: aiohttp.ClientSession, url: str, folder: Path, run_id: str) -> Ask:
    rollout = f"{run_id}.0.0"
    capability = Capability(
        run_id=run_id,
        rollout_id=rollout,
        attempt=1,
        scopes=frozenset({Scope.MODEL}),
        expires_at=int(time.time()) + 3600,
    )
    key = sign(KeyRing(folder / "keys.json"), capability)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is six times seven?"}]
    body = json.dumps({"model": "policy", "messages": messages, "temperature": 0.8})
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}

    async def ask() -> None:
        async with http.post(f"{url}/r/{rollout}/1/v1/chat/completions", data=body, headers=headers) as response:
            text = await response.read()
            assert response.status == 200, text

    return ask


async def _median_seconds(*asks: Ask) -> list[float]:
    """The median of each, asked in turns, so that a busy disk or machine is busy for all of them."""
    seconds: list[list[float]] = [[] for _ in asks]
    for _ in range(WARM_UP + ALONE_CALLS):
        for ask, taken in zip(asks, seconds, strict=True):
            began = time.perf_counter()
            await ask()
            taken.append(time.perf_counter() - began)
    return [statistics.median(taken[WARM_UP:]) for taken in seconds]


async def _commit(connection: psycopg.AsyncConnection[Any]) -> Ask:
    """The floor of a durable record: one row of the same size, committed by one client."""
    await connection.execute("CREATE TABLE alone (content bytea)")

    async def commit() -> None:
        await connection.execute("INSERT INTO alone VALUES (%s)", [bytes(1500)])

    return commit


async def _crowd(ask: Ask) -> None:
    left = iter(range(CROWD_CALLS))

    async def client() -> None:
        for _ in left:
            await ask()

    await asyncio.gather(*(client() for _ in range(CLIENTS)))


class _Process:
    """A server in a process of its own, so that its CPU time is its own."""

    def __init__(self, serve: Callable[..., None], *arguments: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._parent, child = context.Pipe()
        self._process = context.Process(target=serve, args=(child, *arguments), daemon=True)
        self.url = ""

    def __enter__(self) -> _Process:
        self._process.start()
        self.url = self._parent.recv()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join(10)

    def cpu_seconds(self) -> float:
        """User and system time so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / 100


def _serve_engine(pipe: Connection, run_id: str) -> None:
    meta = {
        "finish_reason": {"type": "stop", "matched": EOS},
        "weight_versions": [{"version": f"{run_id}:0", "start": 0, "end": len(SAMPLED)}],
        "output_token_logprobs": [[-0.5, token, None] for token in SAMPLED],
    }
    answer = json.dumps({"text": "", "output_ids": SAMPLED, "meta_info": meta}).encode()

    async def generate(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=answer, content_type="application/json")

    async def main() -> None:
        app = web.Application()
        app.router.add_post("/generate", generate)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        pipe.send(f"http://127.0.0.1:{runner.addresses[0][1]}")
        await asyncio.Event().wait()

    asyncio.run(main())


def _serve_gateway(pipe: Connection, folder: str, dsn: str, engine_url: str) -> None:
    import uvloop

    from libs.service import serving
    from libs.telemetry import configure_logs
    from services.gateway.app import create_app
    from services.gateway.settings import Settings

    configure_logs("gateway", "warning")
    settings = Settings(
        model_path=Path(folder) / "model",
        database_url=dsn,
        capability_keys_file=Path(folder) / "keys.json",
        engine_urls=[engine_url],
    )

    async def main() -> None:
        async with serving(create_app(settings)) as port:
            pipe.send(f"http://127.0.0.1:{port}")
            await asyncio.Event().wait()

    uvloop.run(main())
