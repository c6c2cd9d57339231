"""Bodies of the REST API: what `services/api` answers and `libs/client` returns.

Names end in nothing for what a list holds (`Rollout`), in `Detail` where one thing is shown with its parts, and in
`Request` for what people send. Times are UTC; token lists are as sampled, never re-encoded.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from leyden.libs.contracts.config import RunConfig
from leyden.libs.contracts.conversation import Dialect, Json, Turn
from leyden.libs.contracts.rewards import RewardValue

Item = TypeVar("Item")


class ApiScope(StrEnum):
    """Rights of a bearer token; each includes those after it."""

    ADMIN = "admin"
    WRITE = "write"
    READ = "read"


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class _Request(BaseModel):
    # Strict: a number is not written as a text, nor a truth value as a number.
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, strict=True, allow_inf_nan=False
    )


class Page(_Body, Generic[Item]):
    """One page of a list."""

    items: list[Item]
    next_cursor: str | None = None
    """Opaque; send it as `cursor` for the next page. Null at the end."""


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
    """For a 409: what may be asked of the thing as it is now."""


class TokenRequest(_Request):
    """Asks for a bearer token."""

    name: str = Field(min_length=1, max_length=200)
    scopes: list[Annotated[ApiScope, Field(strict=False)]] = Field(min_length=1, max_length=3)


class Token(_Body):
    """A bearer token's record; the secret itself is never shown again."""

    id: str
    name: str
    scopes: list[ApiScope]
    created_at: datetime
    revoked_at: datetime | None = None


class IssuedToken(Token):
    """The answer that holds the secret, once."""

    token: str


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
    """How far a run has come."""

    step: int
    """Optimiser steps taken."""
    steps: int
    """Optimiser steps asked for."""
    policy_version: int | None
    """The newest; null before the trainer has started."""
    rollouts: dict[str, int]
    """Training rollouts by state."""
    reward_mean: float | None
    """Over the rollouts that the last step consumed."""


class Run(_Body):
    """One training job."""

    id: str
    name: str
    dataset_id: str
    intent: str
    """The requested state: running, paused or cancelled."""
    phase: str
    """The present phase."""
    reason: str | None
    """The reason why it waits or failed."""
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    progress: Progress
    pruned: bool = False
    """Whether its calls, spans, credits and samples have been dropped."""
    allowed_actions: list[str]
    config: RunConfig


class PrunedRun(_Body):
    """The result of pruning a run."""

    run_id: str
    freed_bytes: int
    """On the disk of Postgres; 0 when it was pruned before."""


class EvaluationRequest(_Request):
    """Asks for a measurement of one policy version; what is left out comes from the run's `evaluation`."""

    policy_version: int | None = Field(default=None, ge=0, le=2**31 - 1)
    """Null: the last version, once training has ended."""
    dataset: str | None = Field(default=None, min_length=1, max_length=200)
    rollouts_per_task: int | None = Field(default=None, ge=1, le=1024)
    max_tasks: int | None = Field(default=None, ge=1, le=2**31 - 1)


class Statistic(_Body):
    """Mean of a number over rollouts, with a 95 % interval: Wilson's where all values are 0 or 1, else normal."""

    count: int
    mean: float
    low: float
    high: float


class Fact(_Body):
    """A fact of the agents' graders over many rollouts."""

    name: str
    kind: Literal["share", "number", "text"]
    """`share`: booleans and numbers that are all 0 or 1."""
    statistic: Statistic | None = None
    """For shares and numbers."""
    counts: dict[str, int] | None = None
    """For texts: the most frequent values."""


class EvaluationResults(_Body):
    """Computed from stored outcomes at each request."""

    rollouts: dict[str, int]
    """By state."""
    complete: bool
    reward: Statistic | None
    facts: list[Fact]


class Evaluation(_Body):
    """The measurement of one policy version on a dataset."""

    id: str
    run_id: str
    number: int
    dataset_id: str
    policy_version: int | None
    """Asked for; null means the last version."""
    measured_version: int | None
    """That the rollouts were admitted at; null before the first."""
    rollouts_per_task: int
    max_tasks: int | None
    created_at: datetime
    results: EvaluationResults


class Rollout(_Body):
    """One sibling of a group."""

    id: str
    run_id: str
    group_id: str
    evaluation_id: str | None
    sibling: int
    dataset_id: str
    task_number: int
    admitted_version: int
    step: int | None
    """The optimiser step that consumed it."""
    state: str
    attempt: int | None
    """The attempt that counts."""
    reward: float | None
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
    """A number somebody gave."""

    key: str
    attempt: int | None
    """Null for rewards of people and outside systems: they are for the rollout."""
    source: Literal["door", "telemetry", "external"]
    name: str
    value: float
    call_id: str | None = None
    response_id: str | None = None
    tool_call_id: str | None = None
    comment: str | None = None
    created_at: datetime


class RewardRequest(_Request):
    """A reward of a person or an outside system; the same key again changes nothing."""

    key: str = Field(min_length=1, max_length=200)
    name: str = Field(default="reward", min_length=1, max_length=200)
    value: RewardValue
    call_id: str | None = Field(default=None, max_length=200)
    """The model call it is for; null for the whole rollout."""
    comment: str | None = Field(default=None, max_length=10_000)


class RolloutDetail(Rollout):
    """A rollout with its task, executions and rewards."""

    task: Json
    attempts: list[Attempt]
    rewards: list[Reward]


class CallCredit(_Body):
    """The credit of one call."""

    parent_call_id: str | None
    depth: int
    state_key: str
    tools: Json
    intermediate_reward: float
    return_: float = Field(alias="return")
    baseline: float
    advantage: float

    model_config = ConfigDict(frozen=True, populate_by_name=True)


class Call(_Body):
    """One request to the model, at the level of tokens."""

    id: str
    rollout_id: str
    attempt: int
    request_id: str
    choice: int
    status: str
    trainable: bool
    untrainable_reason: str | None
    dialect: Dialect
    """The wire format that the agent spoke."""
    request: Json
    """The parameters of the request, without conversation and tools."""
    turns: tuple[Turn, ...] | None
    """The conversation that the model was sent; null with `missing_parent`."""
    tools: tuple[Json, ...] | None
    """The tools that the model was offered; null with `missing_parent`."""
    missing_parent: str | None = None
    """The reason where `turns`, `tools` and `prompt_ids` cannot be read: an earlier call is not in the store."""
    answer: Turn | None
    """The assistant's turn; null where the call failed or was aborted."""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    prompt_ids: list[int] | None = None
    """Only with `prompt=true`; null with `missing_parent`."""
    sampled_ids: list[int]
    logprobs: list[float]
    """Natural log, from the engine, one per sampled token."""
    policy_versions: list[int]
    """One per sampled token."""
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
    """One token sequence ready for the loss; the arrays only with `tokens=true`."""

    id: str
    rollout_id: str
    group_id: str
    branch: int
    length: int
    trained_tokens: int
    min_policy_version: int
    step: int | None
    """The optimiser step whose loss saw it."""
    token_ids: list[int] | None = None
    mask: list[int] | None = None
    generator_logprobs: list[float] | None = None
    advantages: list[float] | None = None
    policy_versions: list[int] | None = None
    created_at: datetime


class Step(_Body):
    """One optimiser step with what its rollouts earned."""

    number: int
    metrics: dict[str, float | None]
    """As the trainer wrote them: loss, gradient norm, tokens, seconds per phase."""
    groups: dict[str, int]
    """Groups by verdict: trained, no_variance, stale."""
    rollouts: int
    reward_mean: float | None
    reward_std: float | None
    facts: dict[str, float]
    """Mean of each numeric or boolean fact."""
    started_at: datetime
    created_at: datetime


class PolicyVersion(_Body):
    """Weights that can be served."""

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
    """Step, seconds since the run's first step began, value."""


class Metrics(_Body):
    """Time series for plots."""

    run_id: str
    names: list[str]
    """Every name that could be asked for."""
    series: list[Series]


class Engine(_Body):
    """An engine with the weights that it served at the last poll."""

    url: str
    run_id: str | None
    policy_version: int | None
    state: str
    detail: str | None
    updated_at: datetime


class Health(_Body):
    """The platform as the API sees it."""

    status: Literal["ok", "degraded"]
    database: str
    schema_revision: str | None
    engines: list[Engine]
    queued_rollouts: int
    live_attempts: int
