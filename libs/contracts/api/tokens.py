"""Bearer tokens, and the changes that they asked for."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, Field

from leyden.libs.contracts.api.body import Body, RequestBody
from leyden.libs.contracts.conversation import Json


class ApiScope(StrEnum):
    """Rights of a bearer token: `admin` includes all, `write` the two after it."""

    ADMIN = "admin"
    WRITE = "write"
    READ = "read"
    ATTEMPTS = "attempts"
    """To lease, renew and end attempts of external agents, and nothing else."""


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("use characters that can be printed: no line breaks, control characters or marks of direction")
    return text


class TokenRequest(RequestBody):
    """Requests a bearer token."""

    name: Annotated[str, AfterValidator(_printable)] = Field(min_length=1, max_length=200)
    """A name for people, on one line."""
    scopes: list[Annotated[ApiScope, Field(strict=False)]] = Field(min_length=1, max_length=4)
    expires_seconds: int | None = Field(default=None, ge=60, le=10 * 366 * 86400)
    """The token's life; null: it has no end."""


class RotateRequest(RequestBody):
    """Requests a new secret for a token of the same name, scopes and life."""

    grace_seconds: int = Field(default=0, ge=0, le=30 * 86400)
    """So long the old secret works beside the new one."""


class Token(Body):
    """A bearer token without its secret."""

    id: str
    name: str
    scopes: list[ApiScope]
    created_at: datetime
    revoked_at: datetime | None = None
    """The API refuses the token from then on; ahead while a rotated token has its grace."""
    expires_at: datetime | None = None
    """The API refuses the token from then on; null: it has no end."""
    changed_at: datetime | None = None
    """The last change that it asked for, in lists alone; null: none. Reads are recorded nowhere."""


class IssuedToken(Token):
    """A new bearer token; only this answer contains its secret."""

    token: str


class SessionRequest(RequestBody):
    """Signs a browser in."""

    token: str = Field(min_length=1, max_length=500)
    once: bool = False
    """Whether the token ends, so that a link with it signs in once; the cookie holds its successor (see rotate)."""


class Session(Body):
    """The rights of a browser that has signed in; its cookie is in the headers."""

    name: str
    """The token's name."""
    scopes: list[ApiScope]
    expires_at: datetime | None


class AuditEntry(Body):
    """A change that a bearer token asked for."""

    id: int
    created_at: datetime
    token_id: str
    """`first-admin` for the first administrator's token."""
    token_name: str
    """The token's name then."""
    action: str
    """The operation of the API, such as `create_reward`."""
    subject: str | None
    """The id or name in the address, or the id of the new thing."""
    detail: Json
    """Further facts of the change: keys, names, values."""
