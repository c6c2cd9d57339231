"""A stub engine that needs little CPU: SGLang's `/generate` with prepared answers, complete or streamed.

Other gateways get chat completions as OpenAI's API answers them, complete.

The benchmarks of the gateway need its speed: it sends 256 streams at once on the core that it shares with the gateway,
where `tests.fakes.scripted_engine` would take most of the time. All other tests use the scripted engine.

`python -m tests.bench.stub` serves on `STUB_LISTEN_FD`. `POST /shape` sets the form of the next answers.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
from dataclasses import asdict, dataclass
from typing import Any, cast

import orjson
import uvloop

EOS = 2
"""The end of turn of SmolLM2-135M-Instruct."""
FIRST_ID = 1000


@dataclass(frozen=True)
class Shape:
    """The form of answers.

    Args: tokens: of an answer; seconds: before it, or before its first token; pace_seconds: between the tokens of a
        stream; incremental: each event has only new tokens (`--incremental-streaming-output`), not all so far
    """

    tokens: int = 900
    seconds: float = 0.0
    pace_seconds: float = 0.02
    incremental: bool = True


class _Answers:
    """The bytes of an answer of one shape."""

    def __init__(self, shape: Shape, version: str) -> None:
        ids = [*range(FIRST_ID, FIRST_ID + shape.tokens - 1), EOS]
        self.shape = shape
        # An answer in one piece: its first token, and the rest.
        rest = _document(ids, 1 if shape.incremental else 0, shape.tokens, version, shape.tokens)
        self.whole = STREAM_HEAD + _event(_document(ids, 0, 1, version, shape.tokens)) + _event(rest) + STREAM_END
        text = orjson.dumps(_chat_document(shape.tokens))
        self.chat = _head("application/json", f"content-length: {len(text)}") + text
        self.pieces: list[bytes] = []
        self._ids, self._version = ids, version

    def piece(self, number: int) -> bytes:
        """One event of a stream; made at its first use."""
        while len(self.pieces) <= number:
            last = len(self.pieces)
            first = last if self.shape.incremental else 0
            document = _document(self._ids, first, last + 1, self._version, self.shape.tokens)
            self.pieces.append(_event(document))
        return self.pieces[number]


def _document(ids: list[int], first: int, last: int, version: str, total: int) -> dict[str, Any]:
    new = ids[first:last]
    finish = {"type": "stop", "matched": EOS} if last == total else None
    return {
        "text": " word" * len(new),
        "output_ids": new,
        "meta_info": {
            "id": "stub",
            "finish_reason": finish,
            "weight_version": version,
            "num_retractions": 0,
            "output_token_logprobs": [[-0.125 - token / 7777, token, None] for token in new],
            "output_token_logprobs_length": last,
            "completion_tokens": last,
            "cached_tokens": 0,
            "weight_versions": [{"version": version, "start": 0, "end": last}],
        },
    }


def _chat_document(tokens: int) -> dict[str, Any]:
    return {
        "id": "chatcmpl-stub",
        "object": "chat.completion",
        "created": 1,
        "model": "policy",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": " word" * tokens}, "finish_reason": "stop"}
        ],
        "usage": {"prompt_tokens": 60, "completion_tokens": tokens, "total_tokens": 60 + tokens},
    }


def _head(kind: str, length: str) -> bytes:
    return f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\n{length}\r\n\r\n".encode()


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def _event(document: dict[str, Any]) -> bytes:
    return _chunk(b"data: " + orjson.dumps(document) + b"\n\n")


STREAM_HEAD = _head("text/event-stream", "transfer-encoding: chunked")
STREAM_END = _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
OK = _head("application/json", "content-length: 2") + b"{}"


class Engine:
    """The state that all connections share."""

    def __init__(self, version: str) -> None:
        self._version = version
        self.answers = _Answers(Shape(), version)

    def set(self, **changes: Any) -> None:
        """Changes the form of answers that begin from now on."""
        self.answers = _Answers(Shape(**asdict(self.answers.shape) | changes), self._version)


class Connection(asyncio.Protocol):
    """One client; a request at a time, as all clients here do."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not derive from asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = self._buffer[:end].lower()
        length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
        if len(self._buffer) < end + 4 + length:
            return
        body, self._buffer = self._buffer[end + 4 : end + 4 + length], self._buffer[end + 4 + length :]
        self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        answers, loop = self._engine.answers, asyncio.get_running_loop()
        if head.startswith(b"post /shape"):
            self._engine.set(**orjson.loads(body))
            self._transport.write(OK)
        elif head.startswith(b"post /v1/chat/completions"):
            self._transport.write(answers.chat)
        elif b'"stream":true' in body and b'"stream_interval"' not in body:
            self._transport.write(STREAM_HEAD)
            loop.call_later(answers.shape.seconds, self._stream, answers, 0)
        elif answers.shape.seconds:
            loop.call_later(answers.shape.seconds, self._transport.write, answers.whole)
        else:
            self._transport.write(answers.whole)

    def _stream(self, answers: _Answers, number: int) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(answers.piece(number))
        if number + 1 == answers.shape.tokens:
            self._transport.write(STREAM_END)
            return
        # Not all streams at the same moment, as with a real engine.
        pace = answers.shape.pace_seconds * random.uniform(0.8, 1.2)
        asyncio.get_running_loop().call_later(pace, self._stream, answers, number + 1)


async def _serve() -> None:
    engine = Engine(os.environ["STUB_WEIGHT_VERSION"])
    sock = socket.socket(fileno=int(os.environ["STUB_LISTEN_FD"]))
    sock.setblocking(False)
    await asyncio.get_running_loop().create_server(lambda: Connection(engine), sock=sock, backlog=4096)
    with os.fdopen(int(os.environ["STUB_READY_FD"]), "w") as ready:
        ready.write("ready\n")
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(_serve())
