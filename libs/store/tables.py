"""The trajectory store's tables: one writer each, named in the docstring, with states checked by triggers.

Tokens are little-endian int32 bytes and log-probabilities little-endian float32 bytes (`numpy.ndarray.tobytes`), so
that a row costs four bytes a token and no parsing. `model_calls`, `spans`, `credits` and `samples` are partitioned
by run: `retention.prune_run` drops the partitions of an ended run in one statement.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any, ClassVar

from sqlalchemy import (
    ARRAY,
    JSON,
    BigInteger,
    Boolean,
    CheckConstraint,
    Computed,
    DateTime,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Identity,
    Index,
    LargeBinary,
    MetaData,
    Text,
    UniqueConstraint,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from leyden.libs.contracts.states import (
    ATTEMPT_TRANSITIONS,
    GROUP_TRANSITIONS,
    ROLLOUT_TRANSITIONS,
    RUN_TRANSITIONS,
    AttemptState,
    CallStatus,
    CanaryVerdict,
    ComponentState,
    ConsumptionVerdict,
    EngineState,
    GroupState,
    GroupVerdict,
    OutcomeKind,
    RolloutState,
    RunIntent,
    RunPhase,
    SpanStatus,
)

Json = dict[str, Any]


class Base(DeclarativeBase):
    """Names every constraint, so that migrations can name them too."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        str: Text,
        bytes: LargeBinary,
        datetime: DateTime(timezone=True),
        float: Double,
        Json: JSONB,
        list[str]: ARRAY(Text),
    }


def _one_of(column: str, states: type[Any]) -> CheckConstraint:
    allowed = ", ".join(f"'{state}'" for state in states)
    return CheckConstraint(f"{column} IN ({allowed})", name=f"{column}_known")


def _transitions(table: Mapping[Any, Collection[Any]]) -> str:
    """A life cycle as one line of a column's comment: `open → cancelled, complete; …`."""
    return "; ".join(f"{old} → {', '.join(sorted(new)) or 'nothing'}" for old, new in table.items())


def _of_document(expression: str, comment: str) -> Mapped[Any]:
    """A column that Postgres computes from the run's document, in whose expression `{a,b}` is the text at a path.

    The expression has the form in which Postgres prints it, so that a test can compare it with the migrations.
    """
    computed = Computed(re.sub(r"\{([\w,]+)\}", r"config #>> '{\1}'::text[]", expression), persisted=True)
    return mapped_column(computed, comment=f"Of the document: {comment}.")


def _created() -> Mapped[datetime]:
    return mapped_column(server_default=func.now(), comment="The start of the transaction that wrote the row.")


class ApiToken(Base):
    """Writer: api. A bearer token of the REST API; only its hash is stored."""

    __tablename__ = "api_tokens"
    id: Mapped[str] = mapped_column(primary_key=True, comment="token-<random>; never secret.")
    name: Mapped[str] = mapped_column(comment="A name for people.")
    token_sha256: Mapped[bytes] = mapped_column(unique=True, comment="The API shows the token itself once.")
    scopes: Mapped[list[str]] = mapped_column(comment="Subset of admin, write, read, attempts.")
    created_at: Mapped[datetime] = _created()
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
    created_at: Mapped[datetime] = _created()
    __table_args__ = (
        Index("ix_audit_entries_subject", "subject", "id"),
        Index("ix_audit_entries_token_name", "token_name", "id"),
    )


class IdempotencyKey(Base):
    """Writer: api. The answer to a create request: a repeat gets it again and makes no second row."""

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
    created_at: Mapped[datetime] = _created()


class Dataset(Base):
    """Writer: api. A named, immutable list of tasks; the row exists only once every task is stored."""

    __tablename__ = "datasets"
    id: Mapped[str] = mapped_column(primary_key=True, comment="dataset-<random>.")
    name: Mapped[str] = mapped_column(unique=True, comment="The uploader chose it.")
    content_sha256: Mapped[str] = mapped_column(
        comment="Digest over the row hashes in order; an equal upload under the same name is a repeat."
    )
    task_count: Mapped[int] = mapped_column(comment="Number of its tasks.")
    created_at: Mapped[datetime] = _created()


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
    created_at: Mapped[datetime] = _created()
    runner_type: Mapped[str | None] = _of_document("COALESCE({runner,type}, 'process'::text)", "runner.type")
    steps: Mapped[int | None] = _of_document("({training,steps})::integer", "training.steps")
    groups_per_step: Mapped[int | None] = _of_document(
        "({sampling,groups_per_step})::integer", "sampling.groups_per_step"
    )
    refills: Mapped[int | None] = _of_document(
        "(COALESCE(({sampling,refill_zero_variance})::integer, 0) * ({sampling,groups_per_step})::integer)",
        "Sampling.refills",
    )
    failure_reward: Mapped[float | None] = _of_document(
        "CASE WHEN (({sampling,agent_failure}) = 'reward'::text) THEN"
        " ({sampling,failure_reward})::double precision ELSE NULL::double precision END",
        "sampling.failure_reward, where an agent's failure is rewarded",
    )
    baseline: Mapped[str | None] = _of_document("({credit,baseline,type})", "credit.baseline.type")
    algorithm: Mapped[str | None] = _of_document("({algorithm,type})", "algorithm.type")
    teacher: Mapped[str | None] = _of_document(
        "({algorithm,distillation,run})", "the run, or policy, whose version teaches this one"
    )
    teacher_version: Mapped[int | None] = _of_document(
        "({algorithm,distillation,version})::integer", "the version that teaches"
    )
    awaits_rewards: Mapped[bool | None] = _of_document(
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
    feedback_seconds: Mapped[float | None] = _of_document(
        "({reward,wait,seconds})::double precision", "reward.wait.seconds"
    )
    feedback_values: Mapped[int | None] = _of_document("({reward,wait,values})::integer", "reward.wait.values")
    judged: Mapped[bool] = _of_document(
        """jsonb_path_exists(config, '$."reward"."components"[*]."grader"."type"?(@ == "score_model")'::jsonpath)""",
        "whether a model scores its rollouts",
    )
    compared: Mapped[bool] = _of_document(
        """jsonb_path_exists(config, '$."reward"."components"[*]."grader"."type"?(@ == "relative_model")'::jsonpath)""",
        "whether a model compares the rollouts of its groups",
    )
    coded: Mapped[bool] = _of_document(
        """jsonb_path_exists(config,"""
        """ '$."reward"."components"[*]."grader"."type"?(@ == "python" || @ == "command")'::jsonpath)""",
        "whether code of the operator's own grades its rollouts",
    )
    judge_tokens: Mapped[int | None] = mapped_column(
        BigInteger,
        Computed("(config #>> '{reward,judge_tokens}'::text[])::bigint", persisted=True),
        comment="Of the document: reward.judge_tokens.",
    )
    judge_cost: Mapped[float | None] = _of_document("({reward,judge_cost})::double precision", "reward.judge_cost")
    contained: Mapped[bool] = _of_document(
        """jsonb_path_exists(config, '$."reward"."components"[*]."grader"."type"?(@ == "container")'::jsonpath)""",
        "whether containers grade its rollouts",
    )
    __table_args__ = (
        _one_of("intent", RunIntent),
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
    created_at: Mapped[datetime] = _created()
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
    created_at: Mapped[datetime] = _created()
    __table_args__ = (Index(None, "run_id", "number"),)


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
    created_at: Mapped[datetime] = _created()
    __table_args__ = (CheckConstraint("value > '-Infinity' AND value < 'Infinity'", name="value_finite"),)


class RunStatus(Base):
    """Writer: controller. The phase of a run."""

    __tablename__ = "run_status"
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True, comment="The run.")
    phase: Mapped[str] = mapped_column(default=RunPhase.PENDING, comment=_transitions(RUN_TRANSITIONS))
    reason: Mapped[str | None] = mapped_column(comment="The cause of a failure or a wait, for people.")
    started_at: Mapped[datetime | None] = mapped_column(comment="The first start of work.")
    finished_at: Mapped[datetime | None] = mapped_column(comment="The time of completion, failure or cancellation.")
    updated_at: Mapped[datetime] = mapped_column(server_default=func.now(), comment="The last change of the phase.")
    smallest_reward: Mapped[float | None] = mapped_column(
        comment="Over finished rollouts of complete groups whose agent did not fail; null without one."
    )
    judged_end: Mapped[datetime | None] = mapped_column(
        comment="The finished_at whose alarms and events are written; another one is judged again."
    )
    __table_args__ = (_one_of("phase", RunPhase),)


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
    created_at: Mapped[datetime] = _created()
    __table_args__ = (
        Index(None, "run_id"),
        Index("ix_webhook_events_due", "due_at", postgresql_where="due_at IS NOT NULL"),
    )


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
    state: Mapped[str] = mapped_column(default=GroupState.OPEN, comment=_transitions(GROUP_TRANSITIONS))
    created_at: Mapped[datetime] = _created()
    finished_at: Mapped[datetime | None] = mapped_column(comment="The time of completion or cancellation.")
    __table_args__ = (
        _one_of("state", GroupState),
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
    state: Mapped[str] = mapped_column(default=RolloutState.QUEUED, comment=_transitions(ROLLOUT_TRANSITIONS))
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
    created_at: Mapped[datetime] = _created()
    finished_at: Mapped[datetime | None] = mapped_column(comment="The time of the end.")
    __table_args__ = (
        _one_of("state", RolloutState),
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
    __table_args__ = (_one_of("state", EngineState),)


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
    __table_args__ = (_one_of("verdict", CanaryVerdict), Index(None, "run_id"))


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
    created_at: Mapped[datetime] = _created()
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
    created_at: Mapped[datetime] = _created()
    __table_args__ = (Index(None, "run_id"),)


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
    state: Mapped[str] = mapped_column(default=AttemptState.LEASED, comment=_transitions(ATTEMPT_TRANSITIONS))
    lease_id: Mapped[str] = mapped_column(unique=True, comment="The fence: settling and heartbeats name it.")
    owner: Mapped[str] = mapped_column(comment="The runner process with the lease, or the client of an external agent.")
    lease_expires_at: Mapped[datetime] = mapped_column(
        comment="Heartbeats extend it; after it the controller may expire the attempt."
    )
    created_at: Mapped[datetime] = _created()
    started_at: Mapped[datetime | None] = mapped_column(comment="The start of the agent.")
    finished_at: Mapped[datetime | None] = mapped_column(comment="The time of the settlement or expiry.")
    __table_args__ = (
        _one_of("state", AttemptState),
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
    created_at: Mapped[datetime] = _created()
    __table_args__ = (
        _one_of("kind", OutcomeKind),
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


CALLED_TOOLS = """jsonb_path_query_array(answer, '$."tool_calls"[*]."name"'::jsonpath)"""
"""SQL over `model_calls`: the names of the tools that an answer calls, as their index has them."""
SPAN_TOOL = '"left"(tool, 200)'
"""SQL over `spans`: the beginning of a tool's name, as their index has it; an index holds no text of any length."""


class ModelCall(Base):
    """Writer: gateway. One choice of one request to the model, as sampled; durable before its last byte leaves.
    Partitioned by run.

    A request for n choices writes n rows that share `request_id`. A row that names a parent call stores only what it
    adds to it.
    """

    __tablename__ = "model_calls"
    run_id: Mapped[str] = mapped_column(primary_key=True, comment="Partition key.")
    id: Mapped[str] = mapped_column(primary_key=True, comment="c and 24 hex digits.")
    rollout_id: Mapped[str] = mapped_column(comment="From the path that the agent called.")
    attempt: Mapped[int] = mapped_column(comment="From the path that the agent called.")
    request_id: Mapped[str] = mapped_column(comment="The id of the request's first choice.")
    choice: Mapped[int] = mapped_column(comment="Index among the choices of the request.")
    sequence: Mapped[int] = mapped_column(
        BigInteger, comment="Arrival in nanoseconds since the epoch: orders the calls of an attempt."
    )
    status: Mapped[str] = mapped_column(
        comment="completed, aborted (the client hung up), failed, or refused (the request is at fault)."
    )
    trainable: Mapped[bool] = mapped_column(Boolean, comment="True when the loss may see its tokens.")
    untrainable_reason: Mapped[str | None] = mapped_column(
        comment="The parameters that a trainer cannot reproduce, or how the call ended."
    )
    masks_forced: Mapped[bool] = mapped_column(
        Boolean,
        server_default="false",
        comment="True when a grammar constrained the answer and tokens that it left no choice do not train.",
    )
    request_sha256: Mapped[bytes] = mapped_column(
        comment="Digest of the body; the gateway recognises the retry of an SDK by it."
    )
    dialect: Mapped[str] = mapped_column(comment="The wire format that the agent spoke.")
    request: Mapped[Json] = mapped_column(
        comment="The parameters of the request: its body without conversation and tools."
    )
    parent_call_id: Mapped[str | None] = mapped_column(
        comment="An earlier call of the same attempt whose beginning this row shares; null where the row is complete."
    )
    shared_turns: Mapped[int] = mapped_column(
        server_default="0",
        comment="The conversation begins with this many turns of the parent: its turns, then its answer.",
    )
    shared_tokens: Mapped[int] = mapped_column(
        server_default="0",
        comment="The prompt begins with this many tokens of the parent: its prompt, then its sampled tokens.",
    )
    turns: Mapped[list[Json]] = mapped_column(
        JSONB,
        comment="The turns of the conversation after the shared ones:"
        " [{role, content, name, tool_calls, tool_call_id}].",
    )
    # JSONB would reorder the members, and a chat template writes them in the order that the agent sent.
    tools: Mapped[list[Json] | None] = mapped_column(
        JSON(none_as_null=True),
        comment="The tools of the request, members in the order sent; null where the row has the tools of its parent.",
    )
    answer: Mapped[Json | None] = mapped_column(
        JSONB(none_as_null=True), comment="The assistant's turn; null where the call failed or was aborted."
    )
    prompt_ids: Mapped[bytes] = mapped_column(
        comment="int32[prompt_tokens - shared_tokens]: the tokens of the prompt after the shared ones."
    )
    sampled_ids: Mapped[bytes] = mapped_column(comment="int32[completion_tokens]")
    written_ids: Mapped[bytes | None] = mapped_column(
        comment="int32: the answer of another provider, in the tokens of the run's own model as its template writes it;"
        " null where an engine sampled, or the template cannot."
    )
    generator_logprobs: Mapped[bytes] = mapped_column(
        comment="float32[completion_tokens], natural log, temperature-scaled, before top-k and top-p."
    )
    policy_versions: Mapped[bytes] = mapped_column(
        comment="int32[completion_tokens]: the version that sampled each token."
    )
    # Deferred: megabytes that only a trainer reads.
    routed_experts: Mapped[bytes | None] = mapped_column(
        deferred=True,
        deferred_raiseload=True,
        comment="The experts that the engine chose for each token from the last shared one on, but not for the last one"
        " sampled: position of the first uint32, n = layers * experts of a token uint32, bytes of a number uint8, then"
        " uint8 or uint16[tokens, n], whose largest number is an expert not named; null: not recorded.",
    )
    prompt_tokens: Mapped[int] = mapped_column(comment="Length of the complete prompt, shared tokens included.")
    completion_tokens: Mapped[int] = mapped_column(comment="Length of sampled_ids.")
    cached_tokens: Mapped[int] = mapped_column(
        comment="Tokens of the prompt that the engine found in its prefix cache."
    )
    min_policy_version: Mapped[int | None] = mapped_column(comment="Over its tokens; null without any.")
    max_policy_version: Mapped[int | None] = mapped_column(comment="Over its tokens; null without any.")
    temperature: Mapped[float] = mapped_column(comment="The effective one.")
    asked: Mapped[Json | None] = mapped_column(
        JSONB(none_as_null=True),
        comment="Sampling parameters as the agent asked, where the run's override replaced them; null: none.",
    )
    finish_reason: Mapped[str | None] = mapped_column(
        comment="stop, length or tool_calls; of a refused call the code of its error, as context_length_exceeded."
    )
    trace_id: Mapped[str | None] = mapped_column(comment="Hex, from the traceparent header.")
    parent_span_id: Mapped[str | None] = mapped_column(comment="Hex, from the traceparent header.")
    agent: Mapped[str | None] = mapped_column(
        comment="16 hex digits: fingerprint of the system prompt, the names of the tools and the header x-agent-name."
    )
    agent_name: Mapped[str | None] = mapped_column(
        comment="From the header x-agent-name, a system message or the assistant's last answer that was sent back, or"
        " of an earlier call with this fingerprint; else null."
    )
    role: Mapped[str | None] = mapped_column(comment="The role of the run's document that the call has; null: none.")
    continuation: Mapped[str | None] = mapped_column(
        comment="extend (its prompt begins with the tokens of an earlier call), fork (it holds an answer whose tokens"
        " it could not reuse, or that was rewritten) or fresh."
    )
    queued_seconds: Mapped[float] = mapped_column(comment="Arrival to the engine's acceptance, holds included.")
    first_token_seconds: Mapped[float | None] = mapped_column(comment="Arrival to the first token.")
    total_seconds: Mapped[float] = mapped_column(comment="Arrival to the last token.")
    created_at: Mapped[datetime] = _created()
    __table_args__ = (
        _one_of("status", CallStatus),
        Index("ix_model_calls_rollout", "rollout_id", "attempt", "sequence"),
        Index("ix_model_calls_role", "role", "rollout_id", "attempt", postgresql_where="role IS NOT NULL"),
        Index(
            "ix_model_calls_tools",
            text(CALLED_TOOLS),
            postgresql_using="gin",
            postgresql_with={"fastupdate": "off"},
        ),
        {"postgresql_partition_by": "LIST (run_id)"},
    )


class Delivery(Base):
    """Writer: gateway. The wait of one request to the model and the fate of its answer. The row of a request that waits
    is written while it waits; a repeat changes nothing. Pruning deletes a run's rows.
    """

    __tablename__ = "deliveries"
    run_id: Mapped[str] = mapped_column(primary_key=True, comment="The run of the rollout.")
    request_id: Mapped[str] = mapped_column(primary_key=True, comment="The id of the request's first choice.")
    rollout_id: Mapped[str] = mapped_column(comment="From the path that the agent called.")
    attempt: Mapped[int] = mapped_column(comment="From the path that the agent called.")
    gateway: Mapped[str] = mapped_column(comment="The gateway process that has the request.")
    sequence: Mapped[int] = mapped_column(
        BigInteger, comment="Arrival in nanoseconds since the epoch, as in model_calls."
    )
    request_sha256: Mapped[bytes] = mapped_column(comment="Digest of the body, as in model_calls.")
    waited_seconds: Mapped[float | None] = mapped_column(
        comment="How long its client waited for the platform, the time of sampling left out; null while it waits."
    )
    seconds: Mapped[float | None] = mapped_column(
        comment="Arrival to the last byte, or to the moment at which the client left; null while it waits."
    )
    delivered: Mapped[bool | None] = mapped_column(
        Boolean,
        comment="Whether the last byte of an answer went to a client that was still connected; null while that is"
        " unknown.",
    )
    created_at: Mapped[datetime] = _created()
    __table_args__ = (Index(None, "rollout_id", "attempt"),)


class Gateway(Base):
    """Writer: gateway. A gateway process and its last sign of life."""

    __tablename__ = "gateways"
    name: Mapped[str] = mapped_column(primary_key=True, comment="Host, process id and a random word.")
    seen_at: Mapped[datetime] = mapped_column(comment="By now it had written every request that had waited.")


class AgentObject(Base):
    """Writer: gateway. One object that the agent of an attempt stores by the Responses API: a conversation, an item of
    one, or the mark of a deleted response. A repeat changes nothing. Pruning deletes a run's rows.
    """

    __tablename__ = "agent_objects"
    run_id: Mapped[str] = mapped_column(primary_key=True, comment="The run of the rollout.")
    rollout_id: Mapped[str] = mapped_column(primary_key=True, comment="From the path that the agent called.")
    attempt: Mapped[int] = mapped_column(primary_key=True, comment="From the path that the agent called.")
    owner_id: Mapped[str] = mapped_column(primary_key=True, comment="The conversation of an item; else its own id.")
    id: Mapped[str] = mapped_column(primary_key=True, comment="The id that the agent sees.")
    position: Mapped[int] = mapped_column(BigInteger, comment="Nanoseconds since the epoch: orders the items.")
    document: Mapped[Json | None] = mapped_column(
        JSON(none_as_null=True), comment="As the agent sees it; null once deleted."
    )


class Span(Base):
    """Writer: collector and gateway. One OpenTelemetry span; a re-sent one changes nothing. The gateway writes those of
    embeddings. Partitioned by run.
    """

    __tablename__ = "spans"
    run_id: Mapped[str] = mapped_column(primary_key=True, comment="Partition key.")
    rollout_id: Mapped[str] = mapped_column(primary_key=True, comment="From the path that the agent called.")
    attempt: Mapped[int] = mapped_column(primary_key=True, comment="From the path that the agent called.")
    trace_id: Mapped[str] = mapped_column(primary_key=True, comment="Hex.")
    span_id: Mapped[str] = mapped_column(primary_key=True, comment="Hex.")
    parent_span_id: Mapped[str | None] = mapped_column(comment="Hex; null for a root.")
    name: Mapped[str] = mapped_column(comment="The name that the instrumentation gave it.")
    kind: Mapped[str] = mapped_column(comment="llm, tool, agent, reward or other.")
    tool: Mapped[str | None] = mapped_column(comment="Name of the tool, for kind tool.")
    status: Mapped[str] = mapped_column(comment="ok, error or unset.")
    error_type: Mapped[str | None] = mapped_column(comment="Class of the error; null without one.")
    tool_call_id: Mapped[str | None] = mapped_column(
        comment="The id of the tool call in the model's answer; null for a span without one."
    )
    response_id: Mapped[str | None] = mapped_column(
        comment="The model answer with the tool call: joins the span to its call."
    )
    start_ns: Mapped[int] = mapped_column(
        BigInteger, comment="Nanoseconds since the epoch, by the clock of the agent or the gateway."
    )
    end_ns: Mapped[int] = mapped_column(
        BigInteger, comment="Nanoseconds since the epoch, by the clock of the agent or the gateway."
    )
    scope: Mapped[str | None] = mapped_column(comment="Instrumentation scope.")
    attributes: Mapped[Json] = mapped_column(comment="Attributes as sent; long values are cut.")
    created_at: Mapped[datetime] = _created()
    __table_args__ = (
        _one_of("status", SpanStatus),
        Index("ix_spans_tool", text(SPAN_TOOL), postgresql_where="tool IS NOT NULL"),
        {"postgresql_partition_by": "LIST (run_id)"},
    )


class Reward(Base):
    """Writer: collector. A reward from the attempt's telemetry or its reward endpoint. A repeat changes nothing."""

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
    created_at: Mapped[datetime] = _created()
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
    created_at: Mapped[datetime] = _created()
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
    created_at: Mapped[datetime] = _created()
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
    created_at: Mapped[datetime] = _created()


class AgentName(Base):
    """Writer: credit. The name that an agent's calls or spans have shown, which all of its calls in the run have from
    then on. The first one stays."""

    __tablename__ = "agent_names"
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True, comment="The run.")
    agent: Mapped[str] = mapped_column(primary_key=True, comment="The fingerprint, as in model_calls.")
    name: Mapped[str] = mapped_column(comment="The agent's name.")


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
    created_at: Mapped[datetime] = _created()
    __table_args__ = (
        _one_of("state", ComponentState),
        CheckConstraint("value > '-Infinity' AND value < 'Infinity'", name="value_finite"),
        CheckConstraint("(value IS NOT NULL) = (state = 'scored')", name="scored_has_value"),
        ForeignKeyConstraint(["rollout_id", "attempt"], ["gradings.rollout_id", "gradings.attempt"]),
        Index(None, "run_id"),
    )


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
    created_at: Mapped[datetime] = _created()
    __table_args__ = (
        _one_of("verdict", GroupVerdict),
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
    created_at: Mapped[datetime] = _created()
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
    created_at: Mapped[datetime] = _created()
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
    created_at: Mapped[datetime] = _created()


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
    created_at: Mapped[datetime] = _created()


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
    created_at: Mapped[datetime] = _created()


class StepGroup(Base):
    """Writer: trainer. The verdict of a run's trainer on a credited group, at most one, in the step's transaction."""

    __tablename__ = "step_groups"
    group_id: Mapped[str] = mapped_column(ForeignKey("groups.id"), primary_key=True, comment="The credited group.")
    run_id: Mapped[str] = mapped_column(primary_key=True, comment="Run of the trainer.")
    step: Mapped[int | None] = mapped_column(comment="Null for a group refused as stale.")
    verdict: Mapped[str] = mapped_column(
        comment="trained, no_variance (its rewards teach nothing), untrainable (no token can train) or stale (refused)."
    )
    created_at: Mapped[datetime] = _created()
    __table_args__ = (
        _one_of("verdict", ConsumptionVerdict),
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
    created_at: Mapped[datetime] = _created()
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
    created_at: Mapped[datetime] = _created()


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
    created_at: Mapped[datetime] = _created()


class StateTransition(Base):
    """Writer: migrations. The transitions of states that the triggers allow; they refuse every other change."""

    __tablename__ = "state_transitions"
    entity: Mapped[str] = mapped_column(primary_key=True, comment="run, group, rollout or attempt.")
    from_state: Mapped[str] = mapped_column(primary_key=True, comment="A state the entity may leave.")
    to_state: Mapped[str] = mapped_column(primary_key=True, comment="A state that may follow it.")


for _mapper in Base.registry.mappers:
    # The comments of the tables in SQL are the docstrings of their classes.
    _mapper.local_table.comment = " ".join((_mapper.class_.__doc__ or "").split())  # type: ignore[attr-defined]

PARTITIONED: tuple[type[Base], ...] = (ModelCall, Span, CallCredit, Sample)
"""Tables with one partition per run."""
