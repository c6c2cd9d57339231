"""Tokens of the API, what they did, and the processes that serve."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import (
    BigInteger,
    ForeignKey,
    Identity,
    Index,
    func,
)
from sqlalchemy.orm import Mapped, mapped_column

from leyden.libs.store.tables.base import Base, Json, created


class ApiToken(Base):
    """Writer: api. A bearer token of the REST API; only its hash is stored."""

    __tablename__ = "api_tokens"
    id: Mapped[str] = mapped_column(primary_key=True, comment="token-<random>; never secret.")
    name: Mapped[str] = mapped_column(comment="A name for people.")
    token_sha256: Mapped[bytes] = mapped_column(unique=True, comment="The API shows the token itself once.")
    scopes: Mapped[list[str]] = mapped_column(comment="Subset of admin, write, read, attempts.")
    created_at: Mapped[datetime] = created()
    revoked_at: Mapped[datetime | None] = mapped_column(
        comment="The API refuses the token from then on; ahead while a rotated token has its grace."
    )
    expires_at: Mapped[datetime | None] = mapped_column(
        comment="The API refuses the token from then on; null for a token without an end."
    )


class AuditEntry(Base):
    """Writer: api. A change that a bearer token asked for, in the transaction that made it."""

    __tablename__ = "audit_entries"
    id: Mapped[int] = mapped_column(
        BigInteger, Identity(always=True), primary_key=True, comment="Grows with the order of the changes."
    )
    token_id: Mapped[str] = mapped_column(comment="The token of the request; first-admin for the first administrator.")
    token_name: Mapped[str] = mapped_column(comment="Its name then.")
    action: Mapped[str] = mapped_column(comment="The operation of the API, such as create_run.")
    subject: Mapped[str | None] = mapped_column(comment="The id or name in the address, or the id of the new thing.")
    detail: Mapped[Json] = mapped_column(comment="Further facts of the change: keys, names, values.")
    created_at: Mapped[datetime] = created()
    __table_args__ = (
        Index("ix_audit_entries_subject", "subject", "id"),
        Index("ix_audit_entries_token_name", "token_name", "id"),
    )


class IdempotencyKey(Base):
    """Writer: api. The answer to a create request: a repeat gets it again and makes no second row. The controller
    deletes it after a week."""

    __tablename__ = "idempotency_keys"
    token_id: Mapped[str] = mapped_column(
        primary_key=True, comment="The token of the request: keys of different tokens never meet."
    )
    key: Mapped[str] = mapped_column(primary_key=True, comment="The Idempotency-Key header.")
    request_sha256: Mapped[bytes] = mapped_column(
        comment="Digest of method, path and body: the API refuses the key with another request."
    )
    status_code: Mapped[int] = mapped_column(comment="Status of the answer to the first request.")
    body: Mapped[Json] = mapped_column(comment="The answer to the first request.")
    run_id: Mapped[str | None] = mapped_column(
        comment="The run that the answer is of, which takes the row along when it is deleted; null for datasets, tokens"
        " and rows of an earlier version."
    )
    created_at: Mapped[datetime] = created()
    __table_args__ = (Index(None, "run_id"), Index(None, "created_at"))


class WebhookEvent(Base):
    """Writer: controller. An event of a run for the operator's webhook, in the transaction that raises its alarm or
    judges its end. It is delivered at least once, or given up after many tries."""

    __tablename__ = "webhook_events"
    id: Mapped[str] = mapped_column(
        primary_key=True, comment="<run>.completed, <run>.failed, <run>.alarm.<number>, and with .ended its end."
    )
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), comment="The run.")
    event: Mapped[str] = mapped_column(comment="completed, failed, stalled, alarm or alarm_ended.")
    body: Mapped[Json] = mapped_column(comment="The JSON that is sent.")
    tries: Mapped[int] = mapped_column(server_default="0", comment="Deliveries that failed.")
    due_at: Mapped[datetime | None] = mapped_column(
        server_default=func.now(), comment="The next delivery; null once it is delivered or given up."
    )
    delivered_at: Mapped[datetime | None] = mapped_column(comment="The time at which the receiver accepted it.")
    error: Mapped[str | None] = mapped_column(comment="The cause of the last failure.")
    created_at: Mapped[datetime] = created()
    __table_args__ = (
        Index(None, "run_id"),
        Index("ix_webhook_events_due", "due_at", postgresql_where="due_at IS NOT NULL"),
    )


class Gateway(Base):
    """Writer: gateway. A gateway process and its last sign of life."""

    __tablename__ = "gateways"
    name: Mapped[str] = mapped_column(primary_key=True, comment="Host, process id and a random word.")
    seen_at: Mapped[datetime] = mapped_column(comment="By now it had written every request that had waited.")


class StateTransition(Base):
    """Writer: migrations. The transitions of states that the triggers allow; they refuse every other change."""

    __tablename__ = "state_transitions"
    entity: Mapped[str] = mapped_column(primary_key=True, comment="run, group, rollout or attempt.")
    from_state: Mapped[str] = mapped_column(primary_key=True, comment="A state the entity may leave.")
    to_state: Mapped[str] = mapped_column(primary_key=True, comment="A state that may follow it.")
