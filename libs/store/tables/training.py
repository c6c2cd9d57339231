"""Credits, samples, and the steps and versions that the trainer makes of them."""

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
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from leyden.libs.contracts.states import (
    ConsumptionVerdict,
    GroupVerdict,
)
from leyden.libs.store.tables.base import Base, Json, created, one_of


class GroupCredit(Base):
    """Writer: credit. The verdict on a complete training group for a run that trains on it, in one transaction with the
    samples."""

    __tablename__ = "group_credits"
    group_id: Mapped[str] = mapped_column(ForeignKey("groups.id"), primary_key=True, comment="The complete group.")
    run_id: Mapped[str] = mapped_column(
        primary_key=True, comment="The policy that learns from the group: the run's own model, or a further one."
    )
    verdict: Mapped[str] = mapped_column(comment="credited, or excluded: then the controller samples the task again.")
    reason: Mapped[str | None] = mapped_column(comment="The cause of an exclusion.")
    credit_version: Mapped[int] = mapped_column(comment="Grows with every change of the computation.")
    counted_siblings: Mapped[int] = mapped_column(
        comment="The number of finished siblings, whose rewards credit compared."
    )
    has_variance: Mapped[bool] = mapped_column(comment="False: every advantage is zero.")
    min_policy_version: Mapped[int | None] = mapped_column(
        comment="Over the trained tokens of its samples for this run; null without any."
    )
    reward_mean: Mapped[float | None] = mapped_column(comment="Over counted siblings.")
    reward_std: Mapped[float | None] = mapped_column(
        comment="Over counted siblings: the standard deviation of the population."
    )
    averages: Mapped[Json | None] = mapped_column(
        JSONB(none_as_null=True),
        comment="With baseline ema: the run's moving averages after this group, by role, or one under the empty name;"
        " else null.",
    )
    calls: Mapped[Json | None] = mapped_column(
        JSONB(none_as_null=True),
        comment="Counts of its calls for this run: {calls, untrainable by reason, malformed, empty, cut, tools by tool"
        " and status}; null for an excluded group.",
    )
    created_at: Mapped[datetime] = created()
    __table_args__ = (
        one_of("verdict", GroupVerdict),
        Index(None, "run_id", "created_at"),
        Index("ix_group_credits_excluded", "run_id", postgresql_where="verdict = 'excluded'"),
    )


class CallCredit(Base):
    """Writer: credit. The credit of one model call, part by part. Partitioned by run."""

    __tablename__ = "credits"
    run_id: Mapped[str] = mapped_column(primary_key=True, comment="Partition key.")
    call_id: Mapped[str] = mapped_column(primary_key=True, comment="The model call.")
    rollout_id: Mapped[str] = mapped_column(comment="Rollout of the call.")
    parent_call_id: Mapped[str | None] = mapped_column(
        comment="The call with whose tokens the prompt of this call begins."
    )
    depth: Mapped[int] = mapped_column(comment="The number of calls before it on its path.")
    state_key: Mapped[str] = mapped_column(comment="The tools and statuses so far: the anchor state of GiGPO.")
    tools: Mapped[Json] = mapped_column(comment="The tools that the call asked for: {calls: [{tool, status, source}]}.")
    intermediate_reward: Mapped[float] = mapped_column(comment="Intermediate and explicit rewards of the call.")
    return_: Mapped[float] = mapped_column("return", comment="The return by the credit rule.")
    baseline: Mapped[float] = mapped_column(comment="The number subtracted from the return.")
    advantage: Mapped[float] = mapped_column(comment="Return minus baseline, scaled if the baseline scales.")
    created_at: Mapped[datetime] = created()
    __table_args__ = (
        Index("ix_credits_rollout", "rollout_id"),
        {"postgresql_partition_by": "LIST (run_id)"},
    )


class Sample(Base):
    """Writer: credit. One root-to-leaf path of a rollout's call forest, ready for the loss. Partitioned by run.

    Every sampled token of a rollout has mask 1 in exactly one row.
    """

    __tablename__ = "samples"
    run_id: Mapped[str] = mapped_column(primary_key=True, comment="Partition key: the run that trains it.")
    id: Mapped[str] = mapped_column(primary_key=True, comment="<rollout>:<branch>")
    group_id: Mapped[str] = mapped_column(comment="Group of the rollout.")
    rollout_id: Mapped[str] = mapped_column(comment="Rollout of the path.")
    branch: Mapped[int] = mapped_column(comment="Index of the leaf among the rollout's paths, from 0.")
    call_id: Mapped[str | None] = mapped_column(
        comment="The call whose prompt and sampled tokens these are, by which a trainer finds the experts of each"
        " token; null in rows of an earlier version."
    )
    length: Mapped[int] = mapped_column(comment="T")
    trained_tokens: Mapped[int] = mapped_column(comment="Tokens with mask 1.")
    token_ids: Mapped[bytes] = mapped_column(comment="int32[T]")
    mask: Mapped[bytes] = mapped_column(
        comment="uint8[T]: 1 where the policy sampled the token and this row trains it."
    )
    generator_logprobs: Mapped[bytes] = mapped_column(comment="float32[T]; 0 where mask is 0.")
    advantages: Mapped[bytes] = mapped_column(comment="float32[T]; 0 where mask is 0.")
    temperatures: Mapped[bytes] = mapped_column(comment="float32[T]; 1 where mask is 0.")
    policy_versions: Mapped[bytes] = mapped_column(comment="int32[T]; -1 where mask is 0.")
    min_policy_version: Mapped[int] = mapped_column(
        comment="Over its trained tokens; the lag of the sample counts from it."
    )
    calls: Mapped[list[Json] | None] = mapped_column(
        JSONB(none_as_null=True),
        comment="For a critic: [{id, parent, reward, share, begin, end}] of the calls that this row trains; else null.",
    )
    created_at: Mapped[datetime] = created()
    __table_args__ = (
        Index("ix_samples_group", "group_id"),
        {"postgresql_partition_by": "LIST (run_id)"},
    )


class Step(Base):
    """Writer: trainer. One optimiser step, in one transaction with its groups, samples and policy version."""

    __tablename__ = "steps"
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True, comment="The trained run.")
    number: Mapped[int] = mapped_column(
        primary_key=True, comment="From 1; the step makes the policy version of the same number."
    )
    metrics: Mapped[Json] = mapped_column(
        comment="Name to number: loss, gradient norm, kl, gaps, tokens, seconds per phase."
    )
    checkpoint: Mapped[str] = mapped_column(comment="Folder of optimiser state, RNG and high-water mark.")
    started_at: Mapped[datetime] = mapped_column(comment="The time at which the trainer loaded its samples.")
    created_at: Mapped[datetime] = created()


class DamagedStep(Base):
    """Writer: trainer. A step whose files were not those that had been written, each time that a trainer found it."""

    __tablename__ = "damaged_steps"
    run_id: Mapped[str] = mapped_column(
        ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True, comment="The trained run."
    )
    step: Mapped[int] = mapped_column(primary_key=True, comment="Number of the step.")
    cause: Mapped[str] = mapped_column(comment="The file, and how it differs.")
    created_at: Mapped[datetime] = mapped_column(
        primary_key=True, server_default=func.now(), comment="The start of the transaction that wrote the row."
    )


class Computation(Base):
    """Writer: trainer. The settings that a run's document leaves to the device, as its first trainer resolved them."""

    __tablename__ = "computations"
    run_id: Mapped[str] = mapped_column(
        ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True, comment="The trained run."
    )
    device: Mapped[str] = mapped_column(comment="The kind of device that resolved them: cpu, cuda.")
    settings: Mapped[Json] = mapped_column(comment="{precision, attention, export_dtype, correction}: none is null.")
    latest_device: Mapped[str] = mapped_column(comment="The kind on which a trainer was last opened.")
    created_at: Mapped[datetime] = created()


class RunBase(Base):
    """Writer: trainer. The model with which a run began, in one transaction with version 0: the run stays with it,
    whatever pools and settings name later."""

    __tablename__ = "base_models"
    run_id: Mapped[str] = mapped_column(
        ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True, comment="The run, or a further policy of one."
    )
    path: Mapped[str] = mapped_column(
        comment="Folder of the model; of a continued run that of its parent, whose version is a copy."
    )
    created_at: Mapped[datetime] = created()


class TrainerEnd(Base):
    """Writer: controller. An end of a run's trainer, planned ones apart."""

    __tablename__ = "trainer_ends"
    run_id: Mapped[str] = mapped_column(
        ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True, comment="The run of the trainer."
    )
    attempt: Mapped[int] = mapped_column(primary_key=True, comment="Number of the start that ended, from 1.")
    state: Mapped[str] = mapped_column(
        comment="ended (by itself), out_of_memory, killed (by a signal, an eviction or a lost node) or final (another"
        " start would end in the same way)."
    )
    step: Mapped[int] = mapped_column(comment="Steps that the run had made by then.")
    reason: Mapped[str] = mapped_column(comment="The cause with its remedy, in words for users.")
    output: Mapped[str] = mapped_column(comment="The last lines of its output.")
    created_at: Mapped[datetime] = created()


class StepGroup(Base):
    """Writer: trainer. The verdict of a run's trainer on a credited group, at most one, in the step's transaction."""

    __tablename__ = "step_groups"
    group_id: Mapped[str] = mapped_column(ForeignKey("groups.id"), primary_key=True, comment="The credited group.")
    run_id: Mapped[str] = mapped_column(primary_key=True, comment="Run of the trainer.")
    step: Mapped[int | None] = mapped_column(comment="Null for a group refused as stale.")
    verdict: Mapped[str] = mapped_column(
        comment="trained, no_variance (its rewards teach nothing), untrainable (no token can train) or stale (refused)."
    )
    created_at: Mapped[datetime] = created()
    __table_args__ = (
        one_of("verdict", ConsumptionVerdict),
        Index(None, "run_id", "step"),
        Index("ix_step_groups_stale", "run_id", postgresql_where="verdict = 'stale'"),
        Index("ix_step_groups_no_variance", "run_id", "step", postgresql_where="verdict = 'no_variance'"),
    )


class StepSample(Base):
    """Writer: trainer. A sample in the loss of a step: the primary key promises that each is trained once."""

    __tablename__ = "step_samples"
    run_id: Mapped[str] = mapped_column(primary_key=True, comment="Run of the step.")
    sample_id: Mapped[str] = mapped_column(primary_key=True, comment="Id of the row in samples.")
    step: Mapped[int] = mapped_column(comment="Number of the step.")
    trainer_logprobs: Mapped[bytes | None] = mapped_column(
        comment="float32, one per trained token of the sample: its log-probability by the weights at the step's start."
        " NaN where the step did not compute it; null in steps of older versions."
    )
    trainer_entropies: Mapped[bytes | None] = mapped_column(
        comment="float32, one per trained token of the sample: the entropy in nats, at the sampling temperature, of the"
        " distribution that those weights have in its place. NaN and null as above."
    )
    __table_args__ = (Index(None, "run_id", "step"),)


class StepReplay(Base):
    """Writer: trainer. A further use of a trained group, in the transaction of the step that uses it: each use is in
    one step."""

    __tablename__ = "step_replays"
    group_id: Mapped[str] = mapped_column(primary_key=True, comment="A group that an earlier step trained.")
    run_id: Mapped[str] = mapped_column(primary_key=True, comment="Run of the trainer.")
    use: Mapped[int] = mapped_column(primary_key=True, comment="1 for the first use after the group's own step.")
    step: Mapped[int] = mapped_column(comment="The step that used the group again.")
    created_at: Mapped[datetime] = created()
    __table_args__ = (
        CheckConstraint("use > 0", name="use_positive"),
        ForeignKeyConstraint(["group_id", "run_id"], ["step_groups.group_id", "step_groups.run_id"]),
        UniqueConstraint("group_id", "run_id", "step"),
        Index(None, "run_id", "step"),
    )


class PolicyVersion(Base):
    """Writer: trainer. Weights for engines; versions of a run have no gaps."""

    __tablename__ = "policy_versions"
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True, comment="The run that made it.")
    version: Mapped[int] = mapped_column(primary_key=True, comment="0 is the base model.")
    path: Mapped[str] = mapped_column(comment="Hugging Face folder, with the path on trainer and engines.")
    content_sha256: Mapped[str] = mapped_column(comment="Digest over the weight files.")
    size_bytes: Mapped[int] = mapped_column(BigInteger, comment="Size of its weight files.")
    pruned_at: Mapped[datetime | None] = mapped_column(comment="The time at which the trainer removed the files.")
    created_at: Mapped[datetime] = created()
