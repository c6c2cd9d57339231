"""Errors in the shape of OpenAI's API: `{"error": {"message", "type", "param", "code"}}`.

GatewayError             base: status, type, param, code; 500: the run's stored document does not parse
  BadRequest             400: the body is invalid or asks for something unsupported
    ContextOverflow      400: the prompt leaves no room in the model's context
  KeyRefused             401 or 403: the capability is not valid for this address
  NotServed              404: no such address
  OtherVersion           409: an engine serves another version than the one that was asked for
  TooSlow                408: the body came too slowly
  TooLarge               413: the body exceeds the limit
  TooManyCalls           429 with Retry-After: one attempt has the maximum of calls, or of bytes of bodies, in flight
  Unavailable            503 with Retry-After: no engine or no store for longer than a request waits, or the gateway
                         stops
"""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from leyden.libs.contracts.states import CONTEXT_EXCEEDED
from leyden.libs.service import JsonResponse


class GatewayError(Exception):
    """An answer other than 200.

    Args: message: for people, names the remedy; param: the body's wrong field; code: for programs.
    """

    status = 500
    type = "api_error"
    detail = ""
    """Words that follow the message in the call's record, and that no agent reads."""

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after_seconds: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_seconds = retry_after_seconds

    def body(self) -> dict[str, Any]:
        """The answer's JSON, also used as the error event of a stream."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class BadRequest(GatewayError):
    """The body is invalid or asks for something unsupported."""

    status = 400
    type = "invalid_request_error"


class ContextOverflow(BadRequest):
    """The prompt leaves no room in the model's context."""

    def __init__(self, context_length: int, prompt_tokens: int) -> None:
        super().__init__(
            f"This model's maximum context length is {context_length} tokens, and the messages are"
            f" {prompt_tokens} tokens. Send fewer or shorter messages.",
            param="messages",
            code=CONTEXT_EXCEEDED,
        )


class KeyRefused(GatewayError):
    """The capability is not valid for this address. `status` is 401 for a bad key, 403 for another attempt's."""

    type = "authentication_error"

    def __init__(self, message: str, *, status: int, cause: str) -> None:
        super().__init__(message, code="invalid_api_key" if status == 401 else cause)
        self.status = status


class NotServed(GatewayError):
    """No such address."""

    status = 404
    type = "invalid_request_error"


class OtherVersion(GatewayError):
    """An engine serves another version than the one that was asked for."""

    status = 409
    type = "invalid_request_error"


class TooSlow(GatewayError):
    """The body came too slowly."""

    status = 408
    type = "invalid_request_error"


class TooLarge(GatewayError):
    """The body exceeds the limit."""

    status = 413
    type = "invalid_request_error"


class TooManyCalls(GatewayError):
    """One attempt has the maximum of calls, or of bytes of bodies, in flight."""

    status = 429
    type = "requests"


class Unavailable(GatewayError):
    """No engine or no store was available for longer than a request waits, or the gateway stops."""

    status = 503
    type = "service_unavailable"


def stopping() -> Unavailable:
    """Returns the error of a call that a stopping gateway does not start or finish."""
    return Unavailable("The gateway is stopping; try again.", code="stopping", retry_after_seconds=1)


def error_response(error: GatewayError, body: dict[str, Any] | None = None) -> Response:
    """Converts the error to an HTTP response. Args: body: its form in the dialect of the request, else OpenAI's."""
    retry = {} if error.retry_after_seconds is None else {"retry-after": str(error.retry_after_seconds)}
    return JsonResponse(body or error.body(), error.status, retry)
