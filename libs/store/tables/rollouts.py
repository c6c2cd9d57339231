"""Groups, their rollouts, and the attempts of agents with what they leave behind."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    UniqueConstraint,
    func,
)
from sqlalchemy.orm import Mapped, mapped_column

from leyden.libs.contracts.states import (
    ATTEMPT_TRANSITIONS,
    GROUP_TRANSITIONS,
    ROLLOUT_TRANSITIONS,
    AttemptState,
    GroupState,
    OutcomeKind,
    RolloutState,
)
from leyden.libs.store.tables.base import Base, Json, created, one_of, transitions


class Group(Base):
    """Writer: controller. The siblings of one task: the unit of a baseline."""

    __tablename__ = "groups"
    id: Mapped[str] = mapped_column(primary_key=True, comment="<run or evaluation>.<number>")
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), comment="The run of the group.")
    evaluation_id: Mapped[str | None] = mapped_column(ForeignKey("evaluations.id"), comment="Null for training.")
    number: Mapped[int] = mapped_column(comment="From 0 within the run or the evaluation.")
    dataset_id: Mapped[str] = mapped_column(comment="Dataset of its task.")
    task_number: Mapped[int] = mapped_column(comment="Its task within the dataset.")
    size: Mapped[int] = mapped_column(comment="Siblings.")
    admitted_version: Mapped[int] = mapped_column(comment="The policy version that engines served at the admission.")
    replaces: Mapped[str | None] = mapped_column(
        comment="The lost group whose task it samples again; null for a task whose turn it was."
    )
    agent: Mapped[str | None] = mapped_column(
        comment="The one of the run's agents that plays it, by name; null for the agent of a run that has one."
    )
    runner_type: Mapped[str | None] = mapped_column(
        comment="runner.type of its agent; null for that of the run, as in groups of an earlier version."
    )
    state: Mapped[str] = mapped_column(default=GroupState.OPEN, comment=transitions(GROUP_TRANSITIONS))
    created_at: Mapped[datetime] = created()
    finished_at: Mapped[datetime | None] = mapped_column(comment="The time of completion or cancellation.")
    __table_args__ = (
        one_of("state", GroupState),
        Index("ix_groups_run_open", "run_id", postgresql_where="state = 'open'"),
        Index("ix_groups_training", "run_id", "number", postgresql_where="evaluation_id IS NULL"),
        Index("ix_groups_complete", "finished_at", postgresql_where="state = 'complete' AND evaluation_id IS NULL"),
        Index("ix_groups_replaces", "run_id", "replaces", unique=True, postgresql_where="replaces IS NOT NULL"),
        Index("ix_groups_cancelled", "run_id", postgresql_where="state = 'cancelled' AND evaluation_id IS NULL"),
        Index(None, "run_id", "created_at"),
        UniqueConstraint("run_id", "evaluation_id", "number", postgresql_nulls_not_distinct=True),
    )


class Rollout(Base):
    """Writer: controller. One sibling; its executions are attempts."""

    __tablename__ = "rollouts"
    id: Mapped[str] = mapped_column(primary_key=True, comment="<group>.<sibling>")
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), comment="The run of the group.")
    group_id: Mapped[str] = mapped_column(ForeignKey("groups.id"), comment="Its group.")
    sibling: Mapped[int] = mapped_column(comment="From 0 within the group.")
    greedy: Mapped[bool] = mapped_column(
        server_default="false", comment="Decoded greedily: the baseline of its siblings, never trained."
    )
    rerolls_of: Mapped[str | None] = mapped_column(
        comment="The rollout of its group whose first calls it repeats from the record, as a baseline; null: a sibling."
    )
    from_call: Mapped[int | None] = mapped_column(
        comment="The first call, from 0, that a re-roll samples anew; null for a sibling."
    )
    state: Mapped[str] = mapped_column(default=RolloutState.QUEUED, comment=transitions(ROLLOUT_TRANSITIONS))
    attempt: Mapped[int | None] = mapped_column(comment="The counted attempt; null until finished.")
    reward: Mapped[float | None] = mapped_column(
        comment="The outcome's reward; null unless finished. A failure's may follow when its group is complete."
    )
    reason: Mapped[str | None] = mapped_column(comment="Outcome kind, or the cause of an exclusion or cancellation.")
    excused_attempt: Mapped[int] = mapped_column(
        server_default="0",
        comment="The last attempt that ended by a failure of the platform: the rollout may run again.",
    )
    due_at: Mapped[datetime] = mapped_column(
        server_default=func.now(), comment="The next attempt may begin then: the controller lets a failed one rest."
    )
    grading_attempt: Mapped[int | None] = mapped_column(
        comment="The last attempt that is to be graded before it counts; null where its run has no components."
    )
    trace_parent: Mapped[str | None] = mapped_column(comment="W3C trace context of the admission.")
    created_at: Mapped[datetime] = created()
    finished_at: Mapped[datetime | None] = mapped_column(comment="The time of the end.")
    __table_args__ = (
        one_of("state", RolloutState),
        UniqueConstraint("group_id", "sibling"),
        Index("ix_rollouts_queued", "run_id", "created_at", postgresql_where="state = 'queued'"),
        Index(
            "ix_rollouts_grading",
            "created_at",
            postgresql_where="state = 'queued' AND grading_attempt > excused_attempt",
        ),
        Index("ix_rollouts_uncounted", "run_id", postgresql_where="state IN ('excluded', 'cancelled')"),
        Index(None, "run_id", "created_at", "id"),
    )


class Attempt(Base):
    """Writer: runner; the controller expires overdue leases; both through libs/queue. The api, for external agents.

    One execution of a rollout, which is also its lease, fenced by `lease_id`.
    """

    __tablename__ = "attempts"
    rollout_id: Mapped[str] = mapped_column(
        ForeignKey("rollouts.id"), primary_key=True, comment="The executed rollout."
    )
    number: Mapped[int] = mapped_column(primary_key=True, comment="From 1.")
    run_id: Mapped[str] = mapped_column(comment="Run of the rollout.")
    state: Mapped[str] = mapped_column(default=AttemptState.LEASED, comment=transitions(ATTEMPT_TRANSITIONS))
    lease_id: Mapped[str] = mapped_column(unique=True, comment="The fence: settling and heartbeats name it.")
    owner: Mapped[str] = mapped_column(comment="The runner process with the lease, or the client of an external agent.")
    lease_expires_at: Mapped[datetime] = mapped_column(
        comment="Heartbeats extend it; after it the controller may expire the attempt."
    )
    created_at: Mapped[datetime] = created()
    started_at: Mapped[datetime | None] = mapped_column(comment="The start of the agent.")
    finished_at: Mapped[datetime | None] = mapped_column(comment="The time of the settlement or expiry.")
    __table_args__ = (
        one_of("state", AttemptState),
        # One live attempt per rollout: the second insert of a race fails here.
        Index("uq_attempts_live", "rollout_id", unique=True, postgresql_where="state IN ('leased', 'running')"),
        Index("ix_attempts_expiry", "lease_expires_at", postgresql_where="state IN ('leased', 'running')"),
    )


class Outcome(Base):
    """Writer: runner, in the transaction that settles the attempt; the controller empties the texts of a pruned run.
    The api, for external agents.
    """

    __tablename__ = "outcomes"
    rollout_id: Mapped[str] = mapped_column(primary_key=True, comment="Rollout of the attempt.")
    attempt: Mapped[int] = mapped_column(primary_key=True, comment="Number of the attempt.")
    run_id: Mapped[str] = mapped_column(comment="Run of the rollout.")
    kind: Mapped[str] = mapped_column(
        comment="succeeded, agent_error, timeout, infra_error or cancelled; infra_error never carries a reward."
    )
    reward: Mapped[float | None] = mapped_column(comment="From the last JSON line; null without one.")
    facts: Mapped[Json] = mapped_column(
        comment="The last JSON line of the agent, with the facts of its grader beside the reward."
    )
    exit_code: Mapped[int | None] = mapped_column(comment="Negative: killed by that signal.")
    detail: Mapped[str | None] = mapped_column(comment="Cause, for people.")
    stdout_tail: Mapped[str] = mapped_column(comment="The end of the agent's output.")
    stderr_tail: Mapped[str] = mapped_column(comment="The end of the agent's output.")
    endpoint_down: Mapped[str | None] = mapped_column(
        comment="The endpoint of the agent, or the store, that did not answer while an attempt ran that ended well"
        " without a reward of its own; not watched: it may not have; null: none, or unknown."
    )
    gateway_down_seconds: Mapped[float | None] = mapped_column(
        comment="How long before the end of an attempt that ended well the gateway last did not answer, or was not"
        " watched; null: it answered, or unknown."
    )
    artifacts_left_out: Mapped[int] = mapped_column(
        server_default="0", comment="Number of the files that agent.artifacts names and that are not kept."
    )
    created_at: Mapped[datetime] = created()
    __table_args__ = (
        one_of("kind", OutcomeKind),
        CheckConstraint("reward > '-Infinity' AND reward < 'Infinity'", name="reward_finite"),
        Index(None, "run_id", "created_at"),
    )


class Artifact(Base):
    """Writer: runner, in the transaction that settles the attempt; the controller removes those of a pruned run. A file
    of the attempt's working folder that `agent.artifacts` names."""

    __tablename__ = "artifacts"
    rollout_id: Mapped[str] = mapped_column(primary_key=True, comment="Rollout of the attempt.")
    attempt: Mapped[int] = mapped_column(primary_key=True, comment="Number of the attempt.")
    path: Mapped[str] = mapped_column(primary_key=True, comment="Below the working folder.")
    run_id: Mapped[str] = mapped_column(comment="Run of the rollout.")
    size_bytes: Mapped[int] = mapped_column(BigInteger, comment="As it was; a longer file than its content was cut.")
    content: Mapped[bytes] = mapped_column(comment="Its beginning, as the agent wrote it.")
    __table_args__ = (
        ForeignKeyConstraint(["rollout_id", "attempt"], ["outcomes.rollout_id", "outcomes.attempt"]),
        Index(None, "run_id"),
    )
