"""A completion as it grows: server-sent events of a call."""

from __future__ import annotations

import asyncio

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from libs.faults import passes
from services.gateway.answer import KEEPALIVE, ChoiceStream, ChunkEvents, Completion, event
from services.gateway.errors import GatewayError, Unavailable, error_response
from services.gateway.forward import Call, Gateway
from services.gateway.request import ChatRequest


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
        pump = asyncio.create_task(self._pump(send))
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

    async def _pump(self, send: Send) -> None:
        if isinstance(self._call, Completion):
            completion = self._call
            await self._send(send, completion.whole_chunks())
        else:
            completion = await self._follow(self._call, send)
            passes("gateway.streamed")
        await self._send(send, completion.last_chunks(include_usage=self._request.include_usage), more=False)

    async def _follow(self, call: Call, send: Send) -> Completion:
        assert call.task is not None
        streams = [ChoiceStream(self._gateway.model, self._request, choice) for choice in call.choices]
        events = ChunkEvents(call.request_id, self._request.model, call.sequence // 1_000_000_000)
        with call.watched() as progress, _Reminder(progress, self._keepalive_after_seconds) as reminder:
            while not call.task.done():
                await progress.wait()
                progress.clear()
                data = events.of(stream.chunk() for stream in streams)
                if data or reminder.is_due:
                    await self._send(send, data or KEEPALIVE)
                    reminder.put_off(self._keepalive_seconds)
            completion = result_of(call.task)
        rest = (stream.last_chunk(answer) for stream, answer in zip(streams, completion.answers, strict=True))
        await self._send(send, events.of(rest))
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


class _Reminder:
    """Sets an event when it is due. One that is put off, as with every token, costs no timer until then."""

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
        if self.is_due:
            self.is_due = False
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
        raise Unavailable("The gateway is stopping; try again.", code="stopping", retry_after_seconds=1)
    return task.result()


async def hung_up(receive: Receive) -> None:
    """Returns when the client has gone. The body has been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass
