"""Serving an application with uvicorn, and a process's life from start to signal.

The sockets are bound, or taken over from a supervisor, and the signals handled here, not by uvicorn: a taken port is an
exception with a remedy, and a process that was asked to stop ends with status 0 after its exit handlers ran.

A stop has two stages. Asked once, a process takes nothing more and finishes what it holds, for `shutdown_seconds`.
Then, or when it is asked again, what is left is told to try again, or cut, and the process ends within a few seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import resource
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from typing import Any

import uvicorn
import uvloop
from starlette.applications import Starlette

from leyden.libs.service.errors import CannotListen
from leyden.libs.service.health import Checks, create_internal_app, report_readiness
from leyden.libs.service.limits import Limits
from leyden.libs.service.memory import freeze_heap
from leyden.libs.service.protocol import Protocol
from leyden.libs.service.settings import HttpSettings, ServiceSettings
from leyden.libs.service.turns import Turns
from leyden.libs.telemetry import logger

BACKLOG = 2048
DEFAULT_LIMITS = Limits()
LOOK_TICKS = 10
"""uvicorn ticks ten times a second; connections are looked at once."""
LAST_WORDS_SECONDS = 1.0
"""For answers to leave that were ended early, and then for those that were cut."""
INTERNAL_STOP_SECONDS = 1.0

log = logger()


class _Server(uvicorn.Server):
    """A uvicorn server that looks after its connections and stops in two stages."""

    def __init__(
        self, config: uvicorn.Config, *, shutdown_seconds: float, give_up: Callable[[], Awaitable[None]]
    ) -> None:
        super().__init__(config)
        self.hurry = asyncio.Event()
        self._shutdown_seconds = shutdown_seconds
        self._give_up = give_up
        self._looked = asyncio.get_running_loop().time()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def on_tick(self, counter: int) -> bool:
        if counter % LOOK_TICKS == 0:
            self._look()
        return await super().on_tick(counter)

    def _look(self) -> None:
        now = asyncio.get_running_loop().time()
        passed, self._looked = now - self._looked, now
        for connection in list(self.server_state.connections):
            assert isinstance(connection, Protocol)
            connection.look(now, passed)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for sock in sockets or []:
            sock.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await self._drained(self._shutdown_seconds, self.hurry)
        if self.server_state.tasks:
            await self._give_up()
            await self._drained(LAST_WORDS_SECONDS)
        for task in self.server_state.tasks:
            task.cancel()
        await self._drained(LAST_WORDS_SECONDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def _drained(self, seconds: float, hurry: asyncio.Event | None = None) -> None:
        """Returns when no request and no connection is left, at the latest after this time."""
        deadline = time.monotonic() + seconds
        while self.server_state.tasks or self.server_state.connections:
            if time.monotonic() > deadline or (hurry is not None and hurry.is_set()):
                return
            self._look()
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def serving(
    app: Starlette,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    descriptor: int | None = None,
    limits: Limits = DEFAULT_LIMITS,
    shutdown_seconds: float = 20.0,
) -> AsyncIterator[int]:
    """Serves an application inside the block and yields its port; on leaving, answers in hand are finished first.

    Cancelled while it finishes them, it hurries. The application's lifespan is around it all, and what it raises is
    raised here.

    Args: descriptor: a listening socket that a supervisor owns and shares, instead of host and port
    Raises: CannotListen: the address is taken, or none of this machine
    """
    async with (
        app.router.lifespan_context(app),
        _listening(app, host, port, descriptor, limits, shutdown_seconds) as found,
    ):
        yield found


@contextlib.asynccontextmanager
async def _listening(
    app: Starlette, host: str, port: int, descriptor: int | None, limits: Limits, shutdown_seconds: float
) -> AsyncIterator[int]:
    sock = _bound_socket(host, port) if descriptor is None else _shared_socket(descriptor)
    port = sock.getsockname()[1]

    async def give_up() -> None:
        if hasattr(app.state, "give_up"):
            await app.state.give_up()

    server = _Server(_config(app, limits), shutdown_seconds=shutdown_seconds, give_up=give_up)
    task = asyncio.create_task(server.serve(sockets=[sock]), name="http server")
    try:
        while not server.started:
            if task.done():
                await task
                raise RuntimeError("the server ended while it started")
            await asyncio.sleep(0.005)
        yield port
    finally:
        server.should_exit = True
        await _end_of(task, server.hurry)
        sock.close()


def _config(app: Starlette, limits: Limits) -> uvicorn.Config:
    # uvicorn calls what it is given with keywords alone.
    protocol: Any = functools.partial(Protocol, limits, Turns(asyncio.get_running_loop()))
    return uvicorn.Config(
        app,
        loop="none",
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        # Else a request would go on with the trace of another one in whose turn it begins.
        reset_contextvars=True,
        backlog=BACKLOG,
        timeout_keep_alive=max(1, round(limits.idle_seconds)),
    )


async def _end_of(task: asyncio.Task[None], hurry: asyncio.Event) -> None:
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        hurry.set()
        await asyncio.wait({task})
        raise
    task.result()


@contextlib.asynccontextmanager
async def serving_internal(settings: ServiceSettings, checks: Checks) -> AsyncIterator[int]:
    """Serves health and metrics inside the block, tells a supervisor of readiness, and yields the port."""
    app = create_internal_app(checks)
    async with serving(
        app,
        settings.internal_host,
        settings.internal_port,
        descriptor=settings.internal_fd,
        shutdown_seconds=INTERNAL_STOP_SECONDS,
    ) as port:
        reporting = asyncio.create_task(report_readiness(settings.ready_fd, checks), name="readiness")
        try:
            yield port
        finally:
            reporting.cancel()
            await asyncio.wait({reporting})


def run_http(name: str, app: Starlette, settings: HttpSettings) -> None:
    """Serves until SIGTERM or SIGINT; returns when the last answer has left or `shutdown_seconds` are over.

    Health and metrics have a port of their own, which outlasts the door.
    """
    checks: Checks = app.state.checks
    checks.starting = True

    async def main(stop: asyncio.Event) -> None:
        limits = settings.limits.within(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        server = serving(
            app,
            settings.host,
            settings.port,
            descriptor=settings.listen_fd,
            limits=limits,
            shutdown_seconds=settings.shutdown_seconds,
        )
        async with serving_internal(settings, checks) as internal_port, server as port:
            checks.starting = False
            freeze_heap()
            log.info(f"{name} listening", host=settings.host, port=port, internal_port=internal_port)
            await stop.wait()
            log.info(f"{name} stopping")

    run_until_signal(main)


def run_until_signal(main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Runs a coroutine on uvloop with an event that the first SIGTERM or SIGINT sets; a second one cancels it.

    The process may have as many open files as it is allowed to.
    """
    freeze_heap()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    async def supervised() -> None:
        stop = asyncio.Event()
        current = asyncio.current_task()
        assert current is not None

        def on_signal() -> None:
            # Cancelled once: a third signal must not cut what the second one hurries.
            if stop.is_set() and not current.cancelling():
                current.cancel()
            stop.set()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
        await main(stop)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, contextlib.suppress(asyncio.CancelledError):
        runner.run(supervised())


def _bound_socket(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise CannotListen(f"cannot listen on {host}:{port}: {error.strerror}; set another host") from error
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise CannotListen(f"cannot listen on {host}:{port}: {error.strerror}; set another host or port") from error
    sock.setblocking(False)
    return sock


def _shared_socket(descriptor: int) -> socket.socket:
    """The supervisor's socket, which goes on listening when this process closes its copy or dies."""
    try:
        sock = socket.socket(fileno=descriptor)
    except OSError as error:
        raise CannotListen(f"descriptor {descriptor} is no socket: {error.strerror}; unset it") from error
    # Children of this process have no business with it.
    sock.set_inheritable(False)
    sock.setblocking(False)
    return sock
