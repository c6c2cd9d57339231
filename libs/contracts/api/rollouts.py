"""Rollouts with their attempts, rewards, calls, spans and samples. Token lists are as sampled, never re-encoded."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import ConfigDict, Field

from leyden.libs.contracts.api.body import Body, Page, RequestBody
from leyden.libs.contracts.config import Reward as RewardConfig
from leyden.libs.contracts.conversation import Dialect, Json, Turn
from leyden.libs.contracts.rewards import RewardValue
from leyden.libs.contracts.states import ComponentState, Continuation


class Rollout(Body):
    """One execution of a task by an agent, with its siblings in a group."""

    id: str
    run_id: str
    group_id: str
    evaluation_id: str | None
    agent: str | None = None
    """The one of the run's `agents` that plays it; null for a run that has one agent."""
    sibling: int
    greedy: bool = False
    """Decoded greedily: the baseline of its siblings, never trained."""
    rerolls_of: str | None = None
    """The rollout whose first calls it repeats from the record, with baseline `monte_carlo`; null for a sibling."""
    from_call: int | None = None
    """The first call, from 0, that a re-roll sampled anew; null for a sibling."""
    dataset_id: str
    task_number: int
    admitted_version: int
    step: int | None
    """The optimiser step that consumed it."""
    state: str
    """queued (it waits, also between two attempts), running, grading, finished, excluded
    or cancelled."""
    attempt: int | None
    """The attempt whose outcome is the rollout's outcome."""
    reward: float | None
    """The outcome's reward plus all rewards for the rollout or one of its calls; null unless finished, and for an
    agent's failure until its group is complete (`sampling.failure_reward`)."""
    reason: str | None
    created_at: datetime
    finished_at: datetime | None


class Cause(Body):
    """Why rollouts were excluded, failed or taught nothing."""

    cause: str
    """A rollout's reason, the reason for which credit excluded its group, or the verdict of a trainer that did not
    train it."""
    rollouts: int


class RolloutPage(Page[Rollout], use_attribute_docstrings=True):
    """A page of rollouts."""

    total: int | None = None
    """Count of all rollouts that the filter leaves; only with `count=true`, and on the first page alone."""


class Artifact(Body):
    """A file that an agent left and that its run keeps; its content is cut where `stored_bytes` is less than
    `size_bytes`."""

    path: str
    size_bytes: int
    stored_bytes: int


class Outcome(Body):
    """How an attempt ended."""

    kind: str
    reward: float | None
    facts: Json
    exit_code: int | None
    detail: str | None
    stdout_tail: str
    stderr_tail: str
    created_at: datetime
    artifacts: list[Artifact] = Field(default_factory=list)
    """Files that `agent.artifacts` names, by their paths; none of a pruned run."""
    artifacts_left_out: int = 0
    """Number of those that were not kept: too many, a link, or not readable."""


class Attempt(Body):
    """One execution of a rollout."""

    number: int
    state: str
    owner: str
    lease_expires_at: datetime
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    outcome: Outcome | None


class Reward(Body):
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


class ComponentGrade(Body):
    """One component of a reward."""

    component: str
    state: ComponentState
    """`not_applicable`: the task has no reference; `failed`: no try of the grader gave a number."""
    weight: float
    """The factor of the component in the rollout's reward; 0 for a metric."""
    value: float | None
    """Before the weight; null unless scored."""
    contribution: float | None = None
    """Its part in the total before gates and `reward.clip`; null for a metric, and where it has none."""
    extracted: str | None
    """The answer that the grader found in the output."""
    explanation: str
    source: str
    """`agent`, `feedback`, or the type of the grader."""
    duration_seconds: float


class RewardComponent(ComponentGrade):
    """A settled component of a rollout's reward."""

    attempt: int
    revision: int
    created_at: datetime


class GradeRequest(RequestBody):
    """The components with which a stored rollout is graded."""

    reward: RewardConfig


class TrialRequest(GradeRequest):
    """The components with which a stored rollout is graded, and nothing is stored."""

    against: str | None = Field(default=None, min_length=1, max_length=200)
    """Another rollout of the same task, as of another version. Each `relative_model` of the components compares both,
    with each of them first: 1 if this rollout is better both times, 0 if it is worse both times, else 0.5. Other
    components say nothing."""


class Graded(Body):
    """The reward that a rollout would have."""

    attempt: int
    total: float | None
    reason: str | None
    """Why there is no total."""
    components: list[ComponentGrade]


class Regrade(Body):
    """A later grading of a rollout that was graded already."""

    attempt: int
    revision: int
    """From 2 on; 1 is the grading that the rollout ended with, also where it gave no total."""
    total: float
    given_by: str
    """The name of the token that asked for it."""
    reward: Json
    """The section `reward` that graded it."""
    created_at: datetime


class Feedback(Body):
    """A value of a component that is `from: feedback` or `from: otlp`."""

    key: str
    attempt: int
    """The last attempt when it came; it counts if that attempt is graded."""
    component: str
    value: float
    comment: str | None
    given_by: str | None
    """The name of the token that gave it; null for the agent's telemetry."""
    created_at: datetime


class FeedbackRequest(RequestBody):
    """A person's or a program's value for a component of a rollout's reward; repeating its key changes nothing."""

    key: str = Field(min_length=1, max_length=200)
    component: str = Field(min_length=1, max_length=100)
    """The name of a component that is `from: feedback`."""
    value: RewardValue
    comment: str | None = Field(default=None, max_length=10_000)


class RewardRequest(RequestBody):
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
    components: list[RewardComponent] = Field(default_factory=list)
    """Those of `reward.components` in their order, of the newest revision; empty while they are not graded."""
    earlier_components: list[RewardComponent] = Field(default_factory=list)
    """Those of the revisions before it, from revision 1, whose total credit had."""
    feedback: list[Feedback] = Field(default_factory=list)
    """Values of people and other programs, in the order in which they came."""
    regrades: list[Regrade] = Field(default_factory=list)
    """Later gradings by revision. `components` are those of the newest one. `reward` is the newest total for an
    evaluation's rollout, and stays what credit had for any other."""


class CallCredit(Body):
    """The credit of one model call."""

    parent_call_id: str | None
    depth: int
    state_key: str
    tools: Json
    """`calls`: tool, status (`ok`, `error` or `unset`) and source of each tool call in the answer. The source is what
    joined a span (`tool_call_id`, `response_id`, `time`, `text`), `result` for a result in a later request, `bare` for
    one whose text shows neither a success nor a failure, `malformed`, `hung` (no result before the timeout or within
    `credit.air.tool_seconds`, or a span without an end), `lost` (no result before the agent failed), or `answer` where
    nothing is known."""
    intermediate_reward: float
    return_: float = Field(alias="return")
    baseline: float
    advantage: float

    model_config = ConfigDict(frozen=True, populate_by_name=True)


class Call(Body):
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
    parent_call_id: str | None = None
    """Only with `conversation=added`: the call with whose conversation this one's begins, earlier in the list; null
    where this one is whole."""
    parent_span_id: str | None = None
    """The span in which the agent asked, where it sent one with the request."""
    shared_turns: int = 0
    """The conversation begins with so many turns of the parent: its turns, then its answer."""
    shared_tokens: int = 0
    """The prompt begins with so many tokens of the parent: its prompt, then its sampled tokens."""
    turns: tuple[Turn, ...] | None
    """The conversation in the request, after the shared turns; null with `missing_parent`."""
    tools: tuple[Json, ...] | None
    """The tools in the request; null with `missing_parent`, and where they are the parent's."""
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
    """Only with `prompt=true`, after the shared tokens; null with `missing_parent`."""
    sampled_ids: list[int]
    logprobs: list[float]
    """The engine's natural log-probabilities, one per sampled token."""
    policy_versions: list[int]
    """The policy version that sampled each token."""
    temperature: float
    """The effective one."""
    asked: Json | None = None
    """Sampling parameters as the agent asked, where the run's `sampling.override` replaced them."""
    finish_reason: str | None
    queued_seconds: float
    first_token_seconds: float | None
    total_seconds: float
    created_at: datetime
    credit: CallCredit | None


class Span(Body):
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


class Sample(Body):
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
