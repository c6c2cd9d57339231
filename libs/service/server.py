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
import gc
import resource
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from typing import Any

import uvicorn
import uvloop
from starlette.applications import Starlette

from leyden.libs.service.errors import CannotListen
from leyden.libs.service.health import Checks, create_internal_app, report_readiness
from leyden.libs.service.limits import RESERVED_FILES, DeadlineProtocol, Limits
from leyden.libs.service.memory import return_freed_memory
from leyden.libs.service.settings import HttpSettings, ServiceSettings
from leyden.libs.telemetry import logger

BACKLOG = 2048
DEFAULT_LIMITS = Limits()
FLUSH_SECONDS = 1.0
"""Time for answers that ended early to leave, and then for cancelled ones."""
INTERNAL_STOP_SECONDS = 1.0
GC_THRESHOLD = 50_000
"""New objects between two collections of the youngest generation."""

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
    everything, and its exceptions rise here. `RequestLimits` reads the limits from `app.state.limits`.

    Args: descriptor: a listening socket that a supervisor owns and shares, instead of host and port
    Raises: CannotListen
    """
    sock = _listening_socket(host, port, descriptor)
    app.state.limits = limits
    with contextlib.closing(sock):
        port = sock.getsockname()[1]
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # Accepted connections inherit it: the kernel closes one whose client reads nothing for this long.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limits.unread_seconds * 1000))
        async with app.router.lifespan_context(app):
            server = _Server(_config(app, limits))
            task = asyncio.create_task(server.serve(sockets=[sock]), name="http server")
            try:
                while not server.started:
                    if task.done():
                        await task
                    await asyncio.sleep(0.005)
                yield port
            finally:
                await _stop(server, task, app, shutdown_seconds)


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals alone: `run_until_signal` handles them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


async def _stop(server: _Server, task: asyncio.Task[None], app: Starlette, seconds: float) -> None:
    """Accepts nothing more and finishes the requests; after this time or a cancellation, ends the remaining ones."""
    server.should_exit = True
    if hasattr(app.state, "stopping"):
        app.state.stopping.set()
    requests, connections = server.server_state.tasks, server.server_state.connections
    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        if requests and hasattr(app.state, "give_up"):
            await app.state.give_up()
            await asyncio.wait({task}, timeout=FLUSH_SECONDS)
        for request in requests:
            request.cancel()
        await asyncio.wait({task}, timeout=FLUSH_SECONDS)
        for connection in list(connections):
            connection.transport.abort()
        server.force_exit = True
        await asyncio.wait({task})
    task.result()


def _config(app: Starlette, limits: Limits) -> uvicorn.Config:
    # uvicorn calls the protocol with keywords alone.
    protocol: Any = functools.partial(DeadlineProtocol, limits)
    return uvicorn.Config(
        app,
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


def _max_connections(limits: Limits) -> int:
    """The limit of the settings, but no more than the process may have open files."""
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if open_files == resource.RLIM_INFINITY:
        return limits.max_connections
    return max(1, min(limits.max_connections, open_files - RESERVED_FILES))


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
            limits=settings.model_copy(update={"max_connections": _max_connections(settings)}),
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
    # Why: with Python's default of 700, a quarter of a gateway's CPU went into collections that found nothing (bench
    # row "calls per second of CPU").
    gc.set_threshold(GC_THRESHOLD)
    # Modules live as long as the process: no collection visits them.
    gc.freeze()
    gc.enable()
    # Why: an engine of SmolLM2-135M kept 50 MB that the reading of its weights had freed.
    return_freed_memory()
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


def _listening_socket(host: str, port: int, descriptor: int | None) -> socket.socket:
    """A new socket, or the supervisor's, which keeps listening after this process closes its copy or dies."""
    try:
        if descriptor is None:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            return socket.create_server(address[:2], family=family, backlog=BACKLOG)
        sock = socket.socket(fileno=descriptor)
    except OSError as error:
        place = f"{host}:{port}" if descriptor is None else f"descriptor {descriptor}"
        raise CannotListen(f"cannot listen on {place}: {error.strerror}; set another host or port") from error
    # Children of this process must not inherit it.
    sock.set_inheritable(False)
    return sock
