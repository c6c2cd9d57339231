"""A group: the siblings of one task side by side."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from leyden.libs.contracts.api.body import Body
from leyden.libs.contracts.api.rollouts import CallCredit, RewardComponent, Rollout
from leyden.libs.contracts.conversation import Json


class SiblingCall(Body):
    """A model call of a sibling, without its tokens and messages."""

    id: str
    status: str
    trainable: bool
    untrainable_reason: str | None
    role: str | None
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str | None
    asked: str
    """Digest of the tokens that the prompt adds to those of earlier calls: two siblings with equal ones were asked the
    same."""
    answered: str
    """Digest of the sampled tokens: two siblings with equal ones answered the same."""
    text: str
    """The first 300 characters of the answer; empty without one."""
    tools: list[str]
    """Names of the tools that the answer calls."""
    credit: CallCredit | None


class Sibling(Rollout):
    """A rollout of a group with the parts of its reward and its calls; those of its counted attempt, else the last."""

    components: list[RewardComponent]
    shown_attempt: int | None = None
    """The attempt that made its calls; null before the first one."""
    calls: list[SiblingCall]
    """The first ones, in the order of their arrival."""
    call_count: int
    """Count of all its calls."""
    sampled_tokens: int
    """Tokens that the model sampled in all its calls."""


class GroupPolicy(Body):
    """The verdicts on a group for a further policy of its run."""

    name: str
    verdict: str | None
    """credited or excluded; null before credit."""
    reason: str | None
    """Why nothing of the group trains it."""
    has_variance: bool | None
    """False: no token that it may train has an advantage; null before credit."""
    step: int | None
    """Its optimiser step that consumed the group."""
    consumption: str | None
    """Its trainer's verdict: trained, no_variance, untrainable or stale; null before it."""


class Group(Body):
    """The siblings of one task: the unit of a baseline."""

    id: str
    run_id: str
    evaluation_id: str | None
    agent: str | None = None
    """The one of the run's `agents` that plays it; null for a run that has one agent."""
    number: int
    dataset_id: str
    task_number: int
    task: Json
    admitted_version: int
    state: str
    """open, complete or cancelled."""
    verdict: str | None
    """credited or excluded; null before credit, and in evaluations."""
    awaits_credit: bool
    """Whether the group is complete and credit will still give its verdict: not in evaluations, and not once the run
    is over."""
    reason: str | None
    """Why the group is excluded, or why none of its calls trains."""
    reward_mean: float | None
    """Over the siblings that credit counted; null before credit."""
    reward_std: float | None
    """The standard deviation of the population, over the same siblings."""
    has_variance: bool | None
    """False: no token that the run's own model may train has an advantage, be it that the siblings earned alike or that
    no call trains; null before credit."""
    step: int | None
    """The optimiser step that consumed it."""
    consumption: str | None
    """The trainer's verdict: trained, no_variance, untrainable or stale; null before it."""
    policies: list[GroupPolicy]
    """The further policies of the run that train, by name; the fields above are those of its own model."""
    siblings: list[Sibling]
    """By number."""
    rerolls: list[Rollout] = Field(default_factory=list)
    """Rollouts that repeat the first calls of a sibling, with baseline `monte_carlo`; they never train."""
    created_at: datetime
    finished_at: datetime | None
