"""Bearer tokens and idempotency keys of the REST API."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from sqlalchemy import ColumnElement, and_, func, or_, select, text

from leyden.libs.contracts.api.body import Page
from leyden.libs.contracts.api.tokens import ApiScope, AuditEntry, Token
from leyden.libs.contracts.conversation import Json
from leyden.libs.store import tables
from leyden.libs.store.database import ReadSession, Session
from leyden.libs.store.read.paging import decode_cursor, page

_FORGET_ANSWERS = text("""
    DELETE FROM idempotency_keys WHERE (token_id, key) IN (
        SELECT token_id, key FROM idempotency_keys WHERE created_at < now() - CAST(:age AS interval)
        ORDER BY created_at LIMIT :limit)
    RETURNING 1
""")


class KeyReused(ValueError):
    """An idempotency key came again with another request."""


@dataclass(frozen=True)
class StoredAnswer:
    """The answer to the first request with a key. run_id: the run that it is of, None without one"""

    status_code: int
    body: Json
    run_id: str | None = None


async def find_token(session: ReadSession, secret: str) -> Token | None:
    """The token with this secret, unless it has expired or was revoked."""
    table = tables.ApiToken
    row = await session.scalar(select(table).where(table.token_sha256 == _digest(secret), *_lives(table)))
    return None if row is None else Token.model_validate(row, from_attributes=True)


async def has_secret(session: ReadSession, token_id: str, secret: str) -> bool:
    """Whether the token with this id has this secret; it may have ended."""
    table = tables.ApiToken
    found = await session.scalar(select(table.id).where(table.id == token_id, table.token_sha256 == _digest(secret)))
    return found is not None


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


def _lives(table: type[tables.ApiToken]) -> tuple[ColumnElement[bool], ...]:
    ends = (table.revoked_at, table.expires_at)
    return tuple(or_(end.is_(None), end > func.now()) for end in ends)


async def add_token(
    session: Session,
    token_id: str,
    name: str,
    secret: str,
    scopes: list[ApiScope],
    expires_at: datetime | None = None,
) -> Token:
    """Stores a new token; only its hash."""
    row = tables.ApiToken(
        id=token_id,
        name=name,
        token_sha256=_digest(secret),
        scopes=[str(scope) for scope in scopes],
        expires_at=expires_at,
    )
    session.add(row)
    await session.flush()
    await session.refresh(row)
    return Token.model_validate(row, from_attributes=True)


async def list_tokens(session: ReadSession) -> list[Token]:
    """The newest 1000 tokens with their last changes, those that live before others."""
    token, entry = tables.ApiToken, tables.AuditEntry
    lives = and_(*_lives(token))
    # The index begins with the name.
    own = (entry.token_name == token.name, entry.token_id == token.id)
    changed = select(func.max(entry.created_at)).where(*own).correlate(token).scalar_subquery()
    rows = await session.execute(select(token, changed).order_by(lives.desc(), token.created_at.desc()).limit(1000))
    return [Token.model_validate(row, from_attributes=True).model_copy(update={"changed_at": at}) for row, at in rows]


async def revoke_token(session: Session, token_id: str) -> bool | None:
    """Whether this revoked the token: a repeat does not. None when no token has this id."""
    token = await session.get(tables.ApiToken, token_id, with_for_update=True)
    if token is None:
        return None
    is_new = token.revoked_at is None or token.revoked_at > datetime.now(UTC)
    if is_new:
        token.revoked_at = func.now()
    return is_new


async def rotate_token(
    session: Session, token_id: str, new_id: str, secret: str, grace: timedelta, *, lives_anew: bool = True
) -> Token | None:
    """Stores a token with the name, the scopes and the life of another one, which is revoked after the grace.

    Args: lives_anew: the life begins again; or the new token ends when the old one would have
    Returns: None when no living token has this id, or it was rotated before
    """
    table = tables.ApiToken
    current = (*_lives(table), table.revoked_at.is_(None))
    old = await session.scalar(select(table).where(table.id == token_id, *current).with_for_update())
    if old is None:
        return None
    now = datetime.now(UTC)
    end = old.expires_at
    if end is not None and lives_anew:
        end = now + (end - old.created_at)
    old.revoked_at = now + grace
    return await add_token(session, new_id, old.name, secret, [ApiScope(scope) for scope in old.scopes], end)


async def add_audit_entry(
    session: Session, token_id: str, token_name: str, action: str, subject: str | None, detail: Json
) -> None:
    """Records a change in the transaction that makes it."""
    session.add(
        tables.AuditEntry(token_id=token_id, token_name=token_name, action=action, subject=subject, detail=detail)
    )
    await session.flush()


async def list_audit(
    session: ReadSession,
    *,
    token: str | None,
    action: str | None,
    subject: str | None,
    cursor: str | None,
    limit: int,
) -> Page[AuditEntry]:
    """The changes, newest first. Args: token: its id or its name then"""
    table = tables.AuditEntry
    query = select(table).order_by(table.id.desc()).limit(limit + 1)
    if token is not None:
        query = query.where(or_(table.token_id == token, table.token_name == token))
    if action is not None:
        query = query.where(table.action == action)
    if subject is not None:
        query = query.where(table.subject == subject)
    if (after := decode_cursor(cursor, "audit", int)) is not None:
        query = query.where(table.id < after[0])
    rows = list(await session.scalars(query))
    return page("audit", rows, limit, lambda row: AuditEntry.model_validate(row, from_attributes=True), _id_of)


def _id_of(row: tables.AuditEntry) -> tuple[int]:
    return (row.id,)


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
    return StoredAnswer(row.status_code, row.body, row.run_id)


async def add_answer(session: Session, token_id: str, key: str, request_sha256: bytes, answer: StoredAnswer) -> None:
    """Stores the answer in the transaction that made it."""
    session.add(
        tables.IdempotencyKey(
            token_id=token_id,
            key=key,
            request_sha256=request_sha256,
            status_code=answer.status_code,
            body=answer.body,
            run_id=answer.run_id,
        )
    )
    await session.flush()


async def forget_answers(session: Session, age: timedelta, limit: int) -> int:
    """Deletes at most `limit` answers that are older; returns their number."""
    deleted = await session.scalars(_FORGET_ANSWERS, {"age": age, "limit": limit})
    return len(deleted.all())
