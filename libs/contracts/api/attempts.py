"""Attempts of agents that the platform does not start: a client leases one, keeps it by heartbeats, and ends it."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from leyden.libs.contracts.api.body import Body, RequestBody
from leyden.libs.contracts.config.agents import AgentName
from leyden.libs.contracts.conversation import Json
from leyden.libs.contracts.rewards import MAX_REWARD, RewardValue, is_reward
from leyden.libs.contracts.states import OutcomeKind

RewardName = Annotated[str, Field(min_length=1, max_length=200)]


class LeaseRequest(RequestBody):
    """Requests the next due task of a run."""

    worker: str = Field(default="client", min_length=1, max_length=100, pattern=r"^[\w.@:-]+$")
    """A name for people: the owner of the attempt."""
    key: str | None = Field(default=None, min_length=1, max_length=100, pattern=r"^[\w.:-]+$")
    """The client's choice, another for each attempt: while that attempt lives, a repeat gets it again."""
    wait_seconds: float = Field(default=0.0, ge=0, le=30)
    """So long the answer waits for a task that is due."""
    agent: AgentName | None = None
    """The one of the run's `agents` that the client plays; null for a run that has one agent."""


class LeasedAttempt(Body):
    """An attempt, for the client that runs its agent."""

    id: str
    """Names the attempt in heartbeats and at its end; it is also the right to them."""
    run_id: str
    rollout_id: str
    number: int
    """The attempt's number in its rollout, from 1."""
    agent: str | None = None
    """The one of the run's `agents` that plays it; null for a run that has one agent."""
    dataset_id: str
    task_number: int
    task: Json
    base_url: str
    """The model's address for all attempts: the key alone names this one. Anthropic's clients want it without `/v1`."""
    api_key: str
    """For the model and for telemetry; it opens nothing once the attempt has ended."""
    environment: dict[str, str]
    """The variables that a runner would give to the agent, addresses of this attempt alone among them."""
    takes_reward: bool
    """Whether the end may have a reward of the agent's."""
    lease_seconds: float
    """The attempt is lost after so long without a heartbeat; send three in that time."""
    timeout_seconds: float
    """The agent's time. An attempt that takes longer ends as `timeout`."""


class StopReason(StrEnum):
    """The reason to stop an agent, for an answer to a heartbeat."""

    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    LEASE_LOST = "lease_lost"
    ENDED = "ended"


class Heartbeat(Body):
    """The answer to a heartbeat."""

    lease_expires_at: datetime
    stop: StopReason | None
    """Null: go on. Else the attempt is over: stop the agent, and lease another one."""
    reason: str | None
    """For people."""


class EndRequest(RequestBody):
    """The end of an attempt. The same one again changes nothing."""

    outcome: Literal["succeeded", "failed", "given_back"]
    """`failed`: the agent failed; `given_back`: the client did, and the task runs again."""
    reason: str | None = Field(default=None, max_length=10_000)
    """The cause of a failure, for people."""
    output: str = ""
    """The agent's answer, which graders read. Its end is stored (`runner.output_bytes`)."""
    reward: RewardValue | None = None
    rewards: dict[RewardName, RewardValue] | None = Field(default=None, min_length=1, max_length=100)
    """Parts of the reward by name; their sum, within ±1,000,000, counts where `reward` is left out."""
    facts: dict[str, Any] = Field(default_factory=dict, max_length=100)
    """More about the attempt, for people, such as `{"turns": 3}`."""

    @model_validator(mode="after")
    def _a_success_alone_has_a_reward(self) -> EndRequest:
        if self.outcome != "succeeded" and (self.reward is not None or self.rewards is not None):
            raise ValueError(f"outcome {self.outcome!r} has no reward: remove it, or write 'succeeded'")
        return self

    @model_validator(mode="after")
    def _the_sum_is_a_reward(self) -> EndRequest:
        if self.total is not None and not is_reward(self.total):
            raise ValueError(f"the sum of rewards, {self.total:g}, is beyond {MAX_REWARD:,.0f}: send smaller ones")
        return self

    @property
    def total(self) -> float | None:
        """The agent's reward; None without one."""
        return sum(self.rewards.values()) if self.reward is None and self.rewards else self.reward


class EndedAttempt(Body):
    """An attempt that has ended."""

    id: str
    rollout_id: str
    number: int
    kind: OutcomeKind
    """As the platform counts it: a failure while gateway or collector were down is `infra_error`, and runs again."""
    reward: float | None
    detail: str | None
