"""One class per wire format, chosen by the route; nothing behind the dialects knows a wire format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from leyden.libs.contracts.conversation import Json
from leyden.services.gateway.conversation import Answer, Completion, ModelRequest, TokenLogprob
from leyden.services.gateway.errors import GatewayError


class WireFormat(Protocol):
    """Translates requests into `ModelRequest`, and completions into bodies and streams."""

    def parse(self, body: bytes, *, max_choices: int) -> ModelRequest:
        """The request that a body asks for. Raises: BadRequest: a field is wrong, unknown or not served."""

    def body(self, completion: Completion) -> Json:
        """The answer to a request without a stream."""

    def stream(self, request: ModelRequest, request_id: str, created: int) -> EventWriter:
        """Writes one answer's stream. Args: created: seconds since the epoch."""


class EventWriter(Protocol):
    """The events of one stream, as bytes, in order."""

    keepalive: bytes
    """An event that every client ignores."""

    def text(self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None) -> bytes:
        """More text of a choice; `logprobs` of the tokens since the last event of this choice."""

    def rest(self, answer: Answer, text: str, logprobs: Sequence[TokenLogprob] | None) -> bytes:
        """The last text of a choice and its tool calls; empty where nothing is left to say."""

    def end(self, completion: Completion) -> bytes:
        """Finish reasons, usage where the request asks for it, and the end of the stream."""

    def error(self, error: GatewayError) -> bytes:
        """The event that ends a stream which failed after its first event."""
