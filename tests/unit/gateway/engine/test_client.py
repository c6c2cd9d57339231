"""Requests to engines that answer, refuse, break off, fall silent or die, and calls that are cancelled meanwhile."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import numpy as np
import orjson
import pytest
from prometheus_client import REGISTRY

from leyden.services.gateway.calls.context import SampledTokens, Sampling
from leyden.services.gateway.engine import client
from leyden.services.gateway.engine.client import EngineClient
from leyden.services.gateway.engine.pool import Endpoint, EnginePool
from leyden.services.gateway.engine.sglang import EngineRequest
from leyden.services.gateway.errors import BadRequest, Unavailable
from tests.fakes.scripted_engine import ScriptedEngine, running
from tests.support.waiting import eventually

LONG = 60.0
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def answered(body: bytes, status: str = "200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status.encode(), len(body), body)


def whole(data: bytes) -> bytes:
    """A stream of one event."""
    return answered(b"data: " + data + b"\n\n")


def event(*tokens: int, finish: Any = None, version: int = 0) -> bytes:
    """A cumulative event."""
    meta = {
        "finish_reason": finish,
        "weight_version": f"run-a:{version}",
        "output_token_logprobs": [[-0.5, token, None] for token in tokens],
    }
    return orjson.dumps({"text": "", "output_ids": tokens, "meta_info": meta})


def chunk(data: bytes) -> bytes:
    text = b"data: " + data + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(text), text)


STOP = {"type": "stop", "matched": 2}
ABORT = {"type": "abort", "message": "Aborted"}
HELLO = whole(event(7, 2, finish=STOP))
OK = answered(b"")


class Server:
    """Answers requests with the bytes that it is given, one list of pieces for each.

    None closes the connection, b"wait" waits for `go_on`, and b"abort" for a request to abort.
    """

    def __init__(self, *answers: Sequence[bytes | None]) -> None:
        self._answers = list(answers)
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.aborts: list[str] = []
        self.abort_answer: bytes | None = OK
        self.connections = 0
        self.url = ""
        self.go_on, self.aborted, self.is_left = asyncio.Event(), asyncio.Event(), asyncio.Event()

    @property
    def bodies(self) -> list[Any]:
        return [orjson.loads(body) for _, _, body in self.requests]

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server:
            yield

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while await self._answer(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            self.is_left.set()
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if first.startswith("POST /abort_request"):
            self.aborts.append(orjson.loads(body)["rid"])
            self.aborted.set()
            if self.abort_answer is not None:
                writer.write(self.abort_answer)
            return self.abort_answer is not None
        self.requests.append((first, headers, body))
        for piece in self._answers.pop(0):
            if piece is None:
                return False
            if piece in {b"wait", b"abort"}:
                waited = self.go_on if piece == b"wait" else self.aborted
                await waited.wait()
            else:
                writer.write(piece)
                await writer.drain()
        return True


class Client:
    """An `EngineClient` for one server, and what its calls count."""

    def __init__(self, inner: EngineClient, pool: EnginePool) -> None:
        self.inner, self.pool = inner, pool
        self.progress = 0

    def _progressed(self) -> None:
        self.progress += 1

    async def sample(self, tokens: SampledTokens | None = None, **fields: Any) -> SampledTokens:
        tokens = tokens or new_tokens()
        async with asyncio.timeout(LONG):
            await self.inner.sample(request(**fields), tokens, self._progressed)
        return tokens


def new_tokens() -> SampledTokens:
    return SampledTokens("call", 0, None)


def request(**fields: Any) -> EngineRequest:
    values: dict[str, Any] = {
        "run_id": "run-a",
        "rollout_id": "run-a.0.0",
        "pool": "default",
        "prompt_ids": np.array([1], dtype=np.int32),
        "sampling": Sampling(),
        "temperature": 1.0,
        "max_tokens": 8,
        "vocab_size": 100,
        "top_logprobs": 0,
        "eos_ids": (2,),
        "stream": True,
    }
    return EngineRequest(**{**values, **fields})


@asynccontextmanager
async def client_of(
    *urls: str,
    api_key: str | None = None,
    silence_seconds: float = LONG,
    hold_seconds: float = LONG,
    managed: Sequence[Endpoint] = (),
    newest_version: int | None = None,
) -> AsyncIterator[Client]:
    async def endpoints() -> Sequence[Endpoint]:
        return managed

    async def newest(_run_id: str) -> int | None:
        return newest_version

    pool = EnginePool(endpoints, static_urls=urls, poll_seconds=0.01)
    await pool.refresh()
    inner = EngineClient(
        pool, api_key=api_key, silence_seconds=silence_seconds, hold_seconds=hold_seconds, newest_version=newest
    )
    try:
        yield Client(inner, pool)
    finally:
        await inner.close()


def lost(cause: str) -> float:
    return REGISTRY.get_sample_value("gateway_engine_retries_total", {"cause": cause}) or 0.0


async def test_events_are_added_as_they_arrive() -> None:
    server = Server([CHUNKED, chunk(event(7)), b"wait", chunk(event(7, 2, finish=STOP)), chunk(b"[DONE]"), END])
    async with server.serving(), client_of(server.url) as engines:
        tokens = new_tokens()
        sampling = asyncio.create_task(engines.sample(tokens))
        await eventually(lambda: tokens.ids == [7])
        server.go_on.set()
        await sampling
    assert (tokens.ids, tokens.finish, engines.progress) == ([7, 2], "stop", 2)
    assert tokens.ended_at is not None and tokens.first_token_at is not None


async def test_a_version_newer_than_the_pool_knew_is_looked_up() -> None:
    later = [event(7, 8, version=1), event(7, 8, 2, finish=STOP, version=1)]
    server = Server([CHUNKED, *map(chunk, [event(7), *later]), END])
    async with server.serving():
        managed = [Endpoint(server.url, "run-a", 0)]
        async with client_of(managed=managed, newest_version=1) as engines:
            assert (await engines.sample()).policy_versions == [0, 0, 1]


async def test_an_engine_that_names_a_version_which_does_not_exist_is_not_believed() -> None:
    liar, honest = Server([whole(event(7, 2, finish=STOP, version=9))] * 9), Server([HELLO])
    before = lost("unknown_version")
    async with liar.serving(), honest.serving():
        managed = [Endpoint(liar.url, "run-a", 0)]
        async with client_of(managed=managed, newest_version=1, hold_seconds=0.2) as engines:
            with pytest.raises(Unavailable):
                await engines.sample(stream=False)
        managed = [Endpoint(url, "run-a", 0) for url in (liar.url, honest.url)]
        async with client_of(managed=managed, newest_version=1) as engines:
            assert (await engines.sample(stream=False)).policy_versions == [0, 0]
    assert lost("unknown_version") > before


async def test_a_stream_split_anywhere_gives_the_same_tokens() -> None:
    events = [event(7), event(7, 8), event(7, 8, 2, finish=STOP)]
    frames = [b": ping\n\n", *(b"data:%b\r\n\r\n" % data for data in events), b"id: 1\n", b"data: [DONE]\n\n"]
    body = b"".join(frames)
    for length in (1, 2, 7, 50, len(body)):
        pieces = [body[start : start + length] for start in range(0, len(body), length)]
        chunks = [b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces]
        server = Server([CHUNKED, *chunks, END])
        async with server.serving(), client_of(server.url) as engines:
            assert (await engines.sample()).ids == [7, 8, 2]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_first_token_says_when_the_engine_began_while_it_still_samples(stream: bool) -> None:
    server = Server([CHUNKED, chunk(event(7)), b"wait", chunk(event(7, 2, finish=STOP)), chunk(b"[DONE]"), END])
    async with server.serving(), client_of(server.url) as engines:
        tokens = new_tokens()
        sampling = asyncio.create_task(engines.sample(tokens, stream=stream))
        await eventually(lambda: tokens.accepted_at is not None)
        assert not sampling.done()
        server.go_on.set()
        await sampling
    assert tokens.ids == [7, 2]


async def test_connections_are_used_again_and_carry_the_key() -> None:
    server = Server([HELLO], [CHUNKED, chunk(event(2, finish=STOP)), END], [HELLO])
    async with server.serving(), client_of(server.url, api_key="secret") as engines:
        for stream in (False, True, False):
            await engines.sample(stream=stream)
    assert server.connections == 1
    first, headers, _ = server.requests[0]
    assert first == "POST /generate HTTP/1.1"
    assert (headers["authorization"], headers["content-type"]) == ("Bearer secret", "application/json")
    assert headers["accept-encoding"] == "identity"
    assert server.bodies[0]["input_ids"] == [1]


async def test_a_user_and_password_in_the_url_replace_the_key() -> None:
    server = Server([HELLO])
    async with server.serving():
        url = server.url.replace("//", "//a:b%20c@")
        async with client_of(url, api_key="secret") as engines:
            await engines.sample(stream=False)
    assert server.requests[0][1]["authorization"] == "Basic YTpiIGM="


async def test_a_prompt_of_megabytes_is_sent() -> None:
    server = Server([HELLO])
    prompt = np.full(500_000, 99, dtype=np.int32)
    async with server.serving(), client_of(server.url) as engines:
        await engines.sample(stream=False, prompt_ids=prompt)
    assert server.bodies[0]["input_ids"] == prompt.tolist()


@pytest.mark.parametrize(
    "broken",
    [
        [None],
        [b"HTTP/1.1 200 OK\r\ncontent-len", None],
        [b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{", None],
        [CHUNKED, chunk(event(7)), None],
        [CHUNKED, b"no length\r\n"],
        [CHUNKED, END],
        [b"SSH-2.0-OpenSSH\r\n"],
        [b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 20_000],
        [answered(b"", "302 Found\r\nlocation: http://127.0.0.1:9/")],
        [answered(b"busy", "503 Service Unavailable")],
        [CHUNKED, chunk(b"no json"), END],
        [CHUNKED, chunk(b'{"error":{"message":"out of memory","code":500}}'), END],
    ],
)
async def test_the_rest_is_requested_again_after_a_broken_answer(broken: Sequence[bytes | None]) -> None:
    rest = [CHUNKED, chunk(event(8, 2, finish=STOP)), END]
    server = Server(broken, rest)
    async with server.serving(), client_of(server.url) as engines:
        tokens = await engines.sample()
    came = tokens.ids[:-2]
    assert tokens.ids in ([8, 2], [7, 8, 2])
    assert server.bodies[1]["input_ids"] == [1, *came]
    assert [body["rid"] for body in server.bodies] == ["call", "call-1"]
    assert server.bodies[1]["sampling_params"]["max_new_tokens"] == 8 - len(came)


async def test_a_constrained_answer_begins_again_and_its_stream_ends() -> None:
    server = Server([whole(event(9, 9, finish=ABORT))], [HELLO], [CHUNKED, chunk(event(9, 9)), None])
    constraint = {"json_schema": "{}"}
    async with server.serving(), client_of(server.url) as engines:
        tokens = await engines.sample(stream=False, constraint=constraint)
        assert tokens.ids == [7, 2] and len(tokens.logprobs) == len(tokens.policy_versions) == 2
        assert [body["input_ids"] for body in server.bodies] == [[1], [1]]
        assert server.bodies[1]["sampling_params"]["json_schema"] == "{}"
        with pytest.raises(Unavailable, match="middle of a constrained answer"):
            await engines.sample(constraint=constraint)


async def test_a_call_moves_from_a_failed_engine_to_another() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{free.getsockname()[1]}"
    server = Server(*[[HELLO]] * 20)
    before = lost("connection")
    async with server.serving(), client_of(dead, server.url) as engines:
        for number in range(20):
            await engines.sample(rollout_id=f"run-a.0.{number}", stream=False)
    assert len(server.requests) == 20
    # The pool avoids the dead engine after its first failure.
    assert 1 <= lost("connection") - before <= 3


async def test_an_engine_that_aborts_a_request_gets_it_again_and_stays_healthy() -> None:
    first = [CHUNKED, chunk(event(7, finish=ABORT)), chunk(b"[DONE]"), END]
    server = Server(first, [CHUNKED, chunk(event(2, finish=STOP)), END])
    before = lost("aborted")
    async with server.serving(), client_of(server.url, "http://127.0.0.1:9") as engines:
        rollout = next(
            name
            for name in map(str, range(99))
            if engines.pool._choose("run-a", name, "default", None).url == server.url
        )
        tokens = await engines.sample(rollout_id=rollout)
    assert (tokens.ids, server.bodies[1]["input_ids"], lost("aborted") - before) == ([7, 2], [1, 7], 1)


async def test_a_choice_that_has_all_its_tokens_is_finished_without_a_request() -> None:
    server = Server([CHUNKED, chunk(event(7, 8)), None])
    async with server.serving(), client_of(server.url) as engines:
        tokens = await engines.sample(max_tokens=2)
    assert (tokens.ids, tokens.finish, len(server.requests)) == ([7, 8], "length", 1)


async def test_a_request_that_the_engine_refuses_is_not_sent_again() -> None:
    text = b'{"error":{"message":"The input is longer than the context length"}}'
    limits = answered(b'{"max_req_input_len":0}')
    server = Server([answered(text, "400 Bad Request")], [limits], [HELLO])
    async with server.serving(), client_of(server.url) as engines:
        with pytest.raises(BadRequest) as refused:
            await engines.sample()
        await engines.sample(stream=False)
    assert (refused.value.code, server.connections) == ("context_length_exceeded", 1)


async def test_an_engine_with_a_shorter_context_is_asked_for_fewer_tokens() -> None:
    text = b'{"error":{"message":"Requested token count exceeds the model\'s maximum context length of 10 tokens."}}'
    limits = answered(b'{"max_req_input_len":4}')
    server = Server([answered(text, "400 Bad Request")], [limits], [HELLO], [HELLO])
    async with server.serving(), client_of(server.url) as engines:
        for _ in range(2):
            assert (await engines.sample(stream=False, max_tokens=4000)).ids == [7, 2]
    paths = [first.split()[1] for first, _, _ in server.requests]
    assert paths == ["/generate", "/server_info", "/generate", "/generate"]
    sent = [orjson.loads(body)["sampling_params"]["max_new_tokens"] for _, _, body in server.requests if body]
    assert sent == [4000, 9, 9]


async def test_an_engine_that_restarted_with_a_longer_context_is_asked_for_all_tokens_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "CONTEXT_LENGTH_SECONDS", 1.0)
    text = b'{"error":{"message":"The input is longer than the context length"}}'
    limits = answered(b'{"max_req_input_len":4}')
    server = Server([answered(text, "400 Bad Request")], [limits], [HELLO], [HELLO])
    async with server.serving(), client_of(server.url) as engines:
        await engines.sample(stream=False, max_tokens=4000)
        await asyncio.sleep(1.1)
        await engines.sample(stream=False, max_tokens=4000)
    sent = [orjson.loads(body)["sampling_params"]["max_new_tokens"] for _, _, body in server.requests if body]
    assert (sent[0], sent[-1]) == (4000, 4000)


async def test_calls_in_flight_when_a_shorter_context_becomes_known_are_sent_again() -> None:
    text = b'{"error":{"message":"The input is longer than the context length"}}'
    refused, limits = answered(text, "400 Bad Request"), answered(b'{"max_req_input_len":4}')
    server = Server([b"wait", refused], [refused], [limits], [HELLO], [limits], [HELLO])
    async with server.serving(), client_of(server.url) as engines:
        waiting = asyncio.create_task(engines.sample(stream=False, max_tokens=4000))
        while not server.requests:
            await asyncio.sleep(0)
        first = await engines.sample(stream=False, max_tokens=4000)
        server.go_on.set()
        assert (await waiting).ids == first.ids == [7, 2]


async def test_a_prompt_that_is_too_long_for_an_engine_is_refused_each_time() -> None:
    text = b'{"error":{"message":"The input is longer than the context length"}}'
    refusals = [answered(text, "400 Bad Request"), answered(b'{"max_req_input_len":-9}')]
    server = Server([refusals[0]], [refusals[1]], [refusals[0]], [refusals[1]])
    async with server.serving(), client_of(server.url) as engines:
        for _ in range(2):
            with pytest.raises(BadRequest) as refused:
                await engines.sample(stream=False)
            assert refused.value.code == "context_length_exceeded"


async def test_an_endless_refusal_is_read_in_part() -> None:
    endless = [b"HTTP/1.1 400 Bad Request\r\ncontent-length: 999999999\r\n\r\n", b"x" * 200_000, b"wait"]
    server = Server(endless)
    async with server.serving(), client_of(server.url) as engines:
        with pytest.raises(BadRequest):
            await engines.sample()
        server.go_on.set()
        await server.is_left.wait()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("head", [[], [CHUNKED], [CHUNKED, chunk(event(7))]])
async def test_an_engine_that_falls_silent_is_lost(head: Sequence[bytes], stream: bool) -> None:
    server = Server([*head, b"wait"], [CHUNKED, chunk(event(2, finish=STOP)), END] if stream else [HELLO])
    async with server.serving(), client_of(server.url, silence_seconds=1.0) as engines:
        tokens = await engines.sample(stream=stream)
        server.go_on.set()
        await server.is_left.wait()
    assert tokens.ids[-1] == 2 and len(server.requests) == 2


async def test_time_at_an_engine_is_no_wait_for_one() -> None:
    """An engine that accepted the request is lost after a time that no call may wait for an engine."""
    server = Server([CHUNKED, b"wait"], [HELLO])
    async with server.serving(), client_of(server.url, silence_seconds=2.0, hold_seconds=1.0) as engines:
        tokens = await engines.sample()
        server.go_on.set()
        await server.is_left.wait()
    assert tokens.ids[-1] == 2 and len(server.requests) == 2


async def test_an_engine_that_falls_silent_again_and_again_is_waited_for_no_longer() -> None:
    server = Server(*[[CHUNKED, b"wait"]] * 9)
    async with server.serving(), client_of(server.url, silence_seconds=0.5, hold_seconds=0.8) as engines:
        with pytest.raises(Unavailable):
            await engines.sample()
        server.go_on.set()
        await server.is_left.wait()
    assert len(server.requests) == 3


@contextmanager
def deaf() -> Iterator[str]:
    """The address of a server that accepts connections and reads nothing from them."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(64)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.parametrize("prompt_tokens", [1, 5_000_000])
async def test_an_engine_that_reads_nothing_is_lost(prompt_tokens: int) -> None:
    prompt = np.ones(prompt_tokens, dtype=np.int32)
    with deaf() as url:
        async with client_of(url, silence_seconds=0.2, hold_seconds=0.3) as engines:
            with pytest.raises(Unavailable):
                await engines.sample(prompt_ids=prompt)


async def test_a_call_fails_when_no_engine_answers_in_time() -> None:
    async with client_of("http://127.0.0.1:9", hold_seconds=0.2) as engines:
        tokens = new_tokens()
        with pytest.raises(Unavailable) as refused:
            await engines.sample(tokens)
    assert (refused.value.code, tokens.finish) == ("engine_unavailable", None)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cancelled_call_aborts_and_retains_the_received_tokens(stream: bool) -> None:
    last = event(7, 8, finish=ABORT)
    streamed = [CHUNKED, chunk(event(7)), b"abort", chunk(last), chunk(b"[DONE]"), END]
    server = Server(streamed if stream else [b"abort", whole(last)], [HELLO])
    async with server.serving(), client_of(server.url) as engines:
        tokens = new_tokens()
        sampling = asyncio.create_task(engines.sample(tokens, stream=stream))
        await eventually(lambda: bool(tokens.ids if stream else server.requests))
        sampling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sampling
        assert (tokens.ids, server.aborts) == ([7, 8], ["call"])
        # The answer was read to its end, so that its connection serves the next call.
        await engines.sample(stream=False)
    assert server.connections == 2


@pytest.mark.parametrize("refusal", [answered(b"", "401 Unauthorized"), None])
async def test_a_cancelled_call_closes_the_connection_of_an_engine_that_does_not_abort(refusal: bytes | None) -> None:
    server = Server([CHUNKED, chunk(event(7)), b"wait"])
    server.abort_answer = refusal
    async with server.serving(), client_of(server.url) as engines:
        tokens = new_tokens()
        sampling = asyncio.create_task(engines.sample(tokens))
        await eventually(lambda: bool(tokens.ids))
        sampling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sampling
        server.go_on.set()
        await server.is_left.wait()
    assert (tokens.ids, server.aborts) == ([7], ["call"])


async def test_a_cancelled_call_waits_for_the_rest_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ABORT_SECONDS", 0.1)
    server = Server([CHUNKED, chunk(event(7)), b"wait"])
    async with server.serving(), client_of(server.url) as engines:
        tokens = new_tokens()
        sampling = asyncio.create_task(engines.sample(tokens))
        await eventually(lambda: bool(tokens.ids))
        sampling.cancel()
        async with asyncio.timeout(LONG):
            with pytest.raises(asyncio.CancelledError):
                await sampling
        server.go_on.set()
        await server.is_left.wait()


async def test_a_call_cancelled_twice_waits_for_nothing_more() -> None:
    server = Server([CHUNKED, chunk(event(7)), b"wait"])
    async with server.serving(), client_of(server.url) as engines:
        sampling = asyncio.create_task(engines.sample())
        await eventually(lambda: bool(server.requests))
        sampling.cancel()
        await server.aborted.wait()
        sampling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sampling
        server.go_on.set()
        await server.is_left.wait()


async def test_a_call_cancelled_while_no_engine_serves_it_sends_nothing() -> None:
    async with client_of() as engines:
        sampling = asyncio.create_task(engines.sample())
        await asyncio.sleep(0.05)
        sampling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sampling


@pytest.mark.parametrize(("stream", "is_incremental"), [(False, False), (True, False), (True, True)])
async def test_weights_that_change_in_the_middle_are_named_per_token(stream: bool, is_incremental: bool) -> None:
    engine = ScriptedEngine(lambda _: [5, 6, 7, 8, 2], is_incremental=is_incremental, tokens_per_chunk=2)
    engine.pace = lambda tokens: setattr(engine, "weight_version", f"run-a:{3 if tokens < 2 else 4}")
    async with running(engine), client_of(engine.url) as engines:
        tokens = await engines.sample(stream=stream)
    assert (tokens.ids, tokens.policy_versions) == ([5, 6, 7, 8, 2], [3, 3, 4, 4, 4])


@pytest.mark.parametrize("is_incremental", [False, True])
async def test_a_death_in_the_middle_costs_no_token(is_incremental: bool) -> None:
    said = [5, 6, 7, 8, 2]
    engine = ScriptedEngine(lambda body: said[len(body["input_ids"]) - 1 :], is_incremental=is_incremental)
    engine.weight_version, engine.dies_after = "run-a:3", 2
    async with running(engine), client_of(engine.url) as engines:
        tokens = await engines.sample()
    assert (tokens.ids, tokens.policy_versions) == (said, [3] * 5)
    assert [asked["input_ids"] for asked in engine.requests] == [[1], [1, 5, 6]]


@pytest.mark.parametrize("is_incremental", [False, True])
async def test_an_answer_continues_after_a_pause_that_aborts_it(is_incremental: bool) -> None:
    said = [5, 6, 7, 8, 2]
    engine = ScriptedEngine(lambda body: said[len(body["input_ids"]) - 1 :], is_incremental=is_incremental)
    engine.weight_version = "run-a:3"

    def pace(tokens: int) -> None:
        if tokens == 2 and len(engine.requests) == 1:
            engine.aborted.append("call")
            engine.weight_version = "run-a:4"

    engine.pace = pace
    async with running(engine), client_of(engine.url) as engines:
        tokens = await engines.sample()
    assert (tokens.ids, tokens.policy_versions) == (said, [3, 3, 4, 4, 4])


async def test_tokens_of_another_runs_weights_are_requested_again() -> None:
    engine = ScriptedEngine(lambda _: [5, 6, 2])
    engine.pace = lambda tokens: setattr(engine, "weight_version", "run-a:3" if tokens < 2 else "run-b:0")
    before = lost("wrong_run")
    async with running(engine), client_of(engine.url) as engines:
        tokens = await engines.sample(max_tokens=5)
    assert (tokens.ids, tokens.policy_versions, tokens.finish) == ([5, 6, 5, 6, 5], [3] * 5, "length")
    assert lost("wrong_run") - before == 2
