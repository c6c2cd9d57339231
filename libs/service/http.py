"""Serving an application with uvicorn, and a process's life from start to signal.

The sockets are bound and the signals handled here, not by uvicorn: a taken port is an exception with a remedy, and a
process that was asked to stop ends with status 0 after its exit handlers ran.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Generator

import uvicorn
import uvloop
from fastapi import FastAPI

from libs.service.settings import ServiceSettings
from libs.telemetry import logger

BACKLOG = 2048

log = logger()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


@contextlib.asynccontextmanager
async def serving(
    app: FastAPI, host: str = "127.0.0.1", port: int = 0, *, shutdown_seconds: float = 20.0
) -> AsyncIterator[int]:
    """Serves an application inside the block and yields its port; on leaving, answers in hand are finished first.

    Raises: OSError: the address is taken; RuntimeError: the application did not start (its log line says why).
    """
    sock = _bound_socket(host, port)
    server = _Server(
        uvicorn.Config(
            app,
            loop="none",
            http="httptools",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            # Longer than the pools of usual clients keep a connection, so that the client closes first.
            timeout_keep_alive=75,
            timeout_graceful_shutdown=max(1, round(shutdown_seconds)),
        )
    )
    task = asyncio.create_task(server.serve(sockets=[sock]), name="http server")
    try:
        while not server.started:
            if task.done():
                await task
                raise RuntimeError("the application did not start: its lifespan failed")
            await asyncio.sleep(0.005)
        yield sock.getsockname()[1]
    finally:
        server.should_exit = True
        await task
        sock.close()


def run_http(name: str, app: FastAPI, settings: ServiceSettings) -> None:
    """Serves until SIGTERM or SIGINT; returns when the last answer has left or `shutdown_seconds` are over."""

    async def main(stop: asyncio.Event) -> None:
        async with serving(app, settings.host, settings.port, shutdown_seconds=settings.shutdown_seconds) as port:
            log.info(f"{name} listening", host=settings.host, port=port)
            await stop.wait()
            log.info(f"{name} stopping")

    run_until_signal(main)


def run_until_signal(main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Runs a coroutine on uvloop with an event that the first SIGTERM or SIGINT sets; a second one cancels it."""

    async def supervised() -> None:
        stop = asyncio.Event()
        current = asyncio.current_task()
        assert current is not None

        def on_signal() -> None:
            if stop.is_set():
                current.cancel()
            stop.set()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
        await main(stop)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, contextlib.suppress(asyncio.CancelledError):
        runner.run(supervised())


def _bound_socket(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}; set another port") from error
    sock.setblocking(False)
    return sock
