"""Bodies of the REST API: `services/api` sends them and `libs/client` returns them.

`Rollout` is an item of a list, `RolloutDetail` one rollout with its parts, `RewardRequest` a body that a client sends.
Times are UTC; token lists are as sampled, never re-encoded.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from leyden.libs.contracts.call_counts import CallCounts
from leyden.libs.contracts.config import RunConfig
from leyden.libs.contracts.conversation import Dialect, Json, Turn
from leyden.libs.contracts.rewards import RewardValue
from leyden.libs.contracts.states import Continuation

Item = TypeVar("Item")


class ApiScope(StrEnum):
    """Rights of a bearer token; each includes those after it."""

    ADMIN = "admin"
    WRITE = "write"
    READ = "read"


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class _Request(BaseModel):
    # Strict: no text in place of a number, and no boolean either.
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, strict=True, allow_inf_nan=False
    )


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("use characters that can be printed: no line breaks, control characters or marks of direction")
    return text


class Page(_Body, Generic[Item]):
    """One page of a list."""

    items: list[Item]
    next_cursor: str | None = None
    """Opaque; send it as `cursor` for the next page. Null on the last page."""


class FieldProblem(_Body):
    """One refused field of a request."""

    path: str
    """Dotted path in the body or the name of the parameter, such as `algorithm.clip_high`; `line 3` for an upload."""
    message: str
    """The error and its remedy."""


class Problem(_Body):
    """RFC 9457 problem details."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str | None = None
    instance: str | None = None
    errors: list[FieldProblem] = Field(default_factory=list)
    allowed_actions: list[str] | None = None
    """For a 409: the actions that the resource's present state allows."""


class TokenRequest(_Request):
    """Requests a bearer token."""

    name: Annotated[str, AfterValidator(_printable)] = Field(min_length=1, max_length=200)
    """A name for people, on one line."""
    scopes: list[Annotated[ApiScope, Field(strict=False)]] = Field(min_length=1, max_length=3)
    expires_seconds: int | None = Field(default=None, ge=60, le=10 * 366 * 86400)
    """The token's life; null: it has no end."""


class RotateRequest(_Request):
    """Requests a new secret for a token of the same name, scopes and life."""

    grace_seconds: int = Field(default=0, ge=0, le=30 * 86400)
    """So long the old secret works beside the new one."""


class Token(_Body):
    """A bearer token without its secret."""

    id: str
    name: str
    scopes: list[ApiScope]
    created_at: datetime
    revoked_at: datetime | None = None
    """The API refuses the token from then on; ahead while a rotated token has its grace."""
    expires_at: datetime | None = None
    """The API refuses the token from then on; null: it has no end."""


class IssuedToken(Token):
    """A new bearer token; only this answer contains its secret."""

    token: str


class AuditEntry(_Body):
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


class Dataset(_Body):
    """A named, immutable list of tasks."""

    id: str
    name: str
    content_sha256: str
    task_count: int
    created_at: datetime


class Task(_Body):
    """One row of a dataset."""

    dataset_id: str
    number: int
    """Position in the upload, from 0."""
    payload: Json


class Progress(_Body):
    """Progress of a run."""

    step: int
    """Completed optimiser steps."""
    steps: int
    """Configured optimiser steps."""
    policy_version: int | None
    """The newest version; null before the trainer has started."""
    rollouts: dict[str, int]
    """Training rollouts by state."""
    reward_mean: float | None
    """Mean reward of the rollouts that the last step consumed."""


class RunParent(_Body):
    """The run and the version with which another run began."""

    run_id: str
    """It may be deleted by now."""
    version: int


class TrainerEnd(_Body):
    """An end of a run's trainer that was not planned."""

    attempt: int
    """Number of the start that ended, from 1."""
    state: str
    """ended, out_of_memory, killed or final."""
    step: int
    """Steps that the run had made by then."""
    reason: str
    output: str
    """The last lines of its output."""
    created_at: datetime


class Run(_Body):
    """One training job."""

    id: str
    name: str
    dataset_id: str
    intent: str
    """The requested state: running, paused, cancelled or deleted."""
    phase: str
    """The present phase."""
    reason: str | None
    """The reason why the run waits, failed or stopped early."""
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    progress: Progress
    pruned: bool = False
    """Whether the run's calls, spans, credits and samples have been deleted."""
    warnings: list[str] = []
    """Settings that do not mean what they say, and reasons for which its newest attempts teach nothing; only in the
    answer about one run."""
    calls: CallCounts = CallCounts()
    """Counts of the model calls of its credited groups; only in the answer about one run."""
    trainer_ends: int = 0
    """How often a trainer of the run ended without a plan; only in the answer about one run."""
    last_trainer_end: TrainerEnd | None = None
    """The last of these ends."""
    best_version: int | None = None
    """The version from 1 that earned most in evaluations, else in training; that of a further policy has the number of
    the leading run's. Only in the answer about one run."""
    weights_bytes: int | None = None
    """Disk space of the run's versions, without checkpoints; only in the answer about one run."""
    parent: RunParent | None = None
    """The run that this one continues; its version is this run's version 0. Null for the base model."""
    lead_run_id: str | None = None
    """The run from whose rollouts this one learns, as one of its policies; that one steers it. Null for others."""
    policy: str | None = None
    """The name of the policy in the document of that run."""
    policy_runs: dict[str, str] = {}
    """The ids of the runs that carry the run's further policies, by policy."""
    allowed_actions: list[str]
    config: RunConfig


class ResumeRequest(_Request):
    """Continues a run that has ended: a new run with an amended document begins with one of its versions."""

    changes: Json = Field(default_factory=dict)
    """Laid over the run's document, such as `{"optimizer": {"learning_rate": 5e-7}}`. `training.steps` are the steps of
    the new run; left out, those that the ended run did not make. `model` and `training.lora` cannot change, nor `model`
    and `lora` of a policy. A policy that is null is removed; a new one begins with its base model, and one that is
    frozen now answers with the version that it begins with."""
    from_version: int | None = Field(default=None, ge=0, le=2**31 - 1)
    """Null: the newest. Further policies begin with their version of the same number, or with their newest where that
    has no files. The optimiser continues, too, if the version's checkpoint is there and `training.frozen` is the
    same (`training.keep_checkpoints`); the metric `optimizer_inherited` of the first step says so."""
    policy_versions: dict[str, Annotated[int, Field(ge=0, le=2**31 - 1)]] = Field(default_factory=dict, max_length=20)
    """Other versions for further policies to begin with, by policy."""


class PrunedRun(_Body):
    """The result of pruning a run."""

    run_id: str
    freed_bytes: int
    """Disk space freed in Postgres; 0 when the run was pruned before."""


class EvaluationRequest(_Request):
    """Requests an evaluation of one policy version; omitted fields default to the run's `evaluation`."""

    policy_version: int | None = Field(default=None, ge=0, le=2**31 - 1)
    """Null: the last version, measured after training has ended."""
    dataset: str | None = Field(default=None, min_length=1, max_length=200)
    rollouts_per_task: int | None = Field(default=None, ge=1, le=1024)
    max_tasks: int | None = Field(default=None, ge=1, le=2**31 - 1)


class Statistic(_Body):
    """Mean of a number over rollouts, with a 95 % interval: Wilson's where all values are 0 or 1, else Student's.

    The interval takes tasks as the sample: the rollouts of one task are alike, and repeating them narrows it less than
    more tasks do.
    """

    count: int
    """Rollouts that have the number."""
    tasks: int
    """Their tasks."""
    mean: float
    low: float | None
    """Null, as `high`, where one task has a number that is no share: nothing tells how tasks differ."""
    high: float | None


class Fact(_Body):
    """A grader's fact, aggregated over many rollouts."""

    name: str
    kind: Literal["share", "number", "text"]
    """`share`: booleans and numbers that are all 0 or 1."""
    statistic: Statistic | None = None
    """For shares and numbers."""
    counts: dict[str, int] | None = None
    """For texts: the most frequent values."""


class EvaluationResults(_Body):
    """Results of an evaluation, computed from stored outcomes at each request."""

    rollouts: dict[str, int]
    """Number of rollouts by state."""
    pending: int = 0
    """Finished rollouts whose reward has not come (`runner.stdout_reward: false`). They count in no mean."""
    complete: bool
    """Whether all rollouts ended and none of them is pending."""
    reward: Statistic | None
    """Null while nothing is measured."""
    facts: list[Fact]


class Evaluation(_Body):
    """The measurement of one policy version on a dataset."""

    id: str
    run_id: str
    number: int
    dataset_id: str
    policy_version: int | None
    """The requested version; null means the last version."""
    measured_version: int | None
    """The version that the rollouts used; null before the first rollout."""
    rollouts_per_task: int
    max_tasks: int | None
    created_at: datetime
    results: EvaluationResults


class Rollout(_Body):
    """One execution of a task by an agent, with its siblings in a group."""

    id: str
    run_id: str
    group_id: str
    evaluation_id: str | None
    sibling: int
    greedy: bool = False
    """Decoded greedily: the baseline of its siblings, never trained."""
    dataset_id: str
    task_number: int
    admitted_version: int
    step: int | None
    """The optimiser step that consumed it."""
    state: str
    """queued (it waits, also between two attempts), running, finished, excluded or cancelled."""
    attempt: int | None
    """The attempt whose outcome is the rollout's outcome."""
    reward: float | None
    """The outcome's reward plus all rewards for the rollout or one of its calls; null unless finished, and for an
    agent's failure until its group is complete (`sampling.failure_reward`)."""
    reason: str | None
    created_at: datetime
    finished_at: datetime | None


class Outcome(_Body):
    """How an attempt ended."""

    kind: str
    reward: float | None
    facts: Json
    exit_code: int | None
    detail: str | None
    stdout_tail: str
    stderr_tail: str
    created_at: datetime


class Attempt(_Body):
    """One execution of a rollout."""

    number: int
    state: str
    owner: str
    lease_expires_at: datetime
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    outcome: Outcome | None


class Reward(_Body):
    """A reward of an agent, a person or an outside system."""

    key: str
    attempt: int | None
    """Null for rewards of people and outside systems, which are for the rollout."""
    source: Literal["endpoint", "telemetry", "external"]
    name: str
    value: float
    call_id: str | None = None
    response_id: str | None = None
    tool_call_id: str | None = None
    comment: str | None = None
    given_by: str | None = None
    """The name of the token that gave a reward of people and outside systems."""
    created_at: datetime


class RewardRequest(_Request):
    """A reward of a person or an outside system; repeating its key changes nothing."""

    key: str = Field(min_length=1, max_length=200)
    name: str = Field(default="reward", min_length=1, max_length=200)
    value: RewardValue
    call_id: str | None = Field(default=None, max_length=200)
    """The model call to reward; null for the rollout."""
    comment: str | None = Field(default=None, max_length=10_000)


class RolloutDetail(Rollout):
    """A rollout with its task, executions and rewards."""

    task: Json
    attempts: list[Attempt]
    rewards: list[Reward]


class CallCredit(_Body):
    """The credit of one model call."""

    parent_call_id: str | None
    depth: int
    state_key: str
    tools: Json
    """`calls`: tool, status (`ok`, `error` or `unset`) and source of each tool call in the answer. The source is what
    joined a span (`tool_call_id`, `response_id`, `time`, `text`), `result` for a result in a later request,
    `malformed`, `hung` (no result before the timeout, or a span without an end), `lost` (no result before the agent
    failed), or `answer` where nothing is known."""
    intermediate_reward: float
    return_: float = Field(alias="return")
    baseline: float
    advantage: float

    model_config = ConfigDict(frozen=True, populate_by_name=True)


class Call(_Body):
    """One request to the model, with its tokens."""

    id: str
    rollout_id: str
    attempt: int
    request_id: str
    choice: int
    status: str
    trainable: bool
    untrainable_reason: str | None
    dialect: Dialect
    """The wire format of the agent's request."""
    agent: str | None = None
    """Fingerprint of the agent's system prompt and tools; null for a call of an older version, as the next two."""
    agent_name: str | None = None
    role: str | None = None
    continuation: Continuation | None = None
    """Whether its prompt extends an earlier call's tokens, is a fork of the conversation, or starts afresh."""
    request: Json
    """The parameters of the request, without conversation and tools."""
    turns: tuple[Turn, ...] | None
    """The conversation in the request; null with `missing_parent`."""
    tools: tuple[Json, ...] | None
    """The tools in the request; null with `missing_parent`."""
    missing_parent: str | None = None
    """Error if `turns`, `tools` and `prompt_ids` cannot be read because an earlier call is not in the store."""
    answer: Turn | None
    """The assistant's turn; null where the call failed or was aborted."""
    delivered: bool | None = None
    """Whether the last byte of the answer went to a client that was still connected; null where that is unknown."""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    prompt_ids: list[int] | None = None
    """Only with `prompt=true`; null with `missing_parent`."""
    sampled_ids: list[int]
    logprobs: list[float]
    """The engine's natural log-probabilities, one per sampled token."""
    policy_versions: list[int]
    """The policy version that sampled each token."""
    temperature: float
    finish_reason: str | None
    queued_seconds: float
    first_token_seconds: float | None
    total_seconds: float
    created_at: datetime
    credit: CallCredit | None


class Span(_Body):
    """One OpenTelemetry span of an attempt."""

    attempt: int
    trace_id: str
    span_id: str
    parent_span_id: str | None
    name: str
    kind: str
    tool: str | None
    status: str
    error_type: str | None
    tool_call_id: str | None
    response_id: str | None
    start_ns: int
    end_ns: int
    scope: str | None
    attributes: Json


class Sample(_Body):
    """One token sequence of the loss; it has arrays only with `tokens=true`."""

    id: str
    rollout_id: str
    group_id: str
    branch: int
    length: int
    trained_tokens: int
    min_policy_version: int
    step: int | None
    """The optimiser step that trained on the sample."""
    replayed_in: list[int]
    """Later steps that used it again (`sampling.replay`)."""
    token_ids: list[int] | None = None
    mask: list[int] | None = None
    generator_logprobs: list[float] | None = None
    advantages: list[float] | None = None
    policy_versions: list[int] | None = None
    created_at: datetime


class Step(_Body):
    """One optimiser step with the rewards of its rollouts."""

    number: int
    metrics: dict[str, float | None]
    """The trainer's metrics: loss, gradient norm, tokens, seconds per phase."""
    groups: dict[str, int]
    """Number of groups by verdict: trained, no_variance, untrainable, stale; and `replayed`, those of earlier steps
    that were used again."""
    calls: CallCounts = CallCounts()
    """Counts of the model calls of its groups; none for steps of an older version."""
    rollouts: int
    reward_mean: float | None
    reward_std: float | None
    facts: dict[str, float]
    """Mean of each numeric or boolean fact."""
    started_at: datetime
    created_at: datetime


class RunAgent(_Body):
    """The calls of one agent in all rollouts of a run: those with equal system prompts and tools."""

    identity: str
    """16 hex digits: fingerprint of the system prompt, the names of the tools and the header `x-agent-name`."""
    name: str | None
    """From the header, from answers that the agent sent back, or from a span around one of its calls."""
    roles: list[str]
    """The run's roles that its calls have; several where a role's condition is the requested model."""
    tools: list[str]
    """Names of the tools in one of its calls."""
    calls: int
    extend_share: float
    """Share of its calls whose prompt begins with the tokens of an earlier call."""
    fork_share: float
    """Share of its calls whose conversation holds an answer that was rewritten, or whose tokens could not be reused."""
    fresh_share: float
    """Share of its calls that start a conversation."""
    call_id: str
    """One of its calls, with its rollout, to look at."""
    rollout_id: str
    first_seen_at: datetime
    last_seen_at: datetime


class PolicyVersion(_Body):
    """One version of a run's weights."""

    version: int
    path: str
    content_sha256: str
    size_bytes: int
    pruned_at: datetime | None
    created_at: datetime


class Series(_Body):
    """One metric over the steps of a run."""

    name: str
    points: list[tuple[int, float, float]]
    """Each point: step, seconds since the start of the run's first step, value."""


class Metrics(_Body):
    """Time series of a run's metrics."""

    run_id: str
    names: list[str]
    """All available metric names."""
    series: list[Series]


class Engine(_Body):
    """An engine with the weights that it served at the last poll."""

    url: str
    pool: str
    run_id: str | None
    policy_version: int | None
    state: str
    detail: str | None
    updated_at: datetime


class Recipe(_Body):
    """Settings that a run's document may begin with."""

    name: str
    purpose: str
    document: dict[str, Any]
    """A part of a run's document."""


class Pool(_Body):
    """Engines that serve one model. One run at a time has them, or several share them, each with a LoRA adapter."""

    name: str
    model_path: str | None
    """Folder of the base model; null: the one in the settings of trainer and gateway."""
    context_length: int | None
    """Tokens of prompt and answer together; null: as many as the model allows."""
    adapters: int | None
    """So many runs share the engines, each with a LoRA adapter; null: one run has them."""
    max_adapter_rank: int | None
    """The largest LoRA rank that the engines take; null: any."""
    run_ids: list[str]
    """The runs that have the engines."""
    waiting: list[str]
    """The runs that wait for the engines, in order."""
    engines: list[Engine]


class Health(_Body):
    """State of the platform."""

    status: Literal["ok", "degraded"]
    database: str
    schema_revision: str | None
    engines: list[Engine]
    queued_rollouts: int
    live_attempts: int
