"""Errors between a client and the API.

LeydenError
├── Unreachable   nobody answers at the address, or the platform is not ready
├── Unauthorised  the token is missing, unknown or revoked
├── Forbidden     the token lacks a scope
├── NotFound      no such thing
├── Conflict      not in its present state; `problem.allowed_actions` tells what is
└── Refused       the request is wrong; `problem.errors` has each field with its remedy
"""

from __future__ import annotations

import httpx
from pydantic import ValidationError

from leyden.libs.contracts.api import Problem


class LeydenError(Exception):
    """Base; `problem` is the API's own account, None when it never answered."""

    def __init__(self, message: str, problem: Problem | None = None) -> None:
        super().__init__(message)
        self.problem = problem


class Unreachable(LeydenError):
    """Nobody answers."""


class Unauthorised(LeydenError):
    """No valid token."""


class Forbidden(LeydenError):
    """The token lacks a scope."""


class NotFound(LeydenError):
    """No such thing."""


class Conflict(LeydenError):
    """Not in its present state."""


class Refused(LeydenError):
    """The request is wrong."""


_BY_STATUS: dict[int, type[LeydenError]] = {
    400: Refused,
    401: Unauthorised,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    413: Refused,
    422: Refused,
    503: Unreachable,
}


def error_of(response: httpx.Response) -> LeydenError:
    """The exception for an answer that is not a success."""
    try:
        problem = Problem.model_validate_json(response.content)
    except ValidationError:
        problem = Problem(title=response.reason_phrase, status=response.status_code, detail=response.text[:500] or None)
    kind = _BY_STATUS.get(response.status_code, LeydenError)
    return kind(problem.detail or problem.title, problem)
