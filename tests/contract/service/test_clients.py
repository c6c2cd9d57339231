"""Clients that are slow, endless, many, or speak no HTTP: a real server answers or cuts them, and serves others."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import uvloop
from fastapi import FastAPI, Request
from starlette.responses import Response, StreamingResponse
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from leyden.libs.service import JsonResponse, Limits, serving
from leyden.libs.service.app import create_app
from leyden.libs.service.limits import INTERIM
from leyden.libs.telemetry import inject
from tests.support.waiting import eventually

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
# Long enough for a loaded machine to be quick within, short enough to be waited for.
QUICK: dict[str, Any] = {"header_seconds": 1.0, "body_grace_seconds": 1.0, "unread_seconds": 1.0, "idle_seconds": 1.0}


def build() -> FastAPI:
    app = create_app("sample", max_body_bytes=2**20)
    app.state.started, app.state.ended, app.state.release = [], [], asyncio.Event()

    @app.post("/echo")
    async def echo(request: Request) -> Response:
        return JsonResponse({"size": len(await request.body())})

    @app.get("/trace")
    async def trace() -> Response:
        # The next one begins where this one ends.
        await asyncio.sleep(0.05)
        return JsonResponse({"trace": inject()})

    @app.get("/patient/{name}")
    async def patient(name: str, request: Request) -> Response:
        app.state.started.append(name)
        while (await request.receive())["type"] != "http.disconnect":
            pass
        app.state.ended.append(name)
        return Response()

    @app.get("/waiting")
    async def waiting() -> Response:
        app.state.started.append("waiting")
        await app.state.release.wait()
        return JsonResponse({"waiting": True})

    @app.get("/flood")
    async def flood() -> Response:
        async def chunks() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield b"x" * 2**16
                    await asyncio.sleep(0)
            finally:
                app.state.ended.append("flood")

        return StreamingResponse(chunks())

    return app


@asynccontextmanager
async def served(**limits: Any) -> AsyncIterator[tuple[FastAPI, int]]:
    app = build()
    async with serving(app, limits=Limits(**limits), shutdown_seconds=1) as port:
        yield app, port


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Streams]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def read_all(reader: asyncio.StreamReader) -> bytes:
    """Everything until the server closes."""
    said = b""
    async with asyncio.timeout(60):
        with contextlib.suppress(ConnectionResetError):
            while data := await reader.read(65536):
                said += data
    return said


async def exchange(port: int, *pieces: bytes) -> bytes:
    """Everything that the server answers to pieces that come one after another."""
    async with connected(port) as (reader, writer):
        for number, piece in enumerate(pieces):
            await asyncio.sleep(0.05 if number else 0)
            writer.write(piece)
        return await read_all(reader)


async def drip(writer: asyncio.StreamWriter, data: bytes) -> None:
    """A byte at a time, for as long as anybody takes them."""
    with contextlib.suppress(ConnectionError):
        for byte in data:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.05)


async def is_served(port: int) -> bool:
    request = b"POST /echo HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: 10\r\n\r\n" + b"x" * 10
    return (await exchange(port, request)).endswith(b'{"size":10}')


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"POST /echo HTTP/1.1\r\nhost: a\r\nx-slow: " + b"a" * 2000, b"408"),
        (b"POST /echo HTTP/1.1\r\nhost: a\r\ncontent-length: 5000\r\n\r\n" + b"a" * 5000, b"408"),
        (b"POST /echo HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 1000, b"408"),
    ],
    ids=["headers", "body", "chunks"],
)
async def test_a_client_that_sends_a_byte_at_a_time_gets_408_while_others_are_served(
    data: bytes, status: bytes
) -> None:
    async with served(**QUICK) as (_, port), connected(port) as (reader, writer):
        dripping, reading = asyncio.create_task(drip(writer, data)), asyncio.create_task(read_all(reader))
        assert await is_served(port)
        answer = await reading
        dripping.cancel()
        assert answer.startswith(b"HTTP/1.1 " + status)
        assert b"connection: close" in answer
        assert await is_served(port)


async def test_an_idle_connection_is_closed_before_and_after_a_request() -> None:
    async with served(**QUICK) as (_, port):
        assert await exchange(port, b"") == b""
        answer = await exchange(port, b"POST /echo HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200")


async def test_a_client_that_does_not_read_is_cut_and_its_answer_ends() -> None:
    async with served(**QUICK) as (app, port), connected(port) as (_, writer):
        writer.write(b"GET /flood HTTP/1.1\r\nhost: a\r\n\r\n")
        await eventually(lambda: app.state.ended)
        assert await is_served(port)


async def test_answered_requests_create_no_reference_cycles() -> None:
    async with served(**QUICK) as (_, port), connected(port) as (reader, writer):
        gc.collect()
        before = _answers_in_memory()
        gc.disable()
        try:
            for _ in range(10):
                writer.write(b"POST /echo HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\n\r\nx")
                assert await reader.readuntil(b'{"size":1}')
            left = _answers_in_memory() - before
        finally:
            gc.enable()
    # That of the last answer goes with its connection.
    assert left <= 1


def _answers_in_memory() -> int:
    return sum(type(one) is RequestResponseCycle for one in gc.get_objects())


async def test_a_pipelined_request_has_its_own_trace() -> None:
    trace = "ab" * 16
    first = f"GET /trace HTTP/1.1\r\nhost: a\r\ntraceparent: 00-{trace}-b7ad6b7169203331-01\r\n\r\n"
    async with served(**QUICK) as (_, port):
        answers = await exchange(port, (first + "GET /trace HTTP/1.1\r\nhost: a\r\n\r\n").encode())
    assert answers.count(b"HTTP/1.1 200") == 2
    assert answers.count(trace.encode()) == 1


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\nhost: a\r\n\r\n", b"414"),
        (b"GET / HTTP/1.1\r\nhost: a\r\n" + b"x: y\r\n" * 2000 + b"\r\n", b"431"),
        (b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 10**6, b"431"),
        (b"GET /" + b"a" * 10**6, b"431"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"400"),
        (b"\x00" * 100 + b"\r\n\r\n", b"400"),
        (b"GET / HTTP/3.7\r\n\r\n", b"400"),
        (b"GET /\xff\xfe HTTP/1.1\r\nhost: a\r\n\r\n", b"400"),
        (b"CONNECT example.com:80 HTTP/1.1\r\nhost: a\r\n\r\n", b"4"),
        (b"GET http://[:::1/ HTTP/1.1\r\nhost: a\r\n\r\n", b"400"),
        (b"POST /echo HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n", b"400"),
        (b"POST /echo HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab", b"400"),
        (b"POST /echo HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", b"400"),
        (b"POST /echo HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\nhello\r\n", b"400"),
        (b"POST /echo HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n", b"400"),
        (b"POST /echo HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\nnot HTTP at all\r\n\r\n", b"400"),
        (b"POST /echo HTTP/1.0\r\ncontent-length: 1\r\n\r\nx", b"200"),
        (b"POST /echo HTTP/1.1\r\nhost: a\r\nx-b: \xc3\x28\xff\r\ncontent-length: 1\r\n\r\nx", b"200"),
        (b"POST /%ff%fe%00 HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n", b"404"),
        (b"POST /echo HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: x\r\ncontent-length: 0\r\n\r\n", b"200"),
    ],
    ids=lambda value: value[:40].decode("latin-1").split("\r\n")[0] if isinstance(value, bytes) else None,
)
async def test_what_is_no_request_is_refused_and_what_is_odd_is_answered(data: bytes, status: bytes) -> None:
    async with served(**QUICK, max_header_bytes=4096) as (_, port):
        assert (await exchange(port, data)).startswith(b"HTTP/1.1 " + status)
        assert await is_served(port)


async def test_an_upgrade_request_is_answered_over_http_1_and_its_body_is_read() -> None:
    head = (
        b"POST /echo HTTP/1.1\r\nhost: a\r\nConnection: Upgrade, HTTP2-Settings\r\n%b: h2c\r\nHTTP2-Settings: AAMA\r\n"
    )
    body = b"a\nupgrade: x"
    async with served(**QUICK) as (_, port), connected(port) as (reader, writer):
        for name in (b"Upgrade", b"upgrade", b"UPGRADE"):
            writer.write(head % name + b"content-length: %d\r\n\r\n" % len(body) + body)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            assert await reader.readexactly(11) == b'{"size":12}'


def answers_in(said: bytes) -> int:
    return len(re.findall(rb"HTTP/1\.1 \d{3} ", said))


HIDDEN = b"GET /trace HTTP/1.1\r\nhost: a\r\n\r\n"
POST = b"POST /echo HTTP/1.1\r\n"
FRAMED = b"content-length: %d\r\n\r\n%b" % (len(HIDDEN), HIDDEN)


@pytest.mark.parametrize("upgrade", [b"Upgrade: h2c", b"UPGRADE:websocket", b"upgrade:\t x"])
async def test_an_upgrade_header_cut_at_any_byte_hides_no_request_in_the_body(upgrade: bytes) -> None:
    head = POST + b"host: a\r\nconnection: upgrade\r\n"
    data = head + upgrade + b"\r\n" + FRAMED
    async with served(**QUICK) as (_, port):
        cuts = range(len(head) - 1, len(data) - len(HIDDEN) + 2)
        answers = await asyncio.gather(*(exchange(port, data[:cut], data[cut:]) for cut in cuts))
    for said in answers:
        assert answers_in(said) == 1 and b'{"size":%d}' % len(HIDDEN) in said


@pytest.mark.parametrize(
    "pieces",
    [
        (HIDDEN + POST + b"host: a\r\nconnection: upgrade\r\nUpg", b"rade: h2c\r\n" + FRAMED, HIDDEN),
        (b"CONNECT a:80 HTTP/1.1\r\nhost: a\r\n" + FRAMED, HIDDEN),
    ],
    ids=["cut and sent ahead", "a tunnel"],
)
async def test_a_request_for_another_protocol_is_the_last_of_its_connection(pieces: tuple[bytes, ...]) -> None:
    async with served(**QUICK) as (_, port):
        said = await exchange(port, *pieces)
        assert answers_in(said) <= 2 and said.count(b'"trace"') <= 1 and b"HTTP/1.1 400" in said


@pytest.mark.parametrize(
    "head",
    [
        b"content-length: 0\r\n",
        b"host: a\r\nhost: b\r\n",
        b"host: a\r\nHost: a\r\n",
        b"host: a/b\r\n",
        b"host: a, b\r\n",
        b"host: a\r\ntransfer-encoding: gzip, chunked\r\n",
        b"host: a\r\ntransfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n",
        b"host: a\r\ntransfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n",
        b"host: a\r\ntransfer-encoding: chunked, chunked\r\n",
        b"host: a\r\ntransfer-encoding: chunked, identity\r\n",
        b"host: a\r\ntransfer-encoding: identity\r\n",
        b"host: a\r\ntransfer-encoding: xchunked\r\n",
        b"host: a\r\ntransfer-encoding:\x0bchunked\r\n",
        b"host: a\r\ntransfer-encoding : chunked\r\n",
        b"host: a\r\nx: y\r\n transfer-encoding: chunked\r\n",
        b"host: a\r\ntransfer-encoding: chunked\r\ncontent-length: 5\r\n",
        b"host: a\r\ncontent-length: 5\r\ncontent-length: 5\r\n",
        b"host: a\r\ncontent-length: 5, 5\r\n",
        b"host: a\r\ncontent-length: +5\r\n",
        b"host: a\r\nx: y\nhost: b\r\n",
        b"host: a\r\nx: y\rhost: b\r\n",
        b"host: a\nx: y\n",
        b"host: a\r\nx: y\x00\r\n",
    ],
    ids=lambda head: head.decode("latin-1").replace("\r\n", "; ").strip(),
)
async def test_a_head_that_two_readers_may_read_in_two_ways_is_refused(head: bytes) -> None:
    async with served(**QUICK) as (_, port):
        body = b"0\r\n\r\n" + HIDDEN if b"chunked" in head else b""
        said = await exchange(port, POST + head + b"\r\n" + body, HIDDEN)
        assert said.startswith(b"HTTP/1.1 400") and answers_in(said) == 1
        assert await is_served(port)


@pytest.mark.parametrize(
    "head",
    [
        POST + b"host: a\r\n\n",
        POST + b"host: a\n\n",
        b"POST /echo HTTP/1.1\n\n",
        b"GET /\n",
        POST + b"host: a\r\nx: y\n",
    ],
    ids=lambda head: repr(head[12:]),
)
async def test_a_head_that_ends_with_bare_lf_is_refused_at_once(head: bytes) -> None:
    async with served() as (_, port), asyncio.timeout(15):
        whole = await exchange(port, head)
        cut = await asyncio.gather(*(exchange(port, head[:at], head[at:]) for at in range(1, len(head))))
    assert [said[:12] for said in (whole, *cut)] == [b"HTTP/1.1 400"] * len(head)


async def test_a_chunked_body_in_http_1_0_is_refused() -> None:
    async with served(**QUICK) as (_, port):
        data = b"POST /echo HTTP/1.0\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + HIDDEN
        assert answers_in(await exchange(port, data)) == 1


@pytest.mark.parametrize("host", [b"", b"a", b"a:80", b"[::1]:8080", b"leyden-gateway.leyden.svc.cluster.local:8080"])
async def test_hosts_of_every_form_are_served(host: bytes) -> None:
    async with served(**QUICK) as (_, port):
        said = await exchange(port, b"GET /trace HTTP/1.1\r\nHost: " + host + b"\r\n\r\n")
        assert said.startswith(b"HTTP/1.1 200")


async def test_requests_sent_ahead_are_answered_in_their_order() -> None:
    async with served(**QUICK) as (_, port):
        requests = [
            b"POST /echo HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % size + b"x" * size for size in (1, 20, 3)
        ]
        said = await exchange(port, b"".join(requests))
        assert [part[:10] for part in said.split(b'{"size":')[1:]] == [b"1}HTTP/1.1", b"20}HTTP/1.", b"3}"]


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(
    "ahead",
    [
        b"GET /patient/2 HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET /patient/2 HTTP/1.1\r\nhost: a\r\n\r\n" * 3,
        b"POST /echo HTTP/1.1\r\nhost: a\r\ncontent-length: 70000\r\n\r\n" + b"x" * 70_000,
    ],
    ids=["one", "three", "a long one"],
)
async def test_who_sent_requests_ahead_and_hangs_up_ends_the_one_in_hand(ahead: bytes, together: bool) -> None:
    first = b"GET /patient/1 HTTP/1.1\r\nhost: a\r\n\r\n"
    async with served() as (app, port), asyncio.timeout(60):
        async with connected(port) as (_, writer):
            writer.write(first + ahead if together else first)
            while not app.state.started:
                await asyncio.sleep(0.01)
            writer.write(b"" if together else ahead)
        while not app.state.ended:
            await asyncio.sleep(0.01)
        assert await is_served(port)
    assert (app.state.started, app.state.ended) == (["1"], ["1"])


@pytest.mark.parametrize("ahead", [0, 1])
async def test_a_client_that_sends_no_more_gets_its_answers(ahead: int) -> None:
    async with served() as (app, port), connected(port) as (reader, writer):
        writer.write(b"GET /waiting HTTP/1.1\r\nhost: a\r\n\r\n" * (1 + ahead))
        writer.write_eof()
        # It comes once the server knows that nothing more is sent.
        assert await reader.readuntil(b"\r\n\r\n") == INTERIM
        app.state.release.set()
        said = (await read_all(reader)).replace(INTERIM, b"")
    assert (said.count(b"HTTP/1.1 200"), said.count(b'{"waiting":true}')) == (1 + ahead, 1 + ahead)
    assert b"connection: close" in said


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_client_that_leaves_at_once_or_after_it_sent_everything_is_missed(
    loop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leyden.libs.service.limits.PROBE_SECONDS", (0.001, 0.1))

    async def leave() -> None:
        async with served() as (app, port):
            for name in ("at once", "later"):
                async with connected(port) as (reader, writer):
                    writer.write(b"GET /patient/%b HTTP/1.1\r\nhost: a\r\n\r\n" % name.encode().replace(b" ", b"%20"))
                    await eventually(lambda name=name: name in app.state.started)
                    if name == "later":
                        writer.write_eof()
                        assert await reader.readuntil(b"\r\n\r\n") == INTERIM
                        assert name not in app.state.ended
                await eventually(lambda name=name: name in app.state.ended)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(leave())


@pytest.mark.parametrize(
    "sent",
    [b"POST /echo HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\nx", b"GET /patient/1 HTTP/1.0\r\n\r\n", b"GET /tr"],
    ids=["half a body", "HTTP/1.0", "half a head"],
)
async def test_the_end_of_what_is_sent_ends_a_request_that_nothing_can_be_asked_about(sent: bytes) -> None:
    async with served() as (_, port), connected(port) as (reader, writer):
        writer.write(sent)
        writer.write_eof()
        assert await read_all(reader) == b""


async def test_what_came_early_of_a_body_earns_no_longer_pause() -> None:
    nearly = b"POST /echo HTTP/1.1\r\nhost: a\r\ncontent-length: 1001\r\n\r\n" + b"x" * 1000
    async with served(**QUICK, body_bytes_per_second=1) as (_, port), asyncio.timeout(30):
        assert (await exchange(port, nearly)).startswith(b"HTTP/1.1 408")


async def test_a_body_that_comes_fast_enough_may_take_longer_than_the_grace() -> None:
    begin = b"POST /echo HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: 40\r\n\r\n"
    async with served(**QUICK, body_bytes_per_second=1) as (_, port), connected(port) as (reader, writer):
        writer.write(begin)
        await drip(writer, b"x" * 40)
        assert (await read_all(reader)).endswith(b'{"size":40}')


async def test_a_body_that_is_sent_ahead_slowly_does_not_cut_the_answer_in_hand() -> None:
    slow = b"POST /echo HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\n\r\nx"
    async with served(**QUICK) as (app, port), connected(port) as (reader, writer), asyncio.timeout(60):
        writer.write(b"GET /waiting HTTP/1.1\r\nhost: a\r\n\r\n")
        while not app.state.started:
            await asyncio.sleep(0.01)
        writer.write(slow)
        # Begun later, and by itself: once that is refused, the one sent ahead has taken longer than a body may.
        assert (await exchange(port, slow)).startswith(b"HTTP/1.1 408")
        writer.write(b"xx")
        app.state.release.set()
        said = await read_all(reader)
    assert [part[:21] for part in said.split(b"\r\n\r\n")[1:]] == [b'{"waiting":true}HTTP/', b'{"size":3}']


async def test_garbage_behind_a_request_sent_ahead_is_not_answered_within_the_answer_in_hand() -> None:
    async with served() as (app, port), connected(port) as (reader, writer):
        writer.write(b"GET /flood HTTP/1.1\r\nhost: a\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.write(b"GET /trace HTTP/1.1\r\nhost: a\r\n\r\n" + b"no HTTP\r\n\r\n")
        assert b"HTTP/1.1 400" not in await read_all(reader)
        await eventually(lambda: app.state.ended)


async def test_a_connection_beyond_the_limit_gets_503_and_frees_its_slot() -> None:
    async with served(max_connections=20) as (_, port), contextlib.AsyncExitStack() as stack:
        idle = [await stack.enter_async_context(connected(port)) for _ in range(20)]
        async with httpx.AsyncClient(timeout=60) as client:
            refused = await client.post(f"http://127.0.0.1:{port}/echo", content=b"")
        assert (refused.status_code, refused.headers["retry-after"], refused.headers["connection"]) == (
            503,
            "1",
            "close",
        )
        for _, writer in idle:
            writer.close()
            await writer.wait_closed()
        await eventually(lambda: is_served(port))


async def test_a_thousand_idle_connections_do_not_block_requests() -> None:
    async with served() as (_, port), contextlib.AsyncExitStack() as stack:
        for _ in range(1000):
            await stack.enter_async_context(connected(port))
        assert await is_served(port)


async def test_an_early_answer_reaches_who_is_still_sending() -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield b"x" * 2**16

    async with served() as (_, port), httpx.AsyncClient(timeout=60) as client:
        answer = await client.post(f"http://127.0.0.1:{port}/echo", content=endless())
        assert answer.status_code == 413


async def test_a_client_that_drips_the_rest_of_an_answered_body_is_disconnected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("leyden.libs.service.limits.REST_SECONDS", 1.0)
    async with served(**QUICK) as (_, port), connected(port) as (reader, writer):
        writer.write(b"POST /nowhere HTTP/1.1\r\nhost: a\r\ncontent-length: 5000\r\n\r\n")
        dripping = asyncio.create_task(drip(writer, b"a" * 5000))
        assert (await read_all(reader)).startswith(b"HTTP/1.1 404")
        dripping.cancel()


async def test_a_connection_that_sends_only_empty_lines_is_closed() -> None:
    async with served(**QUICK) as (_, port), connected(port) as (reader, writer):
        dripping = asyncio.create_task(drip(writer, b"\r\n" * 2500))
        assert await read_all(reader) == b""
        dripping.cancel()
