"""A function that serves, in a process of its own, so that its CPU time is its own."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path


class Process:
    """A server in a process of its own, so that its CPU time is its own."""

    def __init__(self, serve: Callable[..., None], *arguments: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._parent, child = context.Pipe()
        self._process = context.Process(target=serve, args=(child, *arguments), daemon=True)
        self.url = ""

    def __enter__(self) -> Process:
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


def serve_gateway(pipe: Connection, folder: str, dsn: str, engine_url: str) -> None:
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
