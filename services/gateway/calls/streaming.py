"""Streams a call's answer as events, some of them to keep the connection alive while no tokens arrive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, closing

from starlette.responses import StreamingResponse
from starlette.types import Send

from leyden.libs.faults import fault_point
from leyden.services.gateway.calls.context import Answer, Completion
from leyden.services.gateway.calls.retries import InFlightCall
from leyden.services.gateway.calls.silence import Silence
from leyden.services.gateway.dialects.base import EventWriter
from leyden.services.gateway.errors import GatewayError
from leyden.services.gateway.prompt.answer import AnswerStream
from leyden.services.gateway.prompt.template import ChatModel


class EventStream(StreamingResponse):
    """Sends events until the call ends or the agent disconnects; then it closes the generator at once.

    After an error the response has no end, and the server closes the connection: some clients ignore the event of an
    error and would take the answer as complete.

    Args: media_type: of the events; first: events produced before the response starts, so that an error before them
        sets the HTTP status; on_loss: called when the agent hung up before the end; on_end: called after the last event
    """

    def __init__(
        self,
        media_type: str,
        first: bytes,
        events: AsyncGenerator[bytes],
        on_loss: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        self._first = first
        self._events = events
        self._on_loss = on_loss
        self._on_end = on_end
        super().__init__(
            events,
            media_type=media_type,
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
        )

    async def stream_response(self, send: Send) -> None:
        """Sends the events; Starlette cancels it when the client disconnects."""
        async with aclosing(self._events):
            try:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                await send({"type": "http.response.body", "body": self._first, "more_body": True})
                async for event in self._events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
                self._on_end()
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            except GatewayError:
                return
            except BaseException:
                self._on_loss()
                raise


async def replay(
    writer: EventWriter, completion: Completion, before_end: Callable[[], Awaitable[None]]
) -> AsyncGenerator[bytes]:
    """Yields the events of a stored answer; `before_end` is awaited before the last one."""
    for answer in completion.answers:
        events = writer.reasoning(answer.index, answer.turn.reasoning) if answer.turn.reasoning else b""
        yield events + writer.rest(answer, answer.turn.content, answer.logprobs)
    await before_end()
    yield writer.end(completion)


async def follow(
    writer: EventWriter,
    model: ChatModel,
    call: InFlightCall,
    before_end: Callable[[], Awaitable[None]],
    *,
    keepalive_after_seconds: float,
    keepalive_seconds: float,
) -> AsyncGenerator[bytes]:
    """Yields the events of a call in flight; the last ones follow its durable record.

    Args: before_end: awaited before the last event; keepalive_after_seconds: a stream without events for this long
        begins with a comment; keepalive_seconds: the time between later comments
    Raises: GatewayError: before the first event; or after the event of a later one, where not all clients read that
    """
    progress = asyncio.Event()
    # Tokens may have arrived before this listener was added.
    progress.set()
    has_started = False
    with call.listening(progress.set), closing(Silence(progress.set)) as silence:
        assert call.task is not None
        streams = [AnswerStream(model, call.context.request, call.context.prompt, choice) for choice in call.choices]
        silence.begin(keepalive_after_seconds)
        while not call.task.done():
            await progress.wait()
            progress.clear()
            if call.task.done():
                break
            events = b"".join(_text_event(writer, stream) for stream in streams)
            if events or silence.is_over:
                yield events or writer.keepalive
                has_started = True
                # Tokens that the client does not see do not put the end off.
                silence.begin(keepalive_seconds)
        try:
            completion = call.result()
        except GatewayError as error:
            if not has_started:
                raise
            yield writer.error(error)
            if writer.error_is_final:
                return
            raise
        yield b"".join(
            _rest(writer, stream, answer) for stream, answer in zip(streams, completion.answers, strict=True)
        )
        fault_point("gateway.streamed")
        await before_end()
        yield writer.end(completion)


def _text_event(writer: EventWriter, stream: AnswerStream) -> bytes:
    reasoning, content = stream.next_text()
    events = writer.reasoning(stream.index, reasoning) if reasoning else b""
    return events + (writer.text(stream.index, content, stream.next_logprobs()) if content else b"")


def _rest(writer: EventWriter, stream: AnswerStream, answer: Answer) -> bytes:
    reasoning, content = stream.rest(answer)
    events = writer.reasoning(answer.index, reasoning) if reasoning else b""
    return events + writer.rest(answer, content, stream.next_logprobs())
