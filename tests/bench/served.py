"""The gateway as a process of its own between a stub engine and a load generator, with a durable store behind it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from urllib.request import Request, urlopen

import psycopg

from leyden.libs.capability import KeyRing, sign, write_keys
from leyden.libs.contracts.capability import Capability, Scope
from leyden.libs.embedded.servers import EmbeddedPostgres, EmbeddedRedis
from leyden.libs.store.database import Database
from leyden.libs.store.migrate import migrate
from leyden.libs.store.tables import Rollout
from leyden.services.engine.convert import convert
from tests.support import builders

P = ParamSpec("P")
T = TypeVar("T")

START_SECONDS = 60.0
MESSAGES = [
    {"role": "system", "content": "You are a careful assistant; think, then answer in a few words."},
    {"role": "user", "content": "A train leaves at 9:40 and travels for 2 hours and 35 minutes. When does it arrive?"},
]


@dataclass
class Server:
    """A process that serves on a socket."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def peak_bytes(self) -> int:
        """The peak of its resident memory."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


@dataclass
class Stand:
    """A gateway between a stub engine and a store, with one run and the keys of its attempts."""

    gateway: Server
    engine: Server
    dsn: str
    run_id: str
    ring: KeyRing
    rollouts: Sequence[str]

    def request(self, number: int = 0, **parameters: Any) -> bytes:
        """The bytes of a chat completion through the gateway, by the attempt of that number."""
        rollout = self.rollouts[number % len(self.rollouts)]
        return http_request(f"/r/{rollout}/1/v1/chat/completions", chat_body(**parameters), key=self._key(rollout))

    def address(self, number: int) -> tuple[str, dict[str, str]]:
        """URL and headers of chat completions, for the attempt of that number."""
        rollout = self.rollouts[number % len(self.rollouts)]
        headers = {"authorization": f"Bearer {self._key(rollout)}", "content-type": "application/json"}
        return f"{self.gateway.url}/r/{rollout}/1/v1/chat/completions", headers

    def _key(self, rollout: str) -> str:
        scopes, expires_at = frozenset({Scope.MODEL}), int(time.time()) + 3600
        facts = {"run_id": self.run_id, "rollout_id": rollout, "attempt": 1}
        return sign(self.ring, Capability(**facts, scopes=scopes, expires_at=expires_at))

    def shape(self, **shape: Any) -> None:
        """Sets the form of the engine's answers: see `tests.bench.stub.Shape`."""
        body = json.dumps(shape).encode()
        with urlopen(Request(f"{self.engine.url}/shape", data=body)) as response:
            assert response.status == 200

    def recorded(self) -> tuple[int, int]:
        """Completed calls in the store, and their tokens."""
        with psycopg.connect(self.dsn) as connection:
            row = connection.execute(
                "SELECT count(*), coalesce(sum(completion_tokens), 0) FROM model_calls"
                " WHERE run_id = %s AND status = 'completed'",
                (self.run_id,),
            ).fetchone()
        assert row is not None
        return int(row[0]), int(row[1])

    @contextlib.contextmanager
    def proven(self, calls: int, tokens: int) -> Iterator[None]:
        """Around work of so many calls through the gateway.

        Raises: AssertionError: the store does not have exactly these calls more, with their tokens
        """
        before = self.recorded()
        yield
        after = self.recorded()
        found = after[0] - before[0], after[1] - before[1]
        if found != (calls, calls * tokens):
            raise AssertionError(f"{calls} calls of {tokens} tokens were answered, and {found} recorded")


def chat_body(**parameters: Any) -> bytes:
    """A chat completion's body."""
    return json.dumps({"model": "policy", "messages": MESSAGES, "temperature": 0.8, **parameters}).encode()


def http_request(path: str, body: bytes, *, key: str = "none") -> bytes:
    """A request as an SDK sends it."""
    head = (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {key}\r\naccept: application/json\r\n"
        f"user-agent: OpenAI/Python\r\nx-stainless-retry-count: 0\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@contextlib.contextmanager
def stand(attempts: int = 64) -> Iterator[Stand]:
    """A durable store, a stub engine and a gateway while the block lasts."""
    # Thousands of clients need as many connections.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory(prefix="bench-gateway-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        postgres, redis = EmbeddedPostgres(folder / "postgres"), EmbeddedRedis(folder / "redis")
        dsn = postgres.start()
        stack.callback(postgres.stop)
        redis_url = redis.start()
        stack.callback(redis.stop)
        migrate(dsn)
        run_id, rollouts = asyncio.run(_rollouts(dsn, attempts))
        write_keys(folder / "keys.json", {"bench": "s" * 40})
        engine = stack.enter_context(served(folder, "tests.bench.stub", {"STUB_WEIGHT_VERSION": f"{run_id}:0"}))
        environment = {
            "GATEWAY_MODEL_PATH": str(_model(folder / "model")),
            "GATEWAY_ENGINE_URLS": json.dumps([engine.url]),
            "LEYDEN_DATABASE_URL": dsn,
            "LEYDEN_REDIS_URL": redis_url,
            "LEYDEN_CAPABILITY_KEYS_FILE": str(folder / "keys.json"),
        }
        gateway = stack.enter_context(served(folder, "leyden.services.gateway", environment))
        # After the gateway, as most attempts: in its first two minutes it reads the store for calls of older ones.
        asyncio.run(_begin(dsn, rollouts))
        names = [rollout.id for rollout in rollouts]
        yield Stand(gateway, engine, dsn, run_id, KeyRing(folder / "keys.json"), names)


def _model(folder: Path) -> Path:
    """SmolLM2's tokenizer and template with room for long sessions; the gateway needs no weights."""
    folder.mkdir()
    source = convert()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(source / name, folder)
    config = json.loads((source / "config.json").read_text()) | {"max_position_embeddings": 2**20}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@contextlib.contextmanager
def served(folder: Path, module: str, environment: Mapping[str, str]) -> Iterator[Server]:
    """`python -m module` on a socket that it inherits, once it has reported that it is ready."""
    log = folder / f"{module}.log"
    prefix = module.rpartition(".")[2].upper()
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=4096))
        reading, writing = os.pipe()
        readiness = stack.enter_context(os.fdopen(reading))
        descriptors = {f"{prefix}_LISTEN_FD": str(sock.fileno()), f"{prefix}_READY_FD": str(writing)}
        process = subprocess.Popen(
            [sys.executable, "-m", module],
            env={**os.environ, **environment, **descriptors},
            stdout=stack.enter_context(log.open("wb")),
            stderr=subprocess.STDOUT,
            pass_fds=(sock.fileno(), writing),
        )
        stack.callback(end, process)
        os.close(writing)
        # The process closes the pipe when it is ready, and the kernel when it dies.
        lines = readiness.read().splitlines()
        if process.poll() is not None or not lines:
            raise RuntimeError(f"{module} did not start: {log.read_text()[-2000:]}")
        yield Server(process, f"http://127.0.0.1:{sock.getsockname()[1]}", log)


def end(process: subprocess.Popen[bytes]) -> None:
    """Terminates a process, and kills it after ten seconds."""
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


async def _rollouts(dsn: str, count: int) -> tuple[str, list[Rollout]]:
    database = Database(dsn)
    try:
        run = await builders.add_run(database)
        _, rollouts = await builders.add_group(database, run, size=count)
        return run.id, rollouts
    finally:
        await database.close()


async def _begin(dsn: str, rollouts: Sequence[Rollout]) -> None:
    database = Database(dsn)
    try:
        for rollout in rollouts:
            await builders.add_attempt(database, rollout)
    finally:
        await database.close()


class Worker:
    """Runs functions in another process, so that the load generator shares no interpreter with the measurement."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The function's result; its exception is raised here."""
        return self._pool.submit(work, *args, **kwargs).result()
