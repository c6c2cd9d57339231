"""Pools, engines with their weights, and the canaries that watch them."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import (
    ARRAY,
    BigInteger,
    ForeignKey,
    Identity,
    Index,
    Text,
    func,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from leyden.libs.contracts.states import (
    CanaryVerdict,
    EngineState,
)
from leyden.libs.store.tables.base import Base, Json, created, one_of


class Pool(Base):
    """Writer: controller. Engines that serve one model, and the runs that use them."""

    __tablename__ = "pools"
    name: Mapped[str] = mapped_column(primary_key=True, comment="Runs name it.")
    model_path: Mapped[str | None] = mapped_column(comment="Folder of the base model; null: the services' own setting.")
    context_length: Mapped[int | None] = mapped_column(comment="Tokens of a call; null: as many as the model allows.")
    adapters: Mapped[int | None] = mapped_column(
        comment="Runs that share the engines, each with a LoRA adapter; null: one run has them."
    )
    max_adapter_rank: Mapped[int | None] = mapped_column(
        comment="The largest LoRA rank that the engines take; null: any."
    )
    embeddings: Mapped[bool] = mapped_column(
        server_default="false", comment="Whether the engines embed, and get no weights of runs."
    )
    run_id: Mapped[str | None] = mapped_column(
        comment="The first of run_ids, for services of the version before; null without one."
    )
    run_ids: Mapped[list[str]] = mapped_column(
        ARRAY(Text), server_default="{}", comment="The runs that have the engines."
    )
    waiting: Mapped[list[str]] = mapped_column(
        ARRAY(Text), server_default="{}", comment="Ids of the runs that wait for the engines, in order."
    )
    updated_at: Mapped[datetime] = mapped_column(server_default=func.now(), comment="The last change.")


class Engine(Base):
    """Writer: controller. The status of an engine at the last poll."""

    __tablename__ = "engines"
    url: Mapped[str] = mapped_column(primary_key=True, comment="Its address, which is its name.")
    pool: Mapped[str] = mapped_column(server_default="default", comment="Its pool.")
    run_id: Mapped[str | None] = mapped_column(comment="The run of its weights; null before the first.")
    policy_version: Mapped[int | None] = mapped_column(comment="The version that it reported; null before the first.")
    state: Mapped[str] = mapped_column(comment="serving, updating, draining or unreachable.")
    detail: Mapped[str | None] = mapped_column(comment="Cause, for people.")
    updated_at: Mapped[datetime] = mapped_column(server_default=func.now(), comment="The time of the last poll.")
    silent_since: Mapped[datetime | None] = mapped_column(
        comment="Since when it serves no weights; null while it serves some."
    )
    __table_args__ = (one_of("state", EngineState),)


class EngineAdapter(Base):
    """Writer: controller. The policy version of a run that an engine serves beside others."""

    __tablename__ = "engine_adapters"
    url: Mapped[str] = mapped_column(
        ForeignKey("engines.url", ondelete="CASCADE"), primary_key=True, comment="The engine."
    )
    run_id: Mapped[str] = mapped_column(primary_key=True, comment="A run that shares it.")
    policy_version: Mapped[int] = mapped_column(comment="The version that new calls of the run get.")
    adapter: Mapped[str | None] = mapped_column(
        comment="The name of the adapter on the engine; null: the base model is the version."
    )


class CanaryAnswer(Base):
    """Writer: controller. The newest answer of an engine to the canary of a version of a run."""

    __tablename__ = "canary_answers"
    url: Mapped[str] = mapped_column(primary_key=True, comment="The engine.")
    run_id: Mapped[str] = mapped_column(
        ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True, comment="The run of the version."
    )
    policy_version: Mapped[int] = mapped_column(comment="The version that was delivered.")
    verdict: Mapped[str] = mapped_column(
        comment="equal; other: the engine serves something else; unanswered: it cannot be compared."
    )
    tokens: Mapped[int | None] = mapped_column(comment="Compared tokens; null without an answer, as the next ones.")
    gap: Mapped[float | None] = mapped_column(comment="Mean |trainer - engine| log-probability, nats.")
    largest: Mapped[float | None] = mapped_column(comment="The largest such difference.")
    gap_limit: Mapped[float | None] = mapped_column(comment="The mean above which the engine serves something else.")
    moved: Mapped[float | None] = mapped_column(
        comment="Share of the change since the version before that the engine made; null where nothing shows it."
    )
    detail: Mapped[str | None] = mapped_column(comment="Cause, for people; null where all is well.")
    answered_at: Mapped[datetime] = mapped_column(server_default=func.now(), comment="The time of the answer.")
    __table_args__ = (one_of("verdict", CanaryVerdict), Index(None, "run_id"))


class WeightSwap(Base):
    """Writer: controller. A delivery of a policy version to an engine that was paused for it."""

    __tablename__ = "weight_swaps"
    number: Mapped[int] = mapped_column(
        BigInteger, Identity(always=True), primary_key=True, comment="Grows with the order of deliveries."
    )
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), comment="The run of the version.")
    policy_version: Mapped[int] = mapped_column(comment="The version that was delivered.")
    url: Mapped[str] = mapped_column(comment="The engine.")
    seconds: Mapped[float] = mapped_column(comment="From pause to continue.")
    created_at: Mapped[datetime] = created()
    __table_args__ = (Index(None, "run_id", "policy_version"),)


class WeightTransfer(Base):
    """Writer: controller asks for it; the trainer writes how to join. A policy version on its way to one engine."""

    __tablename__ = "weight_transfers"
    engine_url: Mapped[str] = mapped_column(
        primary_key=True, comment="The engine; one version at a time is on its way to it."
    )
    run_id: Mapped[str] = mapped_column(
        ForeignKey("runs.id", ondelete="CASCADE"), comment="The run whose trainer sends."
    )
    policy_version: Mapped[int] = mapped_column(comment="The version to send.")
    group_name: Mapped[str] = mapped_column(comment="The name of the process group, new for each transfer.")
    world_size: Mapped[int] = mapped_column(
        comment="Processes of the group: the trainer, rank 0, and those of the engine."
    )
    sender: Mapped[Json | None] = mapped_column(
        JSONB(none_as_null=True),
        comment="Backend, address and port of the trainer, and the tensors in their order; null until it is ready to"
        " send.",
    )
    created_at: Mapped[datetime] = created()
    __table_args__ = (Index(None, "run_id"),)


class VersionCanary(Base):
    """Writer: trainer. The log-probabilities of a few fixed token sequences at a version, which engines are asked."""

    __tablename__ = "canaries"
    run_id: Mapped[str] = mapped_column(
        ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True, comment="The run that made the version."
    )
    version: Mapped[int] = mapped_column(primary_key=True, comment="Its number.")
    canary: Mapped[Json] = mapped_column(
        comment="{token_ids, logprobs, dtype, max_gap, rounds_updates}: libs/contracts/canary."
    )
    created_at: Mapped[datetime] = created()
