"""A TCP proxy that fails on command: between a service and Postgres, Redis or an engine.

    client ──▶ proxy ──▶ server         `trouble` says what the proxy does, and may change at any moment

It runs in a thread of its own, so that a test may block, and nothing of it is left when it is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit, urlunsplit

T = TypeVar("T")
CHUNK_BYTES = 64 * 1024
ANSWER_SECONDS = 30.0


@dataclass(frozen=True)
class Trouble:
    """The treatment of the bytes of every connection; the defaults are no trouble.

    Args: refuse: nobody listens, and what was connected is cut; hang: connections are accepted and nothing comes back;
        delay_seconds: each chunk towards the server waits so long; bytes_per_second: of answers;
        truncate_bytes: of each chunk of an answer so much arrives, then the connection ends;
        answer: instead of the server, to every chunk; cut_at: a chunk towards the server that holds these bytes is the
        last of its connection; cut_answer: the server still gets that chunk, and only its answer is lost
    """

    refuse: bool = False
    hang: bool = False
    delay_seconds: float = 0.0
    bytes_per_second: float | None = None
    truncate_bytes: int | None = None
    answer: bytes | None = None
    cut_at: bytes | None = None
    cut_answer: bool = False


NONE = Trouble()
COPY_END = b"\xff\xffc\x00\x00\x00\x04"
"""The end of a binary COPY on its way to Postgres; without a transaction around it, the COPY commits then."""


class FaultProxy:
    """A proxy on a free port of the loopback; a context manager.

    Args: target: `host`, `port` of the server; may be set later, and until then connections are cut
    """

    def __init__(self, target: tuple[str, int] | None = None) -> None:
        self.target = target
        self.port = 0
        self.accepted = 0
        self.cuts = 0
        self._trouble = NONE
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._changed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop
        self._thread: threading.Thread

    @classmethod
    def of(cls, url: str) -> Self:
        """A proxy in front of the server that a URL names."""
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        return cls((parts.hostname, parts.port))

    def url(self, of: str) -> str:
        """The URL with this proxy's address in place of the server's."""
        parts = urlsplit(of)
        account = parts.netloc.rpartition("@")[0]
        return urlunsplit(parts._replace(netloc=f"{account}@" * bool(account) + f"127.0.0.1:{self.port}"))

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault proxy", daemon=True)
        self._thread.start()
        self._call(self._listen())
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def trouble(self) -> Trouble:
        """The present trouble."""
        return self._trouble

    @trouble.setter
    def trouble(self, trouble: Trouble) -> None:
        self._call(self._change(trouble))

    def heal(self) -> None:
        """No trouble any more, for the connections that are left too."""
        self.trouble = NONE

    def cut(self) -> int:
        """Resets every connection now, whatever it is in the middle of; how many there were."""
        return self._call(self._cut_all())

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(ANSWER_SECONDS)

    async def _listen(self) -> None:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", self.port))
        self.port = sock.getsockname()[1]
        self._server = await asyncio.start_server(self._accept, sock=sock, backlog=1024)

    async def _change(self, trouble: Trouble) -> None:
        self._trouble = trouble
        self._changed.set()
        self._changed = asyncio.Event()
        if trouble.refuse:
            if self._server is not None:
                self._server.close()
                self._server = None
            await self._cut_all()
        elif self._server is None:
            await self._listen()

    async def _cut_all(self) -> int:
        cut = len(self._writers) // 2
        for writer in list(self._writers):
            _reset(writer)
        return cut

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
        await self._cut_all()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._loop.create_task(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        # A task that is cancelled before it begins closes nothing itself.
        task.add_done_callback(lambda _: _reset(writer))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        if self.target is None:
            return
        try:
            server_reader, server_writer = await asyncio.open_connection(*self.target)
        except OSError:
            return
        pair = (writer, server_writer)
        self._writers.update(pair)
        link = _Link()
        try:
            await asyncio.gather(
                self._pump(reader, server_writer, lambda data: self._towards_server(data, writer, link)),
                self._pump(server_reader, writer, lambda data: self._towards_client(data, writer, link)),
            )
        except (OSError, _Ended):
            pass
        finally:
            self._writers.difference_update(pair)
            for end in pair:
                _reset(end)

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        change: Callable[[bytes], Coroutine[Any, Any, bytes]],
    ) -> None:
        while data := await reader.read(CHUNK_BYTES):
            writer.write(await change(data))
            await writer.drain()
        # One side has said all: the other may still answer.
        with contextlib.suppress(OSError):
            writer.write_eof()

    async def _towards_server(self, data: bytes, client: asyncio.StreamWriter, link: _Link) -> bytes:
        await self._while_hanging()
        trouble = self._trouble
        if trouble.answer is not None:
            client.write(trouble.answer)
            await client.drain()
            return b""
        if trouble.cut_at is not None and trouble.cut_at in data:
            self.cuts += 1
            if not trouble.cut_answer:
                raise _Ended
            link.is_doomed = True
        await asyncio.sleep(trouble.delay_seconds)
        return data

    async def _towards_client(self, data: bytes, client: asyncio.StreamWriter, link: _Link) -> bytes:
        await self._while_hanging()
        trouble = self._trouble
        if link.is_doomed:
            raise _Ended
        if trouble.truncate_bytes is not None:
            client.write(data[: trouble.truncate_bytes])
            # A farewell and no reset, so that what was sent arrives.
            client.close()
            raise _Ended
        if trouble.bytes_per_second:
            await asyncio.sleep(len(data) / trouble.bytes_per_second)
        return data

    async def _while_hanging(self) -> None:
        while self._trouble.hang:
            await self._changed.wait()


@dataclass
class _Link:
    """One connection. `is_doomed`: its next answer is lost, and it with it."""

    is_doomed: bool = False


class _Ended(Exception):
    """The trouble ends this connection."""


def _reset(writer: asyncio.StreamWriter) -> None:
    """Ends a connection as a machine that vanished would: with a reset, not with a farewell."""
    if writer.is_closing():
        return
    sock = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    writer.transport.abort()
