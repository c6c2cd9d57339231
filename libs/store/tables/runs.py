"""Datasets, runs with their evaluations, and their states."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import (
    BigInteger,
    Computed,
    ForeignKey,
    Identity,
    Index,
    UniqueConstraint,
    func,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from leyden.libs.contracts.states import (
    RUN_TRANSITIONS,
    RunIntent,
    RunPhase,
)
from leyden.libs.store.tables.base import Base, Json, created, of_document, one_of, transitions


class Dataset(Base):
    """Writer: api. A named, immutable list of tasks; the row exists only once every task is stored."""

    __tablename__ = "datasets"
    id: Mapped[str] = mapped_column(primary_key=True, comment="dataset-<random>.")
    name: Mapped[str] = mapped_column(unique=True, comment="The uploader chose it.")
    content_sha256: Mapped[str] = mapped_column(
        comment="Digest over the row hashes in order; an equal upload under the same name is a repeat."
    )
    task_count: Mapped[int] = mapped_column(comment="Number of its tasks.")
    created_at: Mapped[datetime] = created()


class Task(Base):
    """Writer: api. One row of a dataset."""

    __tablename__ = "tasks"
    dataset_id: Mapped[str] = mapped_column(
        ForeignKey("datasets.id", ondelete="CASCADE"), primary_key=True, comment="Dataset it belongs to."
    )
    number: Mapped[int] = mapped_column(primary_key=True, comment="Position in the upload, from 0.")
    row_sha256: Mapped[bytes] = mapped_column(comment="Digest of the row as uploaded.")
    payload: Mapped[Json] = mapped_column(comment="The row as uploaded; the agent gets it in LEYDEN_TASK.")


class Run(Base):
    """Writer: api. The wish for a training job: its configuration, and whether it should run."""

    __tablename__ = "runs"
    id: Mapped[str] = mapped_column(
        primary_key=True, comment="run-<random>; groups, rollouts and samples begin with it."
    )
    name: Mapped[str] = mapped_column(comment="A name for people.")
    config: Mapped[Json] = mapped_column(comment="The run's document (RunConfig).")
    dataset_id: Mapped[str] = mapped_column(ForeignKey("datasets.id"), comment="Its training tasks.")
    intent: Mapped[str] = mapped_column(
        default=RunIntent.RUNNING, comment="running, paused, cancelled or deleted: the goal of the controller."
    )
    parent_run_id: Mapped[str | None] = mapped_column(
        comment="The run that this one continues, which may be deleted; null for the base model."
    )
    parent_version: Mapped[int | None] = mapped_column(comment="The parent's version that is this run's version 0.")
    lead_run_id: Mapped[str | None] = mapped_column(
        ForeignKey("runs.id"),
        comment="The run whose further policy this row is, and no run; null for runs.",
    )
    policy: Mapped[str | None] = mapped_column(comment="The name of the policy in the document of that run.")
    created_at: Mapped[datetime] = created()
    runner_type: Mapped[str | None] = of_document("COALESCE({runner,type}, 'process'::text)", "runner.type")
    steps: Mapped[int | None] = of_document("({training,steps})::integer", "training.steps")
    groups_per_step: Mapped[int | None] = of_document(
        "({sampling,groups_per_step})::integer", "sampling.groups_per_step"
    )
    refills: Mapped[int | None] = of_document(
        "(COALESCE(({sampling,refill_zero_variance})::integer, 0) * ({sampling,groups_per_step})::integer)",
        "Sampling.refills",
    )
    failure_reward: Mapped[float | None] = of_document(
        "CASE WHEN (({sampling,agent_failure}) = 'reward'::text) THEN"
        " ({sampling,failure_reward})::double precision ELSE NULL::double precision END",
        "sampling.failure_reward, where an agent's failure is rewarded",
    )
    baseline: Mapped[str | None] = of_document("({credit,baseline,type})", "credit.baseline.type")
    algorithm: Mapped[str | None] = of_document("({algorithm,type})", "algorithm.type")
    teacher: Mapped[str | None] = of_document(
        "({algorithm,distillation,run})", "the run, or policy, whose version teaches this one"
    )
    teacher_version: Mapped[int | None] = of_document(
        "({algorithm,distillation,version})::integer", "the version that teaches"
    )
    awaits_rewards: Mapped[bool | None] = of_document(
        "(((config -> 'reward'::text) IS NULL) AND (({runner,stdout_reward}) = 'false'::text))",
        "whether all rewards come from outside",
    )
    feedback_components: Mapped[list[str] | None] = mapped_column(
        JSONB,
        Computed(
            "jsonb_path_query_array(config,"
            """ '$."reward"."components"[*]?(@."from" == "feedback")."name"'::jsonpath)""",
            persisted=True,
        ),
        comment="Of the document: the names of the components that are from: feedback.",
    )
    feedback_seconds: Mapped[float | None] = of_document(
        "({reward,wait,seconds})::double precision", "reward.wait.seconds"
    )
    feedback_values: Mapped[int | None] = of_document("({reward,wait,values})::integer", "reward.wait.values")
    judged: Mapped[bool] = of_document(
        """jsonb_path_exists(config, '$."reward"."components"[*]."grader"."type"?(@ == "score_model")'::jsonpath)""",
        "whether a model scores its rollouts",
    )
    compared: Mapped[bool] = of_document(
        """jsonb_path_exists(config, '$."reward"."components"[*]."grader"."type"?(@ == "relative_model")'::jsonpath)""",
        "whether a model compares the rollouts of its groups",
    )
    coded: Mapped[bool] = of_document(
        """jsonb_path_exists(config,"""
        """ '$."reward"."components"[*]."grader"."type"?(@ == "python" || @ == "command")'::jsonpath)""",
        "whether code of the operator's own grades its rollouts",
    )
    judge_tokens: Mapped[int | None] = mapped_column(
        BigInteger,
        Computed("(config #>> '{reward,judge_tokens}'::text[])::bigint", persisted=True),
        comment="Of the document: reward.judge_tokens.",
    )
    judge_cost: Mapped[float | None] = of_document("({reward,judge_cost})::double precision", "reward.judge_cost")
    contained: Mapped[bool] = of_document(
        """jsonb_path_exists(config, '$."reward"."components"[*]."grader"."type"?(@ == "container")'::jsonpath)""",
        "whether containers grade its rollouts",
    )
    __table_args__ = (
        one_of("intent", RunIntent),
        Index(None, "created_at", "id"),
        UniqueConstraint("lead_run_id", "policy"),
    )


class Evaluation(Base):
    """Writer: api. A wish to measure one policy version on a dataset; the controller makes its groups."""

    __tablename__ = "evaluations"
    id: Mapped[str] = mapped_column(primary_key=True, comment="<run>.e<number>")
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), comment="The run of the policy.")
    number: Mapped[int] = mapped_column(comment="From 1 within the run.")
    dataset_id: Mapped[str] = mapped_column(ForeignKey("datasets.id"), comment="Held-out tasks.")
    policy_version: Mapped[int | None] = mapped_column(comment="Null: the last version, once training has ended.")
    rollouts_per_task: Mapped[int] = mapped_column(comment="Siblings per task.")
    max_tasks: Mapped[int | None] = mapped_column(comment="Only the first so many tasks; null for all.")
    agents: Mapped[int] = mapped_column(
        server_default="1", comment="Agents of the run, each of which plays each task in a group of its own."
    )
    created_at: Mapped[datetime] = created()
    __table_args__ = (UniqueConstraint("run_id", "number"),)


class Duel(Base):
    """Writer: api. Two evaluations of one dataset whose answers judges compared pair by pair."""

    __tablename__ = "duels"
    number: Mapped[int] = mapped_column(
        BigInteger, Identity(always=True), primary_key=True, comment="Grows with the order of duels."
    )
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), comment="The evaluation's run.")
    evaluation_id: Mapped[str] = mapped_column(comment="The evaluation whose win rate it is.")
    against_id: Mapped[str] = mapped_column(comment="The other evaluation, whose run may be deleted.")
    reward: Mapped[Json] = mapped_column(comment="The section reward with the judges.")
    pairs: Mapped[list[Json]] = mapped_column(
        JSONB, comment="{rollout, against, task, values by component: 1 won, 0 lost, null not compared}."
    )
    given_by: Mapped[str] = mapped_column(comment="The name of the token that asked for it.")
    created_at: Mapped[datetime] = created()
    __table_args__ = (Index(None, "run_id", "number"),)


class RunStatus(Base):
    """Writer: controller. The phase of a run."""

    __tablename__ = "run_status"
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True, comment="The run.")
    phase: Mapped[str] = mapped_column(default=RunPhase.PENDING, comment=transitions(RUN_TRANSITIONS))
    reason: Mapped[str | None] = mapped_column(comment="The cause of a failure or a wait, for people.")
    started_at: Mapped[datetime | None] = mapped_column(comment="The first start of work.")
    finished_at: Mapped[datetime | None] = mapped_column(comment="The time of completion, failure or cancellation.")
    updated_at: Mapped[datetime] = mapped_column(server_default=func.now(), comment="The last change of the phase.")
    smallest_reward: Mapped[float | None] = mapped_column(
        comment="Over finished rollouts of complete groups whose agent did not fail; null without one."
    )
    stop_reason: Mapped[str | None] = mapped_column(
        comment="Why training stopped early; it stays once it is decided. Null: not decided."
    )
    judged_end: Mapped[datetime | None] = mapped_column(
        comment="The finished_at whose alarms and events are written; another one is judged again."
    )
    reason_since: Mapped[datetime | None] = mapped_column(
        comment="When the present reason began; null without one, and for one of an earlier version."
    )
    __table_args__ = (one_of("phase", RunPhase),)


class Alarm(Base):
    """Writer: controller. Trouble of a run by a rule of the table of alarms. One of a rule and a subject lasts at a
    time."""

    __tablename__ = "alarms"
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True, comment="The run.")
    number: Mapped[int] = mapped_column(primary_key=True, comment="From 1 within the run.")
    name: Mapped[str] = mapped_column(comment="The rule.")
    subject: Mapped[str] = mapped_column(comment="The tool, component or field; empty for the run as a whole.")
    severity: Mapped[str] = mapped_column(comment="warning or critical.")
    reason: Mapped[str] = mapped_column(comment="For people, by the last judgement.")
    evidence: Mapped[Json] = mapped_column(comment="The figures of the last judgement, by name.")
    remedy: Mapped[str] = mapped_column(comment="For people.")
    raised_at: Mapped[datetime] = mapped_column(server_default=func.now(), comment="The first judgement that found it.")
    seen_at: Mapped[datetime] = mapped_column(server_default=func.now(), comment="The last judgement that found it.")
    ended_at: Mapped[datetime | None] = mapped_column(
        comment="Null while it lasts, and where it lasted until the end of the run."
    )
    __table_args__ = (
        Index("uq_alarms_lasting", "run_id", "name", "subject", unique=True, postgresql_where="ended_at IS NULL"),
    )
