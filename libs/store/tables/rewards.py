"""Rewards by telemetry, people and graders, and the sum that a rollout earned."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    func,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from leyden.libs.contracts.states import (
    ComponentState,
)
from leyden.libs.store.tables.base import Base, Json, created, one_of


class ExternalReward(Base):
    """Writer: api. A reward of a person or an outside system. A repeat with the same key changes nothing."""

    __tablename__ = "external_rewards"
    rollout_id: Mapped[str] = mapped_column(
        ForeignKey("rollouts.id"), primary_key=True, comment="The rewarded rollout."
    )
    key: Mapped[str] = mapped_column(primary_key=True, comment="Idempotency key of the sender.")
    name: Mapped[str] = mapped_column(comment="The rewarded quality.")
    value: Mapped[float] = mapped_column(comment="Finite.")
    call_id: Mapped[str | None] = mapped_column(comment="The rewarded model call; null for the rollout.")
    attempt: Mapped[int | None] = mapped_column(
        comment="The attempt that made the call: the reward counts if that attempt does. Null for the rollout."
    )
    comment: Mapped[str | None] = mapped_column(comment="A note of the sender.")
    token_name: Mapped[str | None] = mapped_column(
        comment="The name of the sender's token; null in rows of earlier versions."
    )
    created_at: Mapped[datetime] = created()
    __table_args__ = (CheckConstraint("value > '-Infinity' AND value < 'Infinity'", name="value_finite"),)


class Reward(Base):
    """Writer: collector. A reward from the attempt's telemetry or its reward endpoint. A repeat changes nothing, except
    that one of telemetry names the answer or tool call that the first lacked."""

    __tablename__ = "rewards"
    rollout_id: Mapped[str] = mapped_column(primary_key=True, comment="From the path that the agent called.")
    attempt: Mapped[int] = mapped_column(primary_key=True, comment="From the path that the agent called.")
    key: Mapped[str] = mapped_column(
        primary_key=True, comment="The key of the sender, or trace:span:position for telemetry."
    )
    run_id: Mapped[str] = mapped_column(comment="Run of the rollout.")
    source: Mapped[str] = mapped_column(comment="endpoint or telemetry.")
    name: Mapped[str] = mapped_column(comment="The rewarded quality.")
    value: Mapped[float] = mapped_column(comment="Finite.")
    response_id: Mapped[str | None] = mapped_column(comment="The rewarded model answer; null for the rollout.")
    tool_call_id: Mapped[str | None] = mapped_column(
        comment="The rewarded tool call; null for a model call or the rollout."
    )
    created_at: Mapped[datetime] = created()
    __table_args__ = (CheckConstraint("value > '-Infinity' AND value < 'Infinity'", name="value_finite"),)


class Feedback(Base):
    """Writer: api and collector. A value that a person or another program gave to a component of a rollout's reward."""

    __tablename__ = "feedback"
    rollout_id: Mapped[str] = mapped_column(ForeignKey("rollouts.id"), primary_key=True, comment="The rollout.")
    key: Mapped[str] = mapped_column(primary_key=True, comment="Idempotency key of the sender.")
    attempt: Mapped[int] = mapped_column(comment="The last attempt then: the value counts if that attempt is graded.")
    run_id: Mapped[str] = mapped_column(comment="Run of the rollout.")
    component: Mapped[str] = mapped_column(comment="Its name in reward.components.")
    value: Mapped[float] = mapped_column(comment="Finite.")
    comment: Mapped[str | None] = mapped_column(comment="A note of the sender.")
    token_name: Mapped[str | None] = mapped_column(comment="The name of the bearer token that gave it.")
    created_at: Mapped[datetime] = mapped_column(
        server_default=func.clock_timestamp(), comment="The order in which the values of a rollout came."
    )
    __table_args__ = (
        CheckConstraint("value > '-Infinity' AND value < 'Infinity'", name="value_finite"),
        Index(None, "run_id"),
    )


class Grading(Base):
    """Writer: grader. The grading of an attempt that is to count: a lease until it is settled, then its total."""

    __tablename__ = "gradings"
    rollout_id: Mapped[str] = mapped_column(ForeignKey("rollouts.id"), primary_key=True, comment="The rollout.")
    attempt: Mapped[int] = mapped_column(primary_key=True, comment="The graded attempt.")
    run_id: Mapped[str] = mapped_column(comment="Run of the rollout.")
    tries: Mapped[int] = mapped_column(comment="The number of leases so far.")
    lease_id: Mapped[str] = mapped_column(unique=True, comment="Fences the lease: settling must name it.")
    owner: Mapped[str] = mapped_column(comment="The grader with the lease.")
    lease_expires_at: Mapped[datetime] = mapped_column(
        comment="Another grader may lease it from then on: the end of the lease, or of the pause after a failed try."
    )
    settled_at: Mapped[datetime | None] = mapped_column(comment="Null while it is not graded.")
    total: Mapped[float | None] = mapped_column(
        comment="The reward of the rollout by its components; null until settled, and where it has none."
    )
    reason: Mapped[str | None] = mapped_column(comment="Why a settled one has no total: the rollout is excluded.")
    created_at: Mapped[datetime] = created()
    __table_args__ = (
        CheckConstraint("total > '-Infinity' AND total < 'Infinity'", name="total_finite"),
        CheckConstraint("settled_at IS NULL OR (total IS NULL) = (reason IS NOT NULL)", name="settled_has_total"),
        Index(None, "run_id"),
    )


class JudgeUsage(Base):
    """Writer: grader. Tokens and money that a run's judges have used, counted after each grading of attempts. Those of
    a grader that died meanwhile are missing."""

    __tablename__ = "judge_usage"
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True, comment="The run.")
    tokens: Mapped[int] = mapped_column(BigInteger, comment="Of questions and answers, without those of trials.")
    cost: Mapped[float] = mapped_column(comment="Of the tokens of providers with a price, in the prices' currency.")
    unpriced_tokens: Mapped[int] = mapped_column(BigInteger, comment="The tokens of providers without a price.")


class Regrade(Base):
    """Writer: api. A later grading of a rollout that was graded already: a revision, whose components are rows of
    rollout_rewards. The newest one counts for readers of components and of evaluations."""

    __tablename__ = "regrades"
    rollout_id: Mapped[str] = mapped_column(primary_key=True, comment="The rollout.")
    attempt: Mapped[int] = mapped_column(primary_key=True, comment="The graded attempt.")
    revision: Mapped[int] = mapped_column(primary_key=True, comment="From 2 on; 1 is that of gradings.")
    run_id: Mapped[str] = mapped_column(comment="Run of the rollout.")
    reward: Mapped[Json] = mapped_column(comment="The section reward that graded it.")
    total: Mapped[float] = mapped_column(comment="The reward by these components.")
    token_name: Mapped[str] = mapped_column(comment="The name of the bearer token that asked for it.")
    created_at: Mapped[datetime] = created()
    __table_args__ = (
        CheckConstraint("revision > 1", name="revision_above_first"),
        CheckConstraint("total > '-Infinity' AND total < 'Infinity'", name="total_finite"),
        ForeignKeyConstraint(["rollout_id", "attempt"], ["gradings.rollout_id", "gradings.attempt"]),
        Index(None, "run_id"),
    )


class GradingTrial(Base):
    """Writer: api and grader. A stored attempt that somebody grades with other components: the API asks, waits for the
    answer of the grader that has the lease, and removes the row."""

    __tablename__ = "grading_trials"
    id: Mapped[str] = mapped_column(primary_key=True, comment="Its random id.")
    rollout_id: Mapped[str] = mapped_column(comment="The rollout whose attempt is graded.")
    reward: Mapped[Json] = mapped_column(comment="The section `reward` of a document.")
    against: Mapped[str | None] = mapped_column(
        comment="The rollout with which judges compare it, instead of siblings."
    )
    expires_at: Mapped[datetime] = mapped_column(comment="Nobody waits for the answer from then on.")
    lease_id: Mapped[str | None] = mapped_column(unique=True, comment="Fences off a grader that lost its lease.")
    lease_expires_at: Mapped[datetime | None] = mapped_column(comment="Another grader may take it from then on.")
    tries: Mapped[int] = mapped_column(server_default="0", comment="Its leases so far.")
    answer: Mapped[Json | None] = mapped_column(
        JSONB(none_as_null=True), comment="The total and the components, as the API shows them."
    )
    created_at: Mapped[datetime] = created()


class RolloutReward(Base):
    """Writer: grader, and api for regrades. A component of a rollout's reward, in one transaction with the total of its
    grading or regrade."""

    __tablename__ = "rollout_rewards"
    rollout_id: Mapped[str] = mapped_column(primary_key=True, comment="The rollout.")
    attempt: Mapped[int] = mapped_column(primary_key=True, comment="The graded attempt.")
    component: Mapped[str] = mapped_column(primary_key=True, comment="Its name in reward.components.")
    revision: Mapped[int] = mapped_column(primary_key=True, server_default="1", comment="Grows with every regrade.")
    run_id: Mapped[str] = mapped_column(comment="Run of the rollout.")
    position: Mapped[int] = mapped_column(comment="Its place in reward.components, from 0.")
    state: Mapped[str] = mapped_column(
        comment="scored, not_applicable (its task has no reference) or failed (no try gave a number)."
    )
    weight: Mapped[float] = mapped_column(comment="Its factor in the total.")
    value: Mapped[float | None] = mapped_column(comment="Before the weight; null unless scored.")
    contribution: Mapped[float | None] = mapped_column(
        comment="Its part in the total before gates and clip; null for a metric, and where it has none."
    )
    extracted: Mapped[str | None] = mapped_column(comment="The answer that the grader found in the output.")
    explanation: Mapped[str] = mapped_column(comment="For people.")
    source: Mapped[str] = mapped_column(comment="agent, or the type of the grader.")
    duration_seconds: Mapped[float] = mapped_column(comment="The time that the grader took.")
    created_at: Mapped[datetime] = created()
    __table_args__ = (
        one_of("state", ComponentState),
        CheckConstraint("value > '-Infinity' AND value < 'Infinity'", name="value_finite"),
        CheckConstraint("(value IS NOT NULL) = (state = 'scored')", name="scored_has_value"),
        ForeignKeyConstraint(["rollout_id", "attempt"], ["gradings.rollout_id", "gradings.attempt"]),
        Index(None, "run_id"),
    )
