"""Errors of every process, and HTTP error answers as RFC 9457 problem details.

Misconfigured     the operator must correct a setting, or a file that one names
└─ CannotListen   the process cannot bind its port; an OSError as well
Problem           an HTTP error with a status; a route raises it, a handler answers it
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

PLAIN_TITLES = {422: "Invalid request"}
"""Titles of statuses whose own phrase says little: people read the title above the wrong fields."""


class Misconfigured(Exception):
    """The process cannot start until the operator corrects something; the message names it and the remedy."""


class CannotListen(Misconfigured, OSError):
    """Another process has the address, this machine has no such address, or a descriptor is no socket."""


class JsonResponse(Response):
    """An answer that orjson serialises: NaN becomes null, dataclasses and datetimes are understood."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content, option=orjson.OPT_NON_STR_KEYS)


class Problem(HTTPException):
    """An error with a status, a cause for machines and a detail for people that names the remedy.

    Args: cause: a short word such as `group_unknown`; extensions: further members of the answer;
        retry_after_seconds: for 429 and 503.
    """

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        cause: str | None = None,
        retry_after_seconds: int | None = None,
        headers: Mapping[str, str] | None = None,
        extensions: Mapping[str, object] | None = None,
    ) -> None:
        retry = {} if retry_after_seconds is None else {"retry-after": str(retry_after_seconds)}
        super().__init__(status, detail, headers={**(headers or {}), **retry} or None)
        self.cause = cause
        self.extensions = dict(extensions or {})


def problem_response(
    status: int,
    detail: str | None = None,
    *,
    cause: str | None = None,
    headers: Mapping[str, str] | None = None,
    extensions: Mapping[str, object] | None = None,
) -> Response:
    """A problem details answer (`application/problem+json`)."""
    title = PLAIN_TITLES.get(status) or HTTPStatus(status).phrase
    body: dict[str, object] = {"type": "about:blank", "title": title, "status": status, "detail": detail or title}
    if cause is not None:
        body["cause"] = cause
    body.update(extensions or {})
    return JsonResponse(body, status, dict(headers or {}), media_type="application/problem+json")


async def on_http_exception(_request: Request, error: Exception) -> Response:
    """Answers a `Problem`, and the 404 and 405 of the framework."""
    assert isinstance(error, HTTPException)
    cause, extensions = (error.cause, error.extensions) if isinstance(error, Problem) else (None, None)
    return problem_response(error.status_code, error.detail, cause=cause, headers=error.headers, extensions=extensions)


def unexpected_response(_error: Exception) -> Response:
    """500 without a word about the inside; the log has the traceback under the same request id."""
    return problem_response(500, "an error of ours: it is logged under this answer's x-request-id", cause="internal")
