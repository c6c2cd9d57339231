"""Refusals of requests."""

from __future__ import annotations

from pydantic import Field

from leyden.libs.contracts.api.body import Body


class FieldProblem(Body):
    """One refused field of a request."""

    path: str
    """Dotted path in the body or the name of the parameter, such as `algorithm.clip_high`; `line 3` for an upload."""
    message: str
    """The error and its remedy."""


class Problem(Body):
    """RFC 9457 problem details."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str | None = None
    instance: str | None = None
    errors: list[FieldProblem] = Field(default_factory=list)
    allowed_actions: list[str] | None = None
    """For a 409: the actions that the resource's present state allows."""
