"""The fault proxy injects exactly the configured failures, and none before and after."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.faults.proxy import FaultProxy, Trouble


class Echo:
    """A server that sends back whatever it gets, in capitals."""

    def __init__(self) -> None:
        self.heard = b""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = ("127.0.0.1", int(self._listener.getsockname()[1]))
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(client,), daemon=True).start()

    def _answer(self, client: socket.socket) -> None:
        with client:
            while True:
                try:
                    data = client.recv(65536)
                    if not data:
                        return
                    self.heard += data
                    client.sendall(data.upper())
                except OSError:
                    return


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.close()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[FaultProxy]:
    with FaultProxy(echo.address) as running:
        yield running


@contextmanager
def connected(proxy: FaultProxy, seconds: float = 30.0) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=seconds) as client:
        yield client


def say(client: socket.socket, words: bytes) -> bytes:
    client.sendall(words)
    return client.recv(65536)


def test_without_faults_the_proxy_forwards_all_bytes(proxy: FaultProxy) -> None:
    with connected(proxy) as client:
        assert say(client, b"hello") == b"HELLO"
        client.shutdown(socket.SHUT_WR)
        assert client.recv(10) == b""
    assert proxy.accepted == 1


def test_refusing_connections_also_closes_open_ones(proxy: FaultProxy) -> None:
    with connected(proxy) as client:
        assert say(client, b"hello") == b"HELLO"
        proxy.trouble = Trouble(refuse=True)
        with pytest.raises(ConnectionResetError):
            client.recv(10)
    with pytest.raises(ConnectionRefusedError), connected(proxy):
        pass
    proxy.heal()
    with connected(proxy) as client:
        assert say(client, b"again") == b"AGAIN"


def test_a_cut_resets_every_connection_and_new_ones_pass(proxy: FaultProxy) -> None:
    with connected(proxy) as one, connected(proxy) as two:
        assert (say(one, b"a"), say(two, b"b")) == (b"A", b"B")
        assert proxy.cut() == 2
        for client in (one, two):
            with pytest.raises(ConnectionResetError):
                client.recv(10)
    with connected(proxy) as client:
        assert say(client, b"c") == b"C"


def test_a_hanging_server_swallows_and_answers_once_it_is_healed(proxy: FaultProxy) -> None:
    proxy.trouble = Trouble(hang=True)
    with connected(proxy, 0.3) as client:
        with pytest.raises(TimeoutError):
            say(client, b"hello")
        proxy.heal()
        client.settimeout(30)
        assert client.recv(10) == b"HELLO"


def test_every_chunk_is_delayed_and_bandwidth_is_bounded(proxy: FaultProxy) -> None:
    with connected(proxy) as client:
        for trouble in (Trouble(delay_seconds=0.2), Trouble(bytes_per_second=25)):
            proxy.trouble = trouble
            began = time.monotonic()
            assert say(client, b"12345") == b"12345"
            assert time.monotonic() - began >= 0.2


def test_garbage_is_answered_in_the_servers_place(proxy: FaultProxy, echo: Echo) -> None:
    proxy.trouble = Trouble(answer=b"\x00\xffgarbage")
    with connected(proxy) as client:
        assert say(client, b"hello") == b"\x00\xffgarbage"
    assert echo.heard == b""


def test_an_answer_is_truncated(proxy: FaultProxy) -> None:
    proxy.trouble = Trouble(truncate_bytes=3)
    with connected(proxy) as client:
        assert say(client, b"hello") == b"HEL"
        assert client.recv(10) == b""


@pytest.mark.parametrize(("heard", "answer_alone"), [(b"begin;", False), (b"begin;commit;", True)])
def test_a_connection_is_cut_at_a_word_before_or_after_the_server_has_it(
    proxy: FaultProxy, echo: Echo, heard: bytes, answer_alone: bool
) -> None:
    proxy.trouble = Trouble(cut_at=b"commit", cut_answer=answer_alone)
    with connected(proxy) as client:
        assert say(client, b"begin;") == b"BEGIN;"
        with pytest.raises(ConnectionResetError):
            say(client, b"commit;")
    assert (echo.heard, proxy.cuts) == (heard, 1)


def test_proxied_urls_preserve_user_and_path(proxy: FaultProxy) -> None:
    assert proxy.url("postgresql://leyden:secret@db:5432/leyden") == (
        f"postgresql://leyden:secret@127.0.0.1:{proxy.port}/leyden"
    )
    assert proxy.url("http://engine:30000") == f"http://127.0.0.1:{proxy.port}"
    assert FaultProxy.of("redis://:secret@cache:6379/0").target == ("cache", 6379)
