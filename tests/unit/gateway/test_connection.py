"""Requests to engines: every piece of an answer in the moment it comes, and nothing of an answer that is none."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import trustme
import uvloop

from leyden.services.gateway import connection
from leyden.services.gateway.connection import Connections, Refused, address_of

LONG = 60.0


class Server:
    """Answers requests with the bytes it is told, one list of pieces for each; a None closes the connection."""

    def __init__(self, *answers: Sequence[bytes | None]) -> None:
        self._answers = list(answers)
        self.requests: list[bytes] = []
        self.connections = 0
        self.url = ""
        self.go_on = asyncio.Event()
        self.is_left = asyncio.Event()
        self.left = 0

    @asynccontextmanager
    async def serving(self, *, certificate: trustme.LeafCert | None = None) -> AsyncIterator[Server]:
        context = None
        if certificate is not None:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            certificate.configure_cert(context)
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=context)
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self.url = f"http://{address}" if context is None else f"https://{address}"
        async with server:
            yield self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while await self._answer(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            self.left += 1
            self.is_left.set()
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        self.requests.append(head + await reader.readexactly(length))
        for piece in self._answers.pop(0):
            if piece is None:
                return False
            if piece == b"wait":
                await self.go_on.wait()
                self.go_on.clear()
            else:
                writer.write(piece)
                await writer.drain()
        return True


def chunk(text: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(text), text)


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


async def taken(connections: Connections, url: str, *body: bytes | memoryview) -> bytes:
    pieces: list[bytes] = []
    await connections.post(url, body, {"x-one": "1"}, pieces.append)
    return b"".join(pieces)


async def test_a_piece_is_taken_before_the_next_is_sent():
    server = Server([CHUNKED, chunk(b"one"), b"wait", chunk(b"two"), b"wait", END])
    pieces: list[bytes] = []

    def take(piece: bytes) -> None:
        pieces.append(piece)
        server.go_on.set()

    async with server.serving():
        await Connections(silence_seconds=LONG).post(server.url, [b"{}"], {}, take)
    assert pieces == [b"one", b"two", b""]


async def test_a_request_is_whole_and_its_connection_is_used_again():
    server, connections = Server([WHOLE], [CHUNKED, chunk(b"two"), END], [WHOLE]), Connections(silence_seconds=LONG)
    async with server.serving():
        bodies = [(b"a", memoryview(b"bc")[1:]), (b"bc",), ()]
        answers = [await taken(connections, f"{server.url}/generate", *body) for body in bodies]
        connections.close()
    assert (answers, server.connections) == ([b"ok", b"two", b"ok"], 1)
    host = server.url.removeprefix("http://")
    head = f"POST /generate HTTP/1.1\r\nhost: {host}\r\naccept: */*\r\nx-one: 1\r\ncontent-length: 2\r\n\r\n"
    assert server.requests[0] == head.encode() + b"ac"


async def test_requests_at_once_have_connections_of_their_own():
    server, connections = Server([b"wait", WHOLE], [WHOLE]), Connections(silence_seconds=LONG)
    async with server.serving():
        first = asyncio.create_task(taken(connections, server.url))
        while not server.requests:
            await asyncio.sleep(0.001)
        assert await taken(connections, server.url) == b"ok"
        server.go_on.set()
        assert await first == b"ok"
    assert server.connections == 2


async def test_a_refusal_tells_its_status_and_its_text_and_costs_no_connection():
    refusal = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 4\r\n\r\nlong"
    server, connections = Server([refusal], [WHOLE]), Connections(silence_seconds=LONG)
    async with server.serving():
        with pytest.raises(Refused) as refused:
            await taken(connections, server.url)
        assert await taken(connections, server.url) == b"ok"
    assert (refused.value.status, refused.value.text, server.connections) == (400, "long", 1)


@pytest.mark.parametrize(
    "answer",
    [
        [None],
        [b"HTTP/1.1 200 OK\r\ncontent-len", None],
        [b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok", None],
        [CHUNKED, chunk(b"one"), None],
        [CHUNKED, b"no length\r\n"],
        [b"SSH-2.0-OpenSSH\r\n"],
        [b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n", None],
        [WHOLE + WHOLE],
        [b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 20_000],
    ],
)
async def test_an_answer_that_breaks_off_or_is_no_http_is_a_connection_lost(answer):
    server, connections = Server(answer, [WHOLE]), Connections(silence_seconds=LONG)
    async with server.serving():
        with pytest.raises(ConnectionError):
            await taken(connections, server.url)
        assert await taken(connections, server.url) == b"ok"
    assert server.connections == 2


async def test_an_answer_without_a_length_ends_with_its_connection():
    server, connections = Server([b"HTTP/1.0 200 OK\r\n\r\n", b"all of it", None]), Connections(silence_seconds=LONG)
    async with server.serving():
        assert await taken(connections, server.url) == b"all of it"


async def test_what_comes_before_an_answer_is_no_answer():
    server, connections = Server([b"HTTP/1.1 100 Continue\r\n\r\n" + WHOLE], [WHOLE]), Connections(silence_seconds=LONG)
    async with server.serving():
        assert [await taken(connections, server.url) for _ in range(2)] == [b"ok", b"ok"]
    assert server.connections == 1


async def test_an_engine_that_falls_silent_is_left():
    server, connections = Server([CHUNKED, chunk(b"one"), b"wait"]), Connections(silence_seconds=2)
    pieces: list[bytes] = []
    async with server.serving():
        with pytest.raises(TimeoutError):
            await connections.post(server.url, [b"{}"], {}, pieces.append)
        server.go_on.set()
        await server.is_left.wait()
    assert pieces == [b"one"]


async def test_an_engine_that_falls_silent_after_other_answers_is_left():
    server, connections = Server(*[[WHOLE]] * 2, [CHUNKED, b"wait"]), Connections(silence_seconds=2)
    async with server.serving():
        assert await taken(connections, server.url) == b"ok"
        # Longer than the silence, and the connection is still good.
        await asyncio.sleep(2.5)
        assert await taken(connections, server.url) == b"ok"
        with pytest.raises(TimeoutError):
            await taken(connections, server.url)
        server.go_on.set()
        await server.is_left.wait()
    assert server.connections == 1


async def test_what_is_wrong_in_the_whole_of_an_answer_reaches_the_caller():
    server = Server([WHOLE], [b"HTTP/1.0 200 OK\r\n\r\n", b"all of it", None])

    def take(piece: bytes) -> None:
        if not piece:
            raise LookupError("no such answer")

    async with server.serving():
        for _ in range(2):
            with pytest.raises(LookupError, match="no such answer"):
                await Connections(silence_seconds=LONG).post(server.url, [b"{}"], {}, take)


async def test_what_taking_raises_reaches_the_caller_and_closes_the_connection():
    server, connections = Server([CHUNKED, chunk(b"one"), b"wait"]), Connections(silence_seconds=LONG)

    def take(_piece: bytes) -> None:
        raise LookupError("no such token")

    async with server.serving():
        with pytest.raises(LookupError, match="no such token"):
            await connections.post(server.url, [b"{}"], {}, take)
        server.go_on.set()
        await server.is_left.wait()


async def test_who_gives_up_leaves_the_engine():
    server, connections = Server([CHUNKED, b"wait"]), Connections(silence_seconds=LONG)
    async with server.serving():
        asking = asyncio.create_task(taken(connections, server.url))
        while not server.requests:
            await asyncio.sleep(0.001)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        server.go_on.set()
        await server.is_left.wait()


async def test_an_answer_without_a_length_that_is_given_up_does_not_count_as_whole():
    server, pieces = Server([b"HTTP/1.0 200 OK\r\n\r\n", b"half", b"wait"]), []
    async with server.serving():
        posting = Connections(silence_seconds=LONG).post(server.url, [b"{}"], {}, pieces.append)
        asking = asyncio.create_task(posting)
        while not pieces:
            await asyncio.sleep(0.001)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        server.go_on.set()
        await server.is_left.wait()
    assert pieces == [b"half"]


async def test_who_stops_an_answer_gets_what_comes_of_it_before_the_engine_is_left():
    server = Server([CHUNKED, chunk(b"one"), b"wait", chunk(b"two"), END])
    pieces: list[bytes] = []

    async def stop(rest: Callable[[], Awaitable[None]]) -> None:
        server.go_on.set()
        await rest()
        pieces.append(b"stopped")

    async with server.serving():
        posting = Connections(silence_seconds=LONG).post(server.url, [b"{}"], {}, pieces.append, stop)
        asking = asyncio.create_task(posting)
        while not pieces:
            await asyncio.sleep(0.001)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await server.is_left.wait()
    assert pieces == [b"one", b"two", b"", b"stopped"]


async def test_who_is_stopped_twice_waits_for_nothing_more():
    server, connections = Server([CHUNKED, b"wait"]), Connections(silence_seconds=LONG)
    stopping = asyncio.Event()

    async def stop(rest: Callable[[], Awaitable[None]]) -> None:
        stopping.set()
        await rest()

    async with server.serving():
        asking = asyncio.create_task(connections.post(server.url, [b"{}"], {}, lambda _: None, stop))
        while not server.requests:
            await asyncio.sleep(0.001)
        asking.cancel()
        await stopping.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        server.go_on.set()
        await server.is_left.wait()


async def test_a_connection_that_the_engine_closes_is_not_used_again():
    close = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok"
    server, connections = Server([close, None], [WHOLE]), Connections(silence_seconds=LONG)
    async with server.serving():
        assert [await taken(connections, server.url) for _ in range(2)] == [b"ok", b"ok"]
    assert server.connections == 2


async def test_nobody_there_is_an_error_of_the_connection():
    server = Server()
    async with server.serving():
        pass
    with pytest.raises(OSError):
        await taken(Connections(silence_seconds=LONG), server.url)


async def test_a_connection_idle_for_too_long_is_closed_and_not_used_again(monkeypatch):
    server, connections = Server(*[[b"wait", WHOLE]] * 2, [WHOLE], [WHOLE]), Connections(silence_seconds=LONG)
    async with server.serving(), asyncio.timeout(LONG):
        asked = [asyncio.create_task(taken(connections, server.url)) for _ in range(2)]
        while len(server.requests) < 2:
            await asyncio.sleep(0.001)
        while not all(task.done() for task in asked):
            server.go_on.set()
            await asyncio.sleep(0.001)
        assert (await taken(connections, server.url), server.connections, server.left) == (b"ok", 2, 0)
        monkeypatch.setattr(connection, "KEPT_SECONDS", 0.0)
        assert await taken(connections, server.url) == b"ok"
        # The latest two were too old for the request, and what it used is too old for the next one.
        while server.left < 3:
            await asyncio.sleep(0.001)
    assert server.connections == 3


@contextmanager
def full() -> Iterator[str]:
    """The address of a server whose queue is full: it neither takes nor refuses anyone."""
    with socket.socket() as listening, socket.socket() as queued:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        queued.connect(listening.getsockname())
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


async def test_an_engine_that_takes_no_connection_is_waited_for_as_long_as_told(monkeypatch):
    monkeypatch.setattr(connection, "CONNECT_SECONDS", 0.1)
    with full() as url, pytest.raises(TimeoutError):
        async with asyncio.timeout(LONG):
            await taken(Connections(silence_seconds=LONG), url)


async def test_an_engine_that_does_not_answer_the_handshake_is_waited_for_as_long(monkeypatch):
    monkeypatch.setattr(connection, "CONNECT_SECONDS", 0.1)
    server = Server([b"wait"])
    async with server.serving():
        with pytest.raises(TimeoutError):
            await taken(Connections(silence_seconds=LONG), server.url.replace("http:", "https:"))
        server.go_on.set()
        await server.is_left.wait()


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def written(authority: trustme.CA, folder: Path) -> Path:
    """The file in which whoever trusts an authority has its certificate."""
    authority.cert_pem.write_to_path(folder / "authority.pem")
    return folder / "authority.pem"


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_an_engine_behind_tls_is_served_where_its_authority_is_trusted(
    monkeypatch: pytest.MonkeyPatch,
    authority: trustme.CA,
    tmp_path: Path,
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(written(authority, tmp_path)))

    async def asked() -> None:
        long = b"x" * 100_000
        server = Server([CHUNKED, chunk(b"one"), chunk(long), END], [WHOLE])
        connections = Connections(silence_seconds=LONG)
        async with server.serving(certificate=authority.issue_cert("localhost")):
            url = server.url.replace("127.0.0.1", "localhost")
            answers = [await taken(connections, url) for _ in range(2)]
            connections.close()
            await server.is_left.wait()
        assert (answers, server.connections) == ([b"one" + long, b"ok"], 1)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(asked())


@pytest.mark.parametrize(("host", "trusted"), [("localhost", False), ("127.0.0.1", True)])
async def test_an_engine_that_is_not_who_it_should_be_gets_no_request(monkeypatch, authority, tmp_path, host, trusted):
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(written(authority, tmp_path)))
    server = Server([WHOLE])
    async with server.serving(certificate=authority.issue_cert("localhost")):
        with pytest.raises(ssl.SSLCertVerificationError):
            await taken(Connections(silence_seconds=LONG), server.url.replace("127.0.0.1", host))
    assert server.requests == []


def test_an_address_tells_where_to_and_who():
    secure = address_of("https://a:b%20c@engine.example/v0/generate")
    assert (secure.server, secure.head) == (
        ("engine.example", 443, True),
        "POST /v0/generate HTTP/1.1\r\nhost: engine.example\r\naccept: */*\r\nauthorization: Basic YTpiIGM=",
    )
    assert address_of("http://[::1]:30000/generate").server == ("::1", 30000, False)
