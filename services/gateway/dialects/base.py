"""Wire formats, one class each, chosen by the route; no other package of the gateway handles a wire format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from leyden.libs.contracts.conversation import Json
from leyden.services.gateway.calls.context import Answer, Attempt, Completion, ModelRequest, TokenLogprob
from leyden.services.gateway.errors import GatewayError


class WireFormat(Protocol):
    """Translates requests into `ModelRequest`, completions into bodies and streams, and errors into bodies.

    A wire format without state on the server takes `expand` and `remember` from here.
    """

    stream_type: str = "text/event-stream"
    """The media type of a stream."""

    def parse(self, body: bytes, *, max_choices: int) -> ModelRequest:
        """Parses and validates a body. Raises: BadRequest: a field is wrong, unknown or unsupported."""

    async def expand(self, _attempt: Attempt, request: ModelRequest) -> ModelRequest:
        """Returns the request with the turns that it refers to by id. Raises: NotServed: an id is unknown."""
        return request

    async def remember(self, _attempt: Attempt, _request: ModelRequest, _completion: Completion) -> None:
        """Stores what later requests may refer to, before the answer's last byte leaves; a repeat changes nothing."""
        return

    def body(self, request: ModelRequest, completion: Completion) -> Json:
        """Returns the response body of a request without streaming."""

    def stream(self, request: ModelRequest, request_id: str, created: int, prompt_tokens: int) -> EventWriter:
        """Returns a writer for one answer's stream. Args: created: seconds since the epoch."""

    def error(self, error: GatewayError) -> Json:
        """Returns the body of an error; here in OpenAI's shape."""
        return error.body()


COMMENT = b": waiting for an engine\n"
"""A comment of an event stream. Clients in Go take a blank line after it as an event without data."""


class EventWriter(Protocol):
    """Encodes the events of one stream; call its methods in the order of the events."""

    @property
    def keepalive(self) -> bytes:
        """An event that every client ignores."""

    @property
    def error_is_final(self) -> bool:
        """Whether every client takes the event of an error as the end; otherwise the connection breaks after it."""

    def reasoning(self, index: int, text: str) -> bytes:
        """Encodes more reasoning of a choice; it comes before the choice's text."""

    def text(self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None) -> bytes:
        """Encodes more text of a choice, with the `logprobs` of the tokens since the choice's last event."""

    def rest(self, answer: Answer, text: str, logprobs: Sequence[TokenLogprob] | None) -> bytes:
        """Encodes the last text of a choice and its tool calls; returns no bytes where there are none."""

    def end(self, completion: Completion) -> bytes:
        """Encodes finish reasons, usage where the request asks for it, and the end of the stream."""

    def error(self, error: GatewayError) -> bytes:
        """Encodes the last event of a stream that failed after its first event."""
