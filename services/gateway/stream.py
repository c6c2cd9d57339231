"""A completion as it grows: server-sent events of a call.

A token costs no task: what has become showable is written to the client's connection in the same moment that it came
from the engine's. Only where the client does not keep up, or long nothing comes, a task sees to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from leyden.libs.faults import fault_point
from leyden.libs.service.protocol import Write, writer_of
from leyden.services.gateway.answer import KEEPALIVE, Completion, event
from leyden.services.gateway.chunks import ChoiceStream, head_of_chunks
from leyden.services.gateway.errors import GatewayError, error_response, stopping
from leyden.services.gateway.forward import Call, Gateway
from leyden.services.gateway.request import ChatRequest


class EventStream(Response):
    """Server-sent events of a call. The last ones leave after the record is durable.

    Nothing is sent before the first token, so that an error keeps its HTTP status, unless the wait is long: then
    comments keep the connection open, and an error becomes an event.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        gateway: Gateway,
        request: ChatRequest,
        call: Call | Completion,
        keepalive_after_seconds: float,
        keepalive_seconds: float,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        # The length of a stream is not known.
        self.raw_headers = [header for header in self.raw_headers if header[0] != b"content-length"]
        self._gateway = gateway
        self._request = request
        self._call = call
        self._keepalive_after_seconds = keepalive_after_seconds
        self._keepalive_seconds = keepalive_seconds
        self._has_started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends until the end of the call, or until the agent hangs up."""
        pump = asyncio.create_task(self._pump(writer_of(scope), send))
        hangup = asyncio.create_task(hung_up(receive))
        try:
            await asyncio.wait({pump, hangup}, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        except GatewayError as error:
            await self._fail(error, scope, receive, send)
        finally:
            for task in (pump, hangup):
                task.cancel()
            await asyncio.wait({pump, hangup})

    async def _pump(self, write: Write | None, send: Send) -> None:
        if isinstance(self._call, Completion):
            completion = self._call
            await self._send(send, completion.whole_chunks())
        else:
            completion = await self._follow(self._call, write, send)
            fault_point("gateway.streamed")
        await self._send(send, completion.last_chunks(include_usage=self._request.include_usage), more=False)

    async def _follow(self, call: Call, write: Write | None, send: Send) -> Completion:
        assert call.task is not None
        head = head_of_chunks(call.request_id, self._request.model, call.sequence // 1_000_000_000)
        streams = [ChoiceStream(self._gateway.model, self._request, choice, head) for choice in call.choices]
        follower = Follower(streams, lambda data: self._send(send, data), write, self._keepalive_seconds)
        await follower.follow(call, call.task, self._keepalive_after_seconds)
        completion = result_of(call.task)
        rest = (stream.last_event(answer) for stream, answer in zip(streams, completion.answers, strict=True))
        await self._send(send, b"".join(rest))
        return completion

    async def _send(self, send: Send, data: bytes, *, more: bool = True) -> None:
        if not self._has_started:
            self._has_started = True
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": data, "more_body": more})

    async def _fail(self, error: GatewayError, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._has_started:
            await error_response(error)(scope, receive, send)
            return
        await send({"type": "http.response.body", "body": event(error.body()), "more_body": False})


class Follower:
    """Sends what has become showable of a call, until the call is over.

    The first piece is sent by `follow`, and every one that the client is not ready for or that only says that there is
    nothing new. All others are written by `_tell`, in the moment that their tokens come.
    """

    __slots__ = (
        "_error", "_is_behind", "_keepalive_seconds", "_progress", "_reminder", "_send", "_streams",
        "_task", "_write", "_writes",
    )  # fmt: skip

    def __init__(
        self,
        streams: Sequence[ChoiceStream],
        send: Callable[[bytes], Awaitable[None]],
        write: Write | None,
        keepalive_seconds: float,
    ) -> None:
        self._streams = streams
        self._send = send
        self._write = write
        self._keepalive_seconds = keepalive_seconds
        self._progress = asyncio.Event()
        self._writes = self._is_behind = False
        self._error: Exception | None = None

    async def follow(self, call: Call, task: asyncio.Task[Completion], keepalive_after_seconds: float) -> None:
        """Returns when the call is over, with its last pieces left to send."""
        self._task = task
        with _Reminder(self._progress, keepalive_after_seconds) as self._reminder, call.watched(self._tell):
            while not task.done():
                await self._progress.wait()
                self._progress.clear()
                await self._catch_up()

    async def _catch_up(self) -> None:
        if self._error is not None:
            raise self._error
        data = self._new()
        if not data and self._reminder.is_due:
            data = KEEPALIVE
        if data or self._is_behind:
            # Nothing may pass a piece that waits for its client.
            self._writes = False
            await self._send(data)
            self._writes, self._is_behind = self._write is not None, False
            self._reminder.put_off(self._keepalive_seconds)

    def _tell(self) -> None:
        if self._writes and not self._task.done():
            try:
                data = self._new()
                if data and self._write is not None:
                    self._writes = self._write(data)
                    self._is_behind = not self._writes
                    self._reminder.put_off(self._keepalive_seconds)
            # It is this listener's trouble: not the engine's, whose tokens these are, and not the call's.
            except Exception as error:  # noqa: BLE001
                self._writes, self._error = False, error
            if self._writes:
                return
        self._progress.set()

    def _new(self) -> bytes:
        streams = self._streams
        return streams[0].event() if len(streams) == 1 else b"".join([stream.event() for stream in streams])


class _Reminder:
    """Sets an event when it is due. One that is put off, as with every token, costs no timer until then."""

    __slots__ = ("_due", "_event", "_loop", "_timer", "is_due")

    def __init__(self, event: asyncio.Event, seconds: float) -> None:
        self._event = event
        self._loop = asyncio.get_running_loop()
        self.is_due = False
        self._due = self._loop.time() + seconds
        self._timer = self._loop.call_at(self._due, self._ring)

    def __enter__(self) -> _Reminder:
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def put_off(self, seconds: float) -> None:
        """Makes it due so many seconds from now."""
        self._due = self._loop.time() + seconds
        if self.is_due or self._due < self._timer.when():
            self.is_due = False
            self._timer.cancel()
            self._timer = self._loop.call_at(self._due, self._ring)

    def _ring(self) -> None:
        if self._loop.time() < self._due:
            self._timer = self._loop.call_at(self._due, self._ring)
        else:
            self.is_due = True
            self._event.set()


def result_of(task: asyncio.Task[Completion]) -> Completion:
    """The answer of a call that has ended."""
    if task.cancelled():
        raise stopping()
    return task.result()


async def hung_up(receive: Receive) -> None:
    """Returns when the client has gone. The body has been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass
