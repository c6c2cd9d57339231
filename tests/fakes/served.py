"""An application behind a real port in a thread of its own, for tests whose own code is synchronous."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import structlog
from fastapi import FastAPI

from leyden.libs.service import serving


@contextmanager
def served(app: FastAPI) -> Iterator[str]:
    """Serves inside the block and gives the address."""
    port: Future[int] = Future()
    stop = asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        try:
            async with serving(app, shutdown_seconds=2) as found:
                port.set_result(found)
                await stop.wait()
        except BaseException as error:
            if not port.done():
                port.set_exception(error)
            raise

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), name="served application")
    # Its log lines would mix with the output of commands under test.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    thread.start()
    try:
        yield f"http://127.0.0.1:{port.result(timeout=60)}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
        structlog.reset_defaults()
