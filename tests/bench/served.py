"""The gateway as a process of its own between a stub engine and a load generator, with a durable store behind it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
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

import psutil
import psycopg

from leyden.libs.capability import KeyRing, sign, write_keys
from leyden.libs.contracts.capability import Capability, Scope
from leyden.libs.store.database import Database
from leyden.libs.store.embedded import EmbeddedPostgres, EmbeddedRedis
from leyden.libs.store.migrate import migrate
from leyden.services.engine.convert import convert
from tests import builders

P = ParamSpec("P")
T = TypeVar("T")

START_SECONDS = 60.0
MESSAGES = [
    {"role": "system", "content": "You are a careful assistant; think, then answer in a few words."},
    {"role": "user", "content": "A train leaves at 9:40 and travels for 2 hours and 35 minutes. When does it arrive?"},
]


@dataclass
class Server:
    """A process with a door. CPU time in seconds since its start, of all its threads; memory in bytes."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def cpu_seconds(self) -> float:
        """User and system time, in steps of 10 ms."""
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)

    def memory_bytes(self) -> int:
        """Resident memory."""
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def peak_bytes(self) -> int:
        """The most that was ever resident."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


@dataclass
class Stand:
    """A gateway with everything around it: one run, and attempts whose keys open."""

    gateway: Server
    engine: Server
    dsn: str
    run_id: str
    ring: KeyRing
    rollouts: Sequence[str]

    def request(self, number: int = 0, **parameters: Any) -> bytes:
        """The bytes of a chat completion through the gateway, by the attempt of that number."""
        rollout = self.rollouts[number % len(self.rollouts)]
        capability = Capability(
            run_id=self.run_id,
            rollout_id=rollout,
            attempt=1,
            scopes=frozenset({Scope.MODEL}),
            expires_at=int(time.time()) + 3600,
        )
        path = f"/r/{rollout}/1/v1/chat/completions"
        return http_request(path, chat_body(**parameters), key=sign(self.ring, capability))

    def shape(self, **shape: Any) -> None:
        """Tells the engine how to answer: see `tests.bench.stub.Shape`."""
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
        """Around work of so many calls through the gateway: afterwards exactly they are in the store, with the tokens
        that the engine said.
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
    """A durable store, a stub engine and the gateway as the operator starts it, while the block lasts."""
    # Each of thousands of clients is a connection.
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
        run_id, rollouts = asyncio.run(_attempts(dsn, attempts))
        write_keys(folder / "keys.json", {"bench": "s" * 40})
        engine = stack.enter_context(served(folder, "tests.bench.stub", {"STUB_WEIGHT_VERSION": f"{run_id}:0"}))
        environment = {
            "GATEWAY_MODEL_PATH": str(convert()),
            "GATEWAY_ENGINE_URLS": json.dumps([engine.url]),
            "LEYDEN_DATABASE_URL": dsn,
            "LEYDEN_REDIS_URL": redis_url,
            "LEYDEN_CAPABILITY_KEYS_FILE": str(folder / "keys.json"),
        }
        gateway = stack.enter_context(served(folder, "leyden.services.gateway", environment))
        yield Stand(gateway, engine, dsn, run_id, KeyRing(folder / "keys.json"), rollouts)


@contextlib.contextmanager
def served(folder: Path, module: str, environment: Mapping[str, str]) -> Iterator[Server]:
    """`python -m module` on a socket that it is given, once it says that it is ready."""
    log = folder / f"{module}.log"
    prefix = module.rpartition(".")[2].upper()
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=4096))
        reading, writing = os.pipe()
        told = stack.enter_context(os.fdopen(reading))
        descriptors = {f"{prefix}_LISTEN_FD": str(sock.fileno()), f"{prefix}_READY_FD": str(writing)}
        process = subprocess.Popen(
            [sys.executable, "-m", module],
            env={**os.environ, **environment, **descriptors},
            stdout=stack.enter_context(log.open("wb")),
            stderr=subprocess.STDOUT,
            pass_fds=(sock.fileno(), writing),
        )
        stack.callback(_ended, process)
        os.close(writing)
        # The pipe is closed when the process is ready, or has died.
        lines = told.read().splitlines()
        if process.poll() is not None or not lines:
            raise RuntimeError(f"{module} did not start: {log.read_text()[-2000:]}")
        yield Server(process, f"http://127.0.0.1:{sock.getsockname()[1]}", log)


def _ended(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


async def _attempts(dsn: str, count: int) -> tuple[str, list[str]]:
    database = Database(dsn)
    try:
        run = await builders.add_run(database)
        _, rollouts = await builders.add_group(database, run, size=count)
        for rollout in rollouts:
            await builders.add_attempt(database, rollout)
        return run.id, [rollout.id for rollout in rollouts]
    finally:
        await database.close()


class Elsewhere:
    """Runs functions in one other process, so that the load generator shares no interpreter with what it measures."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))

    def __enter__(self) -> Elsewhere:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The function's result; what it raises is raised here."""
        return self._pool.submit(work, *args, **kwargs).result()
