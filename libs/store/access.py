"""Bearer tokens and idempotency keys of the REST API."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from sqlalchemy import func, select, text, update

from leyden.libs.contracts.api import ApiScope, Token
from leyden.libs.contracts.conversation import Json
from leyden.libs.store import tables
from leyden.libs.store.database import ReadSession, Session


class KeyReused(ValueError):
    """An idempotency key came again with another request."""


@dataclass(frozen=True)
class StoredAnswer:
    """The answer to the first request with a key."""

    status_code: int
    body: Json


async def find_token(session: ReadSession, secret: str) -> Token | None:
    """The live token with this secret."""
    digest = hashlib.sha256(secret.encode()).digest()
    table = tables.ApiToken
    row = await session.scalar(select(table).where(table.token_sha256 == digest, table.revoked_at.is_(None)))
    return None if row is None else Token.model_validate(row, from_attributes=True)


async def add_token(session: Session, token_id: str, name: str, secret: str, scopes: list[ApiScope]) -> Token:
    """Stores a new token; only its hash."""
    digest = hashlib.sha256(secret.encode()).digest()
    row = tables.ApiToken(id=token_id, name=name, token_sha256=digest, scopes=[str(scope) for scope in scopes])
    session.add(row)
    await session.flush()
    await session.refresh(row)
    return Token.model_validate(row, from_attributes=True)


async def list_tokens(session: ReadSession) -> list[Token]:
    """Every token, newest first; they are few."""
    rows = await session.scalars(select(tables.ApiToken).order_by(tables.ApiToken.created_at.desc()).limit(1000))
    return [Token.model_validate(row, from_attributes=True) for row in rows]


async def revoke_token(session: Session, token_id: str) -> bool:
    """False when no token has this id. Revoking again changes nothing."""
    table = tables.ApiToken
    result = await session.execute(
        update(table)
        .where(table.id == token_id)
        .values(revoked_at=func.coalesce(table.revoked_at, func.now()))
        .returning(table.id)
    )
    return result.first() is not None


async def recall_answer(session: Session, token_id: str, key: str, request_sha256: bytes) -> StoredAnswer | None:
    """The stored answer for a key, or None for a new key, which then belongs to this transaction alone.

    Raises: KeyReused: the key was used with another request
    """
    # An equal request in flight holds this lock until its answer is stored.
    lock = text("SELECT pg_advisory_xact_lock(hashtextextended('idempotency:' || :token || ':' || :key, 0))")
    await session.execute(lock, {"token": token_id, "key": key})
    row = await session.get(tables.IdempotencyKey, (token_id, key))
    if row is None:
        return None
    if row.request_sha256 != request_sha256:
        raise KeyReused(f"Idempotency-Key {key!r} was used with another request: send a new key")
    return StoredAnswer(row.status_code, row.body)


async def add_answer(session: Session, token_id: str, key: str, request_sha256: bytes, answer: StoredAnswer) -> None:
    """Stores the answer in the transaction that made it."""
    session.add(
        tables.IdempotencyKey(
            token_id=token_id,
            key=key,
            request_sha256=request_sha256,
            status_code=answer.status_code,
            body=answer.body,
        )
    )
    await session.flush()
