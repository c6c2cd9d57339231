"""Errors of the client.

LeydenError
├── Unreachable   the API does not answer, or is not ready
├── Unauthorised  the token is missing, unknown or revoked
├── Forbidden     the token lacks a scope
├── NotFound      the resource does not exist
├── Conflict      the resource's state does not allow the action; `problem.allowed_actions` lists the allowed ones
└── Refused       the request is invalid; `problem.errors` has each field with its remedy
"""

from __future__ import annotations

import httpx
from pydantic import ValidationError

from leyden.libs.contracts.api.problems import Problem


class LeydenError(Exception):
    """Base; `problem` is the API's error body, None when it did not answer."""

    def __init__(self, message: str, problem: Problem | None = None) -> None:
        super().__init__(message)
        self.problem = problem


class Unreachable(LeydenError):
    """The API does not answer, or is not ready."""


class Unauthorised(LeydenError):
    """The token is missing, unknown or revoked."""


class Forbidden(LeydenError):
    """The token lacks a scope."""


class NotFound(LeydenError):
    """The resource does not exist."""


class Conflict(LeydenError):
    """The resource's state does not allow the action."""


class Refused(LeydenError):
    """The request is invalid."""


_BY_STATUS: dict[int, type[LeydenError]] = {
    400: Refused,
    401: Unauthorised,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    413: Refused,
    422: Refused,
    # By a proxy in front of an API that is away.
    502: Unreachable,
    503: Unreachable,
    504: Unreachable,
}


def error_of(response: httpx.Response) -> LeydenError:
    """Returns the exception for an error answer."""
    try:
        problem = Problem.model_validate_json(response.content)
    except ValidationError:
        status, said = response.status_code, response.text[:500]
        detail = f"{response.url} answers {status}, not as the API does; correct --url or LEYDEN_URL. It says: {said}"
        problem = Problem(title=response.reason_phrase, status=status, detail=detail)
    kind = _BY_STATUS.get(response.status_code, LeydenError)
    return kind(problem.detail or problem.title, problem)
