"""How many rollouts a step samples, of which tasks, and how old their tokens may be."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from leyden.libs.contracts.config.document import Document
from leyden.libs.contracts.config.override import Override


class Curriculum(Document):
    """Draws tasks by the solve rate of their earlier groups in this run, in place of a new shuffle each epoch.

    A task's weight is 1 at `target` and before its first group, and falls linearly to `floor`.
    """

    target: float = Field(default=0.5, gt=0, lt=1)
    """The solve rate of which a group teaches most: the share of rollouts with a reward of at least 1."""
    floor: float = Field(default=0.1, gt=0, le=1)
    """The smallest weight: no task is left out for good."""
    window: int = Field(default=1000, ge=1, le=100_000)
    """The newest complete groups that count."""


class Replay(Document):
    """Uses finished groups again: a step trains them in addition to its `groups_per_step` new ones, as long as all
    their tokens are within `max_policy_lag`. The ratios to the policy that sampled them, with the run's correction,
    clips and masks, make up for the lag. Groups without variance are not used again, unless a critic or a
    teacher makes the advantages."""

    uses: int = Field(default=1, ge=1, le=64)
    """Further uses of a group after the step that it was sampled for."""
    share: float = Field(default=0.5, gt=0, le=8)
    """Replayed groups of a step, at most, as a share of `groups_per_step`."""
    priority: Literal["freshness", "advantage", "solve_rate"] = "freshness"
    """The groups that a step prefers: `freshness` those of the newest version, `advantage` those with the largest mean
    |advantage| of a call of the policy, `solve_rate` those of which the share of rollouts with a reward of at least 1
    is nearest to a half. The choice is biased: the step's gradient is that of the preferred groups more often, and no
    weight undoes it."""


class Sampling(Document):
    """Sampling of rollouts: how many for each step, and how old their tokens may be."""

    group_size: int = Field(default=8, ge=1, le=1024)
    """Rollouts per task; the baseline compares the rollouts of one group. Baseline `remax` adds one."""
    groups_per_step: int = Field(default=8, ge=1, le=4096)
    """Groups that one optimiser step consumes."""
    max_policy_lag: int = Field(default=1, ge=0, le=64)
    """η: maximum policy lag, in versions, of a token when it is trained. 0 alternates sampling and training."""
    max_attempts: int = Field(default=3, ge=1, le=100)
    """Maximum attempts of one rollout; infrastructure failures in all of them exclude it."""
    agent_failure: Literal["reward", "exclude"] = "reward"
    """A crash or timeout of the agent itself: `reward` gives it `failure_reward`, `exclude` drops the rollout.
    Evaluations count every failure, with `failure_reward`."""
    failure_reward: float | None = Field(default=None, ge=-1e6, le=1e6)
    """The reward of an agent's own failure, if `agent_failure` is `reward`. Null: the smallest reward of its group and
    of the run so far, at most 0, known when the group is complete, with all that was given to it; credit counts no
    intermediate reward above the worst sibling. So no failure earns more than the work."""
    failed_call: Literal["retry", "accept"] = "retry"
    """Policy for an attempt that succeeded although a model call failed on the platform's side without a successful
    retry: `retry` repeats the attempt like any infrastructure failure, `accept` counts its reward."""
    min_siblings: int = Field(default=2, ge=1, le=1024)
    """A group with fewer counted rollouts than this is excluded. Its task is sampled again, once; after that the next
    task takes its place."""
    refill_zero_variance: int = Field(default=0, ge=0, le=100)
    """Dynamic sampling: k lets a step replace up to k · `groups_per_step` groups without variance by groups of further
    tasks; those after them count, so that no step waits for ever. 0 replaces none. The step's mean is over groups with
    variance alone: its gradient grows by about 1 / P(variance), so compare learning rates with that in mind."""
    replay: Replay | None = None
    """Null: each group is used once."""
    curriculum: Curriculum | None = None
    """Null: each epoch is a new shuffle of all tasks."""
    seed: int = Field(default=0, ge=-(2**63), le=2**63 - 1)
    """Seed of the order of tasks."""
    skip_groups: int = Field(default=0, ge=0, le=2**31 - 1)
    """Groups of the order of tasks before the run's first. A continued run with the same dataset and seed gets those of
    the steps before it, so that it goes on with the next tasks; 0 begins at the first task."""
    temperature: float | None = Field(default=None, ge=0, le=10)
    """Temperature of calls without one; the agent's own value overrides it."""
    override: Override | Literal["keep"] = "keep"
    """`keep` samples as the agent asks, so that calls with parameters that no trainer reproduces do not train."""

    @property
    def refills(self) -> int:
        """Groups without variance that one step may replace."""
        return self.refill_zero_variance * self.groups_per_step

    @property
    def replays(self) -> int:
        """Groups that one step may use again."""
        return 0 if self.replay is None else int(self.replay.share * self.groups_per_step)

    @model_validator(mode="after")
    def _a_replay_is_possible(self) -> Sampling:
        if self.replay is None:
            return self
        if self.max_policy_lag == 0:
            raise ValueError(
                "replay trains tokens of versions before the newest, which max_policy_lag 0 forbids: write"
                " max_policy_lag 1 or more, or remove replay"
            )
        if self.replays == 0:
            raise ValueError(
                f"replay.share {self.replay.share} of groups_per_step {self.groups_per_step} is less than one group:"
                f" write at least {1 / self.groups_per_step:.4g}"
            )
        return self

    @model_validator(mode="after")
    def _a_group_can_be_complete(self) -> Sampling:
        if self.min_siblings > self.group_size:
            raise ValueError(
                f"min_siblings {self.min_siblings} exceeds group_size {self.group_size}: no group could count"
            )
        return self
