"""Runs with their steps, versions, agents, metrics and evaluations."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from leyden.libs.contracts.api.alarms import Alarm
from leyden.libs.contracts.api.body import Body, Page, RequestBody
from leyden.libs.contracts.call_counts import CallCounts
from leyden.libs.contracts.config import Computation, RunConfig
from leyden.libs.contracts.conversation import Json


class NextStep(Body):
    """The groups that the next optimiser step will train, as far as they have come: the most advanced ones that no step
    has used. Re-rolls are not counted."""

    number: int
    rollouts: int
    """Rollouts that the step needs; those that are not admitted yet included."""
    ended: int
    """Those whose agent has ended for good."""
    graded: int
    """Those of them that wait for no grade."""
    credited: int
    """Those of groups that credit has finished."""


class Progress(Body):
    """Progress of a run."""

    step: int
    """Completed optimiser steps."""
    steps: int | None
    """Configured optimiser steps; null where the document has none."""
    policy_version: int | None
    """The newest version; null before the trainer has started."""
    rollouts: dict[str, int]
    """Training rollouts by state."""
    reward_mean: float | None
    """Mean reward of the rollouts that the last step consumed."""
    next_step: NextStep | None = None
    """Null where no further step is due, or steps are made of demonstrations. Only in the answer about one run."""
    seconds_left: float | None = None
    """An estimate of the time until the last configured step: the median time between the newest 21 steps for each step
    that is left, less the time since the last one. After one step alone, the time from the run's start to it. Null
    before a step has ended and while the run does not train."""


class RunParent(Body):
    """The run and the version with which another run began."""

    run_id: str
    """It may be deleted by now."""
    version: int


class TrainerEnd(Body):
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


class RunPolicy(Body):
    """A further policy of a run: it learns from the run's groups beside the run's own model, and has its phase."""

    id: str
    """The key of its trainer, versions, steps and samples in logs, folders and tables."""
    trains: bool
    """False: it is frozen."""
    step: int
    """Completed optimiser steps."""
    steps: int | None
    """Configured optimiser steps; null where the document has none."""
    policy_version: int | None
    """The newest version; null before the trainer has started."""
    parent: RunParent | None = None
    """The run and the version with which the policy began: its policy of the same name. Null for the base model."""
    trainer_ends: int = 0
    """How often a trainer of the policy ended without a plan; only in the answer about one run."""
    last_trainer_end: TrainerEnd | None = None
    """The last of these ends."""
    best_version: int | None = None
    """The version with the number of the run's best one, if its files are there. Only in the answer about one run."""
    best_version_reason: str | None = None
    """As that of the run."""
    weights_bytes: int | None = None
    """Disk space of its versions, without checkpoints; only in the answer about one run."""
    computation: Computation | None = None
    """As that of the run, by the policy's first trainer; only in the answer about one run."""
    alarms: list[Alarm] = Field(default_factory=list)
    """Its alarms that last."""


class AgentProgress(Body):
    """The training rollouts of one of a run's `agents`."""

    step: int | None
    """The last step that consumed rollouts of it; null before."""
    rollouts: int
    """Finished rollouts of it that this step consumed."""
    reward_mean: float | None
    """Their mean reward."""


class Run(Body):
    """One training job."""

    id: str
    name: str
    dataset_id: str
    intent: str
    """The requested state: running, paused, cancelled or deleted."""
    phase: str
    """The present phase."""
    reason: str | None
    """The reason why the run waits, failed or stopped early, or why its stored document does not parse."""
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    progress: Progress
    pruned: bool = False
    """Whether the run's calls, spans, credits and samples have been deleted."""
    alarms: list[Alarm] = Field(default_factory=list)
    """Those that last, or lasted when it ended; in the answer that creates it, about its settings."""
    calls: CallCounts = CallCounts()
    """Counts of the model calls of its credited groups; only in the answer about one run."""
    trainer_ends: int = 0
    """How often a trainer of the run ended without a plan; only in the answer about one run."""
    last_trainer_end: TrainerEnd | None = None
    """The last of these ends."""
    excluded: dict[str, int] = Field(default_factory=dict)
    """Training rollouts that left their groups, by reason: the 20 most frequent. Only in the answer about one run."""
    judge_tokens: int | None = None
    """Tokens that the run's judges have used, questions and answers together; null where no judge has answered. Only in
    the answer about one run."""
    judge_cost: float | None = None
    """Their cost, in the currency of the prices in GRADER_PROVIDERS; null where no token had a price. Only in the
    answer about one run."""
    judge_unpriced_tokens: int | None = None
    """Those of `judge_tokens` whose provider had no price, which `judge_cost` lacks."""
    best_version: int | None = None
    """The version from 1 that earned most in evaluations, else in training. Only in the answer about one run."""
    best_version_reason: str | None = None
    """How the best version was found. Without a version: why none is called best, or null before any reward."""
    weights_bytes: int | None = None
    """Disk space of the run's versions, without checkpoints; only in the answer about one run."""
    agent_names: list[str] = Field(default_factory=list)
    """The names of its `agents`; of one agent its command, and `external` where clients start it."""
    model: str | None = None
    """The folder of its base model: the document's, else the one with which it began, else that of its pool. Null
    while the pool is unknown."""
    parent: RunParent | None = None
    """The run that this one continues; its version is this run's version 0. Null for the base model."""
    policies: dict[str, RunPolicy] = Field(default_factory=dict)
    """The run's further policies by name, without those of a provider: nothing of theirs is made here. The run's own
    model is in the fields above. `?policy=NAME` asks for a policy's steps, metrics, versions and samples."""
    agents: dict[str, AgentProgress] = Field(default_factory=dict)
    """The run's agents by name, in the order of the document; empty for a run that has one agent. Only in the answer
    about one run. The metric `agent.NAME.reward_mean` has their curves."""
    computation: Computation | None = None
    """The settings that the document leaves to the trainer's device, as its first trainer resolved them; null before.
    Only in the answer about one run."""
    allowed_actions: list[str]
    """Some of pause, resume, cancel, evaluate and continue: the last is `POST /v1/runs/RUN/resume` with a body, which
    makes a new run."""
    config: RunConfig | None
    """The document; null where the stored one does not parse, as `reason` says."""


RUN_PARTS = ("run", "steps", "evaluations", "rollouts")
"""The names in the stream of what changed in a run."""
RunSort = Literal["newest", "oldest", "highest", "lowest", "most_steps", "fewest_steps", "phase"]


class RunPage(Page[Run], use_attribute_docstrings=True):
    """A page of runs."""

    total: int | None = None
    """Count of all runs that the filter leaves; only with `count=true`, and on the first page alone."""


class ResumeRequest(RequestBody):
    """Continues a run that has ended: a new run with an amended document begins with one of its versions."""

    changes: Json = Field(default_factory=dict)
    """Laid over the run's document, such as `{"optimizer": {"learning_rate": 5e-7}}`. `training.steps` are the steps of
    the new run; left out, those that the ended run did not make. `model` and `training.lora` cannot change, nor `model`
    and `lora` of a policy. Null drops a key of a map, such as `{"agent": {"environment": {"A": null}}}`, as in a JSON
    merge patch (RFC 7396); it is the value of a field with a fixed name. So a policy that is null is removed; a new one
    begins with its base model, and one that is frozen now answers with the version that it begins with."""
    from_version: int | None = Field(default=None, ge=0, le=2**31 - 1)
    """Null: the newest. Further policies begin with their version of the same number, or with their newest where that
    has no files. The optimiser continues, too, if the version's checkpoint is there (`training.keep_checkpoints`) and
    its moments are those of this document: not after another `training.frozen`, `training.router`, `optimizer.beta1` or
    `beta2`, nor between fine-tuning and reinforcement. The metric `optimizer_inherited` of the first step says so."""
    policy_versions: dict[str, Annotated[int, Field(ge=0, le=2**31 - 1)]] = Field(default_factory=dict, max_length=20)
    """Other versions for further policies to begin with, by policy."""


class PrunedRun(Body):
    """The result of pruning a run."""

    run_id: str
    freed_bytes: int
    """Disk space freed in Postgres; 0 when the run was pruned before."""


class EvaluationRequest(RequestBody):
    """Requests an evaluation of one policy version; omitted fields default to the run's `evaluation`."""

    policy_version: int | None = Field(default=None, ge=0, le=2**31 - 1)
    """Null: the last version, measured after training has ended."""
    dataset: str | None = Field(default=None, min_length=1, max_length=200)
    """Id or name; needed where the run's document plans no evaluation."""
    rollouts_per_task: int | None = Field(default=None, ge=1, le=1024)
    max_tasks: int | None = Field(default=None, ge=1, le=2**31 - 1)


class Statistic(Body):
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


class Fact(Body):
    """A grader's fact, aggregated over many rollouts."""

    name: str
    kind: Literal["share", "number", "text"]
    """`share`: booleans and numbers that are all 0 or 1."""
    statistic: Statistic | None = None
    """For shares and numbers."""
    counts: dict[str, int] | None = None
    """For texts: the most frequent values."""
    total: int
    """Rollouts with a value of this name."""


class PassAt(Body):
    """pass@k: the chance that k rollouts of a task solve it at least once, without bias, as the mean over tasks."""

    k: int
    mean: float
    tasks: int
    """Those that have at least k rollouts with a reward; with several agents, each task counts for each of them."""


class EvaluationResults(Body):
    """Results of an evaluation, computed from stored outcomes at each request."""

    rollouts: dict[str, int]
    """Number of rollouts by state. One that was excluded without a grade, and graded since, is among the finished."""
    pending: int = 0
    """Rollouts whose reward has not come: their components are not graded, or (`runner.stdout_reward: false`) nobody
    gave one. They count in no mean."""
    complete: bool
    """Whether all rollouts ended, cancelled ones among them, and none is pending."""
    reward: Statistic | None
    """Null while nothing is measured."""
    counted_tasks: int = 0
    """The tasks by which it is compared: those of which each of the run's agents has a rollout with a reward."""
    agents: dict[str, Statistic] = Field(default_factory=dict)
    """The reward of each of the run's `agents` that has one, by name; empty for a run that has one agent."""
    pass_at: list[PassAt] = Field(default_factory=list)
    """For k of 1, 2, 4, … and all rollouts of a task. Empty for one rollout a task, and where a reward is neither 0 nor
    1. Rollouts without a reward are left out."""
    facts: list[Fact]

    @property
    def is_whole(self) -> bool:
        """Whether no rollout was cut off: those that end first, which a cancelled run leaves, are not a fair draw."""
        return self.complete and not self.rollouts.get("cancelled")


class Evaluation(Body):
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
    tasks: int
    """Its tasks: the dataset's, at most `max_tasks`."""
    created_at: datetime
    results: EvaluationResults


class StepComponent(Body):
    """One component of the rewards of a step's rollouts."""

    mean: float | None
    """Before the weight, over the rollouts that have it; null where none has."""
    failed_share: float
    """The share of the graded rollouts for which it failed, excluded ones included."""


class Step(Body):
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
    components: dict[str, StepComponent] = Field(default_factory=dict)
    """The components of the reward by name, in the order of the document; none without `reward`."""
    started_at: datetime
    created_at: datetime


class RunAgent(Body):
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


class PolicyVersion(Body):
    """One version of a run's weights."""

    version: int
    path: str
    content_sha256: str
    size_bytes: int
    pruned_at: datetime | None
    created_at: datetime
    engines: int | None = None
    """Engines that were seen serving it at their last poll; null in answers of an older platform."""
    reward_mean: float | None = None
    """Mean reward of the training rollouts of complete groups that began with it; those of a further policy are its
    run's. Null where none has a reward."""


class VersionFile(Body):
    """One file of a policy version."""

    name: str
    """Its path within the folder, such as `adapter/adapter_model.safetensors`."""
    size_bytes: int


class VersionFiles(Body):
    """The files of a policy version, as the API's machine sees them."""

    version: int
    content_sha256: str
    """Digest over the weight files, as the trainer recorded it."""
    files: list[VersionFile] | None
    """By name; null where the API cannot read them."""
    reason: str | None = None
    """Why it cannot, with the remedy."""


class Series(Body):
    """One metric over the steps of a run."""

    name: str
    points: list[tuple[int, float, float]]
    """Each point: step, seconds since the start of the run's first step, value."""


class Metrics(Body):
    """Time series of the metrics of a run, or of one of its further policies."""

    run_id: str
    policy: str | None = None
    """The further policy; null for the run's own model."""
    names: list[str]
    """All available metric names."""
    series: list[Series]
