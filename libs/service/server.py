"""Serves an application with uvicorn, and runs a process from its start to its signal.

This module binds the sockets, or adopts a supervisor's, and handles the signals; uvicorn does neither. A port that
another process has is an exception with a remedy, and a stopped process exits with status 0 after its exit handlers.

A stop has two stages. At the first signal a process accepts nothing more and finishes its requests, for
`shutdown_seconds`. Then, or at a second signal, it ends the remaining requests early and exits within a few seconds.
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
from leyden.libs.service.limits import RESERVED_FILES, ClientLimits, DeadlineProtocol, Limits
from leyden.libs.service.settings import HttpSettings, ServiceSettings
from leyden.libs.telemetry import logger

BACKLOG = 2048
DEFAULT_LIMITS = Limits()
FLUSH_SECONDS = 1.0
"""Time for answers that ended early to leave, and then for cancelled ones."""
INTERNAL_STOP_SECONDS = 1.0

log = logger()


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
    """Serves an application inside the block and yields its port; the end of the block finishes its requests first.

    A cancellation while it finishes them starts the second stage of the stop. The lifespan of the application encloses
    everything, and its exceptions rise here.

    Args: descriptor: a listening socket that a supervisor owns and shares, instead of host and port
    Raises: CannotListen
    """
    sock = _bound_socket(host, port) if descriptor is None else _shared_socket(descriptor)
    with contextlib.closing(sock):
        port = sock.getsockname()[1]
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # Accepted connections inherit it: the kernel closes one whose client reads nothing for this long.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limits.unread_seconds * 1000))
        async with app.router.lifespan_context(app):
            server = _Server(app, limits, shutdown_seconds)
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
                await _join(task, server.hurry)


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals alone and stops in two stages; `hurry` starts the second one."""

    def __init__(self, app: Starlette, limits: Limits, shutdown_seconds: float) -> None:
        super().__init__(_config(app, limits))
        self.hurry = asyncio.Event()
        self._state = app.state
        self._shutdown_seconds = shutdown_seconds

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for sock in sockets or []:
            sock.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await self._drain(self._shutdown_seconds, self.hurry)
        if self.server_state.tasks:
            if hasattr(self._state, "give_up"):
                await self._state.give_up()
            await self._drain(FLUSH_SECONDS)
        for task in self.server_state.tasks:
            task.cancel()
        await self._drain(FLUSH_SECONDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def _drain(self, seconds: float, hurry: asyncio.Event | None = None) -> None:
        """Returns once no request and no connection is left, or after this time."""
        deadline = time.monotonic() + seconds
        while self.server_state.tasks or self.server_state.connections:
            if time.monotonic() > deadline or (hurry is not None and hurry.is_set()):
                return
            await asyncio.sleep(0.02)


def _config(app: Starlette, limits: Limits) -> uvicorn.Config:
    # uvicorn calls the protocol with keywords alone.
    protocol: Any = functools.partial(DeadlineProtocol, limits)
    return uvicorn.Config(
        ClientLimits(app, limits),
        loop="none",
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        # Without it a request that a client sends ahead starts in the trace of the one before it.
        reset_contextvars=True,
        backlog=BACKLOG,
        timeout_keep_alive=max(1, round(limits.idle_seconds)),
    )


def _within_open_files(limits: HttpSettings) -> Limits:
    """The limits, with no more connections than the process can have descriptors."""
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if open_files == resource.RLIM_INFINITY:
        return limits
    most = max(1, min(limits.max_connections, open_files - RESERVED_FILES))
    return limits.model_copy(update={"max_connections": most})


async def _join(task: asyncio.Task[None], hurry: asyncio.Event) -> None:
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        hurry.set()
        await asyncio.wait({task})
        raise
    task.result()


@contextlib.asynccontextmanager
async def serving_internal(settings: ServiceSettings, checks: Checks) -> AsyncIterator[int]:
    """Serves health and metrics inside the block, reports readiness to a supervisor, and yields the port."""
    async with serving(
        create_internal_app(checks),
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
    """Serves until SIGTERM or SIGINT; returns after the last answer, or after `shutdown_seconds`.

    Health and metrics have a port of their own, which closes last.
    """
    checks: Checks = app.state.checks
    checks.starting = True

    async def main(stop: asyncio.Event) -> None:
        server = serving(
            app,
            settings.host,
            settings.port,
            descriptor=settings.listen_fd,
            limits=_within_open_files(settings),
            shutdown_seconds=settings.shutdown_seconds,
        )
        async with serving_internal(settings, checks) as internal_port, server as port:
            checks.starting = False
            log.info(f"{name} listening", host=settings.host, port=port, internal_port=internal_port)
            await stop.wait()
            log.info(f"{name} stopping")

    run_until_signal(main)


def run_until_signal(main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Runs a coroutine on uvloop; the first SIGTERM or SIGINT sets its event, the second one cancels it.

    It raises the process's limit of open files to the highest that the system allows.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    async def supervised() -> None:
        stop = asyncio.Event()
        current = asyncio.current_task()
        assert current is not None

        def on_signal() -> None:
            # Once: a third signal must not cancel the second stage of the stop.
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
    """The supervisor's socket, which keeps listening after this process closes its copy or dies."""
    try:
        sock = socket.socket(fileno=descriptor)
    except OSError as error:
        raise CannotListen(f"descriptor {descriptor} is no socket: {error.strerror}; unset it") from error
    # Children of this process must not inherit it.
    sock.set_inheritable(False)
    sock.setblocking(False)
    return sock
