"""Errors as answers: RFC 9457 problem details, one shape for every service of ours that does not imitate another API.

Problem  raised anywhere below a route, becomes an answer with its status and cause
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response


class JsonResponse(Response):
    """An answer serialised by orjson: NaN becomes null, dataclasses and datetimes are understood."""

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
    title = HTTPStatus(status).phrase
    body: dict[str, object] = {"type": "about:blank", "title": title, "status": status, "detail": detail or title}
    if cause is not None:
        body["cause"] = cause
    body.update(extensions or {})
    return JsonResponse(body, status, dict(headers or {}), media_type="application/problem+json")


async def on_http_exception(_request: Request, error: Exception) -> Response:
    """Answers for `Problem` and for what the framework raises (404, 405)."""
    assert isinstance(error, HTTPException)
    cause = error.cause if isinstance(error, Problem) else None
    extensions = error.extensions if isinstance(error, Problem) else None
    return problem_response(error.status_code, error.detail, cause=cause, headers=error.headers, extensions=extensions)


async def on_validation_error(_request: Request, error: Exception) -> Response:
    """422 with one entry per wrong field: where it is and what is wrong; the value itself is not repeated."""
    # Only doors have it; it takes longer to load than all else here.
    from fastapi.exceptions import RequestValidationError

    assert isinstance(error, RequestValidationError)
    fields = [{"path": ".".join(map(str, entry["loc"])), "message": entry["msg"]} for entry in error.errors()]
    detail = "; ".join(f"{field['path']}: {field['message']}" for field in fields[:5])
    return problem_response(422, detail, cause="invalid", extensions={"errors": fields})


def unexpected_response(_error: Exception) -> Response:
    """500 that tells nothing of the inside; the log has the traceback under the same request id."""
    return problem_response(500, "an error of ours: it is logged under this answer's x-request-id", cause="internal")
