"""The configuration of a run. Validation refuses unknown or contradictory fields with their path and the remedy.

Defaults follow the recipe of `make demo`; `docs/how-to` explains when to change them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from leyden.libs.contracts.placeholders import task_fields
from leyden.libs.contracts.recipes import RECIPES, expanded

Argument = Annotated[str, Field(max_length=100_000, pattern=r"^[^\x00]*$")]
"""A word of a command or a value of its environment; Linux limits one to 128 KiB."""
VariableName = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^=\x00]+$")]
Word = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00]+$")]
FolderPath = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]+$")]


PoolName = Annotated[str, Field(max_length=30, pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")]
"""A pool of engines. Objects of Kubernetes have it in their names."""
DEFAULT_POOL = "default"


class _Document(BaseModel):
    # Strict: no text in place of a number, and no boolean either.
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, strict=True, allow_inf_nan=False
    )


RESERVED_NAMES = frozenset(
    {
        *("OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_API_KEY", "OPENAI_CUSTOM_HEADERS"),
        *("ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", "ANTHROPIC_CUSTOM_HEADERS"),
        *("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_RESOURCE_ATTRIBUTES", "TRACEPARENT"),
    }
)
"""Variables of agents that carry the platform's addresses, keys and ids, beside those in `LEYDEN_`."""


class Agent(_Document):
    """The command that runs the agent once; the environment holds its task and its endpoints."""

    command: list[Argument] = Field(min_length=1, max_length=256)
    """Program and arguments, no shell. `{python}` as first word is the runner's own interpreter. `{task.question}` is
    that field of the task, `{task.user.name}` one of an object in it, `{task}` the complete task as JSON, and
    `{{task.question}}` the text `{task.question}`."""
    environment: dict[VariableName, Argument] = Field(default_factory=dict, max_length=256)
    """Variables added to the agent's environment, with placeholders as in `command`. Names that the platform sets
    itself are refused."""
    directory: Annotated[FolderPath, Field(pattern=r"^/[^\x00]*$")] | None = None
    """A folder whose files are copied into the attempt's working folder; an absolute path on the runner's machine."""

    task: Literal["environment", "stdin"] = "environment"
    """The way of the task to the agent: `LEYDEN_TASK` and `LEYDEN_TASK_FILE` alone, or as JSON on stdin, too. In a pod
    the image needs `/bin/sh` for stdin."""
    task_file: Annotated[FolderPath, Field(max_length=255)] | None = None
    """One more file with the task as JSON: a name in the working folder, such as `input.json`, in place of a file of
    `directory` with that name; in a pod an absolute path, such as `/app/input.json`."""

    def task_fields(self) -> list[tuple[str, ...]]:
        """The paths of the task's fields that placeholders name."""
        return task_fields([*self.command, *self.environment.values()])

    @model_validator(mode="after")
    def _platform_names_are_reserved(self) -> Agent:
        reserved = sorted(name for name in self.environment if name.startswith("LEYDEN_") or name in RESERVED_NAMES)
        if reserved:
            raise ValueError(f"environment sets {reserved}, which the platform sets itself: remove them")
        return self


class _Runner(_Document):
    timeout_seconds: float = Field(default=300.0, gt=0, le=86_400)
    """Maximum wall time of one attempt; then SIGTERM, a grace period, SIGKILL, and the outcome `timeout`."""
    output_bytes: int = Field(default=1_000_000, ge=1_000, le=100_000_000)
    """The bytes of stdout and of stderr that are stored, from the end; the runner drops the rest."""
    grant_reward: bool = False
    """Whether the agent may post its own reward (LEYDEN_REWARD_URL)."""
    stdout_reward: bool = True
    """Whether the last line of the agent's stdout may hold its own reward. False: a success starts from 0, and rewards
    come from outside, telemetry with `grant_reward`, or `credit.air`."""


class ProcessRunner(_Runner):
    """Each attempt is a process tree on the runner's machine, for agents whose code is trusted."""

    type: Literal["process"] = "process"
    memory_bytes: int | None = Field(default=4 * 2**30, ge=2**24, le=2**60)
    """Resident memory of the agent's processes in sum, read twice a second; null for no limit."""
    cpu_seconds: int | None = Field(default=None, ge=1, le=10**9)
    """CPU time of each process of the agent (RLIMIT_CPU); null for no limit."""


def _process_by_default(document: Any) -> Any:
    return {"type": "process", **document} if isinstance(document, dict) else document


ImageName = Annotated[str, Field(max_length=500, pattern=r"^[a-z0-9][a-zA-Z0-9._/:-]*(@sha256:[0-9a-f]{64})?$")]
Quantity = Annotated[str, Field(pattern=r"^[0-9]{1,15}(\.[0-9]{1,9})?(m|k|[MGTPE]|[KMGTPE]i)?$")]
"""A Kubernetes quantity, such as `500m` or `2Gi`."""
LabelName = Annotated[str, Field(max_length=317, pattern=r"^([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,62})$")]
LabelValue = Annotated[str, Field(max_length=63, pattern=r"^[A-Za-z0-9._-]*$")]


class Resources(_Document):
    """Quantities by resource name, such as `{"cpu": "500m", "memory": "1Gi"}`."""

    requests: dict[LabelName, Quantity] = Field(default_factory=dict, max_length=20)
    limits: dict[LabelName, Quantity] = Field(default_factory=dict, max_length=20)


class Toleration(_Document):
    """A taint of nodes on which the agent may run, as Kubernetes defines it."""

    key: LabelName | None = None
    operator: Literal["Equal", "Exists"] = "Equal"
    value: LabelValue | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None


class KubernetesRunner(_Runner):
    """Each attempt is a Job of the Kubernetes cluster, in a pod of its own, for agents whose code is not trusted."""

    type: Literal["kubernetes"] = "kubernetes"
    image: ImageName
    """The image that holds the agent, with a tag other than `latest`, or a digest: attempts of one run are alike."""
    resources: Resources = Field(default_factory=Resources)
    """Added to those of the platform's pod template. A pod that exceeds its memory limit is the agent's own failure."""
    node_selector: dict[LabelName, LabelValue] = Field(default_factory=dict, max_length=20)
    """Labels that the agent's node must have."""
    tolerations: list[Toleration] = Field(default_factory=list, max_length=20)

    @model_validator(mode="after")
    def _the_image_is_pinned(self) -> KubernetesRunner:
        if "@" not in self.image:
            _, _, tag = self.image.rpartition("/")[2].partition(":")
            if tag in {"", "latest"}:
                raise ValueError(
                    f"image {self.image!r} may change during a run: name a tag other than latest, or a digest"
                )
        return self


RunnerConfig = Annotated[
    ProcessRunner | KubernetesRunner, Field(discriminator="type"), BeforeValidator(_process_by_default)
]
"""The backend that executes a run's attempts, by `type`."""


class Curriculum(_Document):
    """Draws tasks by the solve rate of their earlier groups in this run, in place of a new shuffle each epoch.

    A task's weight is 1 at `target` and before its first group, and falls linearly to `floor`.
    """

    type: Literal["solve_rate"] = "solve_rate"
    solved_at: float = Field(default=1.0, ge=-1e6, le=1e6)
    """The reward from which a rollout counts as solved."""
    target: float = Field(default=0.5, gt=0, lt=1)
    """The solve rate of which a group teaches most."""
    floor: float = Field(default=0.1, gt=0, le=1)
    """The smallest weight: no task is left out for good."""
    window: int = Field(default=1000, ge=1, le=100_000)
    """The newest complete groups that count."""


class Replay(_Document):
    """Uses finished groups again: a step trains them in addition to its `groups_per_step` new ones, as long as all
    their tokens are within `max_policy_lag`. The ratios to the policy that sampled them, with the run's correction,
    clips and masks, make up for the lag. Groups without variance are not used again."""

    uses: int = Field(default=1, ge=1, le=64)
    """Further uses of a group after the step that it was sampled for."""
    share: float = Field(default=0.5, gt=0, le=8)
    """Replayed groups of a step, at most, as a share of `groups_per_step`."""
    priority: Literal["freshness", "advantage", "solve_rate"] = "freshness"
    """The groups that a step prefers: `freshness` those of the newest version, `advantage` those with the largest mean
    |advantage| of a call, `solve_rate` those of which the share of solved rollouts is nearest to a half."""
    solved_at: float = Field(default=1.0, ge=-1e6, le=1e6)
    """The reward from which a rollout counts as solved."""


class Sampling(_Document):
    """Sampling of rollouts: how many for each step, and how old their tokens may be."""

    group_size: int = Field(default=8, ge=1, le=1024)
    """Rollouts per task; the baseline compares the rollouts of one group."""
    groups_per_step: int = Field(default=8, ge=1, le=4096)
    """Groups that one optimiser step consumes."""
    max_policy_lag: int = Field(default=1, ge=0, le=64)
    """η: maximum policy lag, in versions, of a token when it is trained. 0 alternates sampling and training."""
    max_attempts: int = Field(default=3, ge=1, le=100)
    """Maximum attempts of one rollout; infrastructure failures in all of them exclude it."""
    agent_failure: Literal["reward", "exclude"] = "reward"
    """A crash or timeout of the agent itself: `reward` gives it `failure_reward`, `exclude` drops the rollout."""
    failure_reward: float = Field(default=0.0, ge=-1e6, le=1e6)
    """The reward of an agent's own failure, if `agent_failure` is `reward`."""
    failed_call: Literal["retry", "accept"] = "retry"
    """Policy for an attempt that succeeded although a model call failed on the platform's side without a successful
    retry: `retry` repeats the attempt like any infrastructure failure, `accept` counts its reward."""
    min_siblings: int = Field(default=2, ge=1, le=1024)
    """A group with fewer counted rollouts than this is excluded, and a group of the next task replaces it."""
    refill_zero_variance: int = Field(default=0, ge=0, le=100)
    """Dynamic sampling: k lets a step replace up to k · `groups_per_step` groups without variance by groups of further
    tasks; those after them count, so that no step waits for ever. 0 replaces none."""
    replay: Replay | None = None
    """Null: each group is used once."""
    curriculum: Curriculum | None = None
    """Null: each epoch is a new shuffle of all tasks."""
    seed: int = Field(default=0, ge=-(2**63), le=2**63 - 1)
    """Seed of the order of tasks."""
    temperature: float | None = Field(default=None, ge=0, le=10)
    """Temperature of calls without one; the agent's own value overrides it."""

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


class Air(_Document):
    """Automatic intermediate rewards from the status of a call's tools (Agent Lightning, arXiv 2508.03680, 3.4.2)."""

    weights: dict[Word, Annotated[float, Field(ge=-1e6, le=1e6)]] = Field(default_factory=dict, max_length=1000)
    """Reward of a success by tool name; other tools earn `default_weight`."""
    default_weight: float = Field(default=0.0, ge=-1e6, le=1e6)
    failure: float = Field(default=0.0, ge=-1e6, le=0.0)
    """Reward of a failed tool call: 0, or a penalty as a negative factor of the tool's weight."""
    alpha: float | None = Field(default=None, ge=0.0, le=1.0)
    """Mix: calls earn α · status and the outcome counts (1 - α). Null adds both unscaled."""
    max_reward: float = Field(default=1.0, gt=0, le=1e6)
    """Bound on the magnitude of one call's tool reward, before α."""
    from_results: bool = True
    """Whether a tool call without a span takes its status from the tool's result in the conversation: an error, by
    Anthropic's mark or by the forms that frameworks give to errors; nothing, such as `null`, which earns nothing; or a
    success. False: from telemetry alone."""


class IdenticalCredit(_Document):
    """Every call gets the rollout's full return: the rule of the Agent Lightning paper."""

    type: Literal["identical"] = "identical"


class EqualSplitCredit(_Document):
    """Every call gets an equal part of the rollout's return."""

    type: Literal["equal_split"] = "equal_split"


class DiscountedCredit(_Document):
    """Every call gets its own reward and γ times the mean return of the calls that follow it in the call tree."""

    type: Literal["discounted"] = "discounted"
    gamma: float = Field(default=0.95, ge=0.0, le=1.0)


class TemporalCredit(_Document):
    """Every call gets its own reward and γ times the return of the rollout's next call in order of arrival, in whatever
    branch: for agents whose prompts do not extend each other, so that the call tree knows no order."""

    type: Literal["temporal"] = "temporal"
    gamma: float = Field(default=0.95, ge=0.0, le=1.0)


class TokenDiscountedCredit(_Document):
    """γ for each trained token up to the reward, along the call tree, as REINFORCE++ has it. The return of a call is
    that of its last token."""

    type: Literal["token_discounted"] = "token_discounted"
    gamma: float = Field(default=1.0, ge=0.0, le=1.0)


CreditRule = Annotated[
    IdenticalCredit | EqualSplitCredit | DiscountedCredit | TemporalCredit | TokenDiscountedCredit,
    Field(discriminator="type"),
]


class Overlong(_Document):
    """DAPO's soft penalty for long answers (arXiv 2503.14476, equation 13): 0 up to `max_tokens` - `buffer_tokens`
    sampled tokens, from there linear to -`penalty` at `max_tokens`, and no more above."""

    max_tokens: int = Field(ge=1, le=2**31 - 1)
    buffer_tokens: int = Field(default=4096, ge=1, le=2**31 - 1)
    penalty: float = Field(default=1.0, gt=0, le=1e6)
    per: Literal["rollout", "call"] = "rollout"
    """`rollout` counts all sampled tokens, for the outcome; `call` those of each call, for its own reward."""

    @model_validator(mode="after")
    def _the_buffer_is_below_the_maximum(self) -> Overlong:
        if self.buffer_tokens > self.max_tokens:
            raise ValueError(
                f"buffer_tokens {self.buffer_tokens} exceeds max_tokens {self.max_tokens}: write at most as many"
            )
        return self


class Shaping(_Document):
    """Changes the outcome of a rollout (its reward without those of single calls) before credit: the clip first, then
    the scale, then the penalty. The store keeps the outcome as it came."""

    clip_low: float | None = Field(default=None, ge=-1e6, le=1e6)
    clip_high: float | None = Field(default=None, ge=-1e6, le=1e6)
    scale: float = Field(default=1.0, gt=0, le=1e6)
    overlong: Overlong | None = None

    @model_validator(mode="after")
    def _the_clip_has_room(self) -> Shaping:
        if self.clip_low is not None and self.clip_high is not None and self.clip_low >= self.clip_high:
            raise ValueError(f"clip_low {self.clip_low} is not below clip_high {self.clip_high}: exchange them")
        return self


class Baseline(_Document):
    """The baseline that is subtracted from a return, computed over the rollouts of a group."""

    type: Literal["none", "mean", "mean_std", "leave_one_out", "opo", "ema", "value"] = "mean"
    """`mean` is Dr. GRPO, `mean_std` GRPO, `leave_one_out` RLOO; `opo` weighs each rollout's return with its trained
    tokens (OPO). `ema` is an average over the run's earlier groups, for groups of one.
    `value` leaves advantages to `algorithm.critic`."""
    per: Literal["rollout", "state", "role", "depth", "gigpo"] = "rollout"
    """One statistic per group; one per state: the group's calls with the same tool history; one per role of the run's
    `roles`, over the rollouts in which it called the model; one per depth: the group's calls with as many calls before
    them. `gigpo` adds the advantage of the rollout's total return in its group and
    `state_weight` times that of the call's return in its state."""
    state_weight: float = Field(default=1.0, ge=0, le=1e6)
    """ω of `gigpo`."""
    ema_decay: float = Field(default=0.9, gt=0, lt=1)
    """Share of the earlier average that stays when `ema` adds a group; the first group has no advantage."""
    min_spread: float = Field(default=0.0, ge=0, le=1e6)
    """Rollouts whose returns differ by at most this are equal, and have no advantage."""
    whiten: bool = False
    """Whether the trainer normalises the advantages of a step's trained tokens to mean 0 and variance 1, as
    REINFORCE++ does: with `none` and rule `token_discounted`, or with `mean` (REINFORCE++-baseline)."""

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> Baseline:
        if self.whiten and self.type == "mean_std":
            raise ValueError("whiten normalises again what 'mean_std' has normalised: write type 'mean' or drop whiten")
        if self.type == "ema" and self.per != "rollout":
            raise ValueError(f"per '{self.per}' compares siblings, which 'ema' does not: write per 'rollout'")
        if self.type == "none" and self.per == "gigpo":
            raise ValueError("per 'gigpo' compares siblings, which 'none' does not: write type 'mean' or 'mean_std'")
        fields = type(self).model_fields
        for name, acts in (
            ("state_weight", self.per == "gigpo"),
            ("ema_decay", self.type == "ema"),
            ("min_spread", self.type not in {"none", "ema", "value"}),
        ):
            if getattr(self, name) != fields[name].default and not acts:
                raise ValueError(f"{name} has no effect with type '{self.type}' and per '{self.per}': remove it")
        return self


class Credit(_Document):
    """Credit assignment: computes one advantage per model call from rewards."""

    rule: CreditRule = Field(default_factory=DiscountedCredit)
    air: Air | None = None
    """Automatic intermediate rewards; null: only outcomes and explicit rewards count."""
    shaping: Shaping | None = None
    """Clip, scale and length penalty of outcomes; null: they count as they are."""
    baseline: Baseline = Field(default_factory=Baseline)
    auxiliary_calls: Literal["leave_out", "train"] = "leave_out"
    """Calls beside the agent's work, such as the title of a conversation: without a role, tools, an earlier call or a
    later one, in a rollout whose other calls offer tools. `leave_out`: they get no credit and do not train."""

    @model_validator(mode="after")
    def _states_need_call_returns(self) -> Credit:
        if self.baseline.per not in {"rollout", "role"} and self.rule.type == "identical":
            raise ValueError(
                f"credit.baseline.per '{self.baseline.per}' compares returns of calls, but credit.rule 'identical'"
                " gives every call of a rollout the same: write rule 'discounted' or per 'rollout'"
            )
        if self.baseline.type != "none" and self.rule.type == "token_discounted":
            raise ValueError(
                f"credit.rule 'token_discounted' gives each token its own return, and baseline '{self.baseline.type}'"
                " compares calls: write baseline 'none', with whiten true for REINFORCE++"
            )
        return self


class BypassCorrection(_Document):
    """π_x = μ: the ratio is taken to the engine's own log-probabilities; one forward pass."""

    type: Literal["bypass"] = "bypass"


_WEIGHT_BOUNDS = {
    "tis_token": (0.0, 2.0),
    "tis_seq": (0.0, 2.0),
    "icepop": (0.5, 5.0),
    "mis_geo": (0.99, 1.01),
    "seq_mask": (0.0, 3.0),
}


class DecoupledCorrection(_Document):
    """π_x recomputed by the trainer at the step's start; importance weights correct for the sampler."""

    type: Literal["decoupled"] = "decoupled"
    weights: Literal["tis_token", "tis_seq", "icepop", "mis_geo", "seq_mask"] = "tis_token"
    """The weight of a token from π_old / μ. `tis_token`: the token's ratio, at most `cap`. `tis_seq`: the product over
    its row, at most `cap`. `icepop`: the token's ratio, 0 outside [`floor`, `cap`]. `seq_mask`: the product over its
    row, 0 above `cap`. `mis_geo`: 1, and 0 where the row's geometric mean is outside [`floor`, `cap`]."""
    cap: float | None = Field(default=None, gt=0, le=1e6)
    """C, the upper bound; null for 2 with `tis_token` and `tis_seq`, 5 with `icepop`, 1.01 with `mis_geo`, 3 with
    `seq_mask`."""
    floor: float | None = Field(default=None, gt=0, le=1e6)
    """The lower bound of `icepop` and `mis_geo`; null for 0.5 and 0.99."""

    @property
    def bounds(self) -> tuple[float, float]:
        """The lower and the upper bound of `weights`."""
        low, high = _WEIGHT_BOUNDS[self.weights]
        return low if self.floor is None else self.floor, high if self.cap is None else self.cap

    @model_validator(mode="after")
    def _bounds_are_a_band(self) -> DecoupledCorrection:
        low, high = self.bounds
        if self.floor is not None and self.weights not in {"icepop", "mis_geo"}:
            raise ValueError(f"floor has no effect with weights '{self.weights}': remove it, or write weights 'icepop'")
        if low >= high:
            raise ValueError(f"floor {low} is not below cap {high}: lower floor, or raise cap")
        return self


Correction = Annotated[BypassCorrection | DecoupledCorrection, Field(discriminator="type")]


class Critic(_Document):
    """A value head on the policy's last hidden states. Its values and GAE (arXiv 1506.02438) make the advantages."""

    per: Literal["token", "call"] = "token"
    """`token`: a value before each sampled token, as in PPO. `call`: one before each call, as a learned baseline."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount from one token, or call, to the next."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """λ of GAE: 1 is the return minus the value, 0 the reward plus the change of the value."""
    value_clip: float | None = Field(default=0.2, gt=0, le=1e6)
    """Bound on a value's distance from that at the start of the batch, in the value loss; null for none."""
    coefficient: float = Field(default=0.5, gt=0, le=1e6)
    """Weight of the value loss beside the policy loss."""
    warmup_steps: int = Field(default=0, ge=0, le=1_000_000)
    """First steps, in which only the value head learns."""
    learning_rate: float = Field(default=1e-3, gt=0, le=1.0)
    """The value head's own; it follows the schedule of `optimizer.learning_rate`."""


class _Algorithm(_Document):
    weighting: Literal["rollout_mean", "token_mean", "seq_mean_token_mean", "prompt_mean", "rollout_sum_const"] = (
        "rollout_mean"
    )
    """Aggregation of token losses (learning specification 6.2)."""
    sum_constant: int | None = Field(default=None, ge=1, le=10**9)
    """L_const of `rollout_sum_const`."""
    correction: Correction = Field(default_factory=BypassCorrection)
    critic: Critic | None = None
    """Learned values in place of a baseline over siblings; with `credit.baseline.type: value`. Null for none."""
    kl_coefficient: float = Field(default=0.0, ge=0.0, le=1e6)
    """β of the KL penalty to policy version 0; 0 for none."""
    kl_estimator: Literal["k1", "k2", "k3", "k3+"] = "k3"
    """The estimate of KL(π ‖ reference) at a sampled token, with d = log π - log reference: `k1` d, `k2` d²/2, `k3`
    e^-d + d - 1; `k3+` has k3's value and k2's gradient, which is the KL's own."""
    kl_in: Literal["loss", "reward"] = "loss"
    """`loss` adds β times the estimate to each token's loss. `reward` subtracts it from each token's reward: a token's
    advantage falls by the sum from it to the end of its row (discounted under rule `token_discounted`)."""
    mask_ratio_above: float | None = Field(default=None, gt=1.0, le=1e6)
    """Off-policy mask: tokens whose π_old / μ is above this or below its inverse do not train, in both corrections."""
    mini_batches: int = Field(default=1, ge=1, le=4096)
    """Updates of one pass over a step's groups (verl: batch / `ppo_mini_batch_size`). The seed shuffles the groups; a
    group's rollouts stay together, and denominators count the tokens of one mini-batch."""
    epochs: int = Field(default=1, ge=1, le=100)
    """Passes over a step's groups (verl: `ppo_epochs`, TRL: `num_iterations`). With more than one update a step, π_old
    is computed once at its start, and clips act under every correction."""

    @property
    def trains_every_row(self) -> bool:
        """Whether rows without any advantage have a gradient, too."""
        return self.kl_coefficient > 0 or self.critic is not None

    @model_validator(mode="after")
    def _constant_where_needed(self) -> _Algorithm:
        if (self.weighting == "rollout_sum_const") != (self.sum_constant is not None):
            raise ValueError(
                "sum_constant belongs to weighting 'rollout_sum_const' and only there: set both or neither"
            )
        return self

    @model_validator(mode="after")
    def _the_penalty_acts(self) -> _Algorithm:
        changed = [
            name for name in ("kl_estimator", "kl_in") if getattr(self, name) != _Algorithm.model_fields[name].default
        ]
        if changed and self.kl_coefficient == 0:
            raise ValueError(
                f"{', '.join(changed)} has no effect with kl_coefficient 0: set it, or remove {changed[0]}"
            )
        if self.kl_estimator == "k1" and self.kl_in == "loss":
            raise ValueError(
                "kl_estimator 'k1' in the loss has a gradient of mean 0, pure noise: write 'k3+' or 'k2', or kl_in"
                " 'reward'"
            )
        if self.kl_estimator == "k3+" and self.kl_in == "reward":
            raise ValueError("kl_estimator 'k3+' differs from 'k3' in its gradient, which a reward has not: write 'k3'")
        if self.kl_in == "reward" and self.critic is not None:
            raise ValueError("kl_in 'reward' has no effect on the rewards that a critic learns: write kl_in 'loss'")
        return self

    @model_validator(mode="after")
    def _one_mask(self) -> _Algorithm:
        if self.mask_ratio_above is not None and getattr(self.correction, "weights", None) == "icepop":
            raise ValueError(
                "mask_ratio_above drops tokens that correction.weights 'icepop' drops, too: remove mask_ratio_above"
            )
        return self

    @model_validator(mode="after")
    def _clips_can_act(self) -> _Algorithm:
        # Defaults pass: a stored document names every field.
        fields = type(self).model_fields.items()
        own = {name: field for name, field in fields if name not in _Algorithm.model_fields and name != "type"}
        changed = [name for name, field in own.items() if getattr(self, name) != field.default]
        if changed and self.correction.type == "decoupled" and self.mini_batches * self.epochs == 1:
            raise ValueError(
                f"{', '.join(changed)} cannot act with correction 'decoupled': a step makes one update, so the loss's"
                " ratio is 1. Remove it, write correction 'bypass', or set mini_batches or epochs above 1"
            )
        return self


class PpoClip(_Algorithm):
    """PPO's clipped objective with group advantages: GRPO, Dr. GRPO and DAPO by their settings."""

    type: Literal["ppo_clip"] = "ppo_clip"
    clip_low: float = Field(default=0.2, ge=0, lt=1)
    clip_high: float = Field(default=0.28, ge=0, le=1e6)
    dual_clip: float | None = Field(default=3.0, gt=1, le=1e6)
    """c: bound on the loss of tokens with a negative advantage; null for none."""


class Gspo(_Algorithm):
    """Sequence-level ratios (arXiv 2507.18071)."""

    type: Literal["gspo"] = "gspo"
    weighting: Literal["rollout_mean", "token_mean", "seq_mean_token_mean", "prompt_mean", "rollout_sum_const"] = (
        "seq_mean_token_mean"
    )
    clip_low: float = Field(default=3e-4, ge=0, lt=1)
    clip_high: float = Field(default=4e-4, ge=0, le=1e6)


class Cispo(_Algorithm):
    """Clipped importance weights on a REINFORCE gradient (MiniMax-M1, arXiv 2506.13585)."""

    type: Literal["cispo"] = "cispo"
    clip_low: float = Field(default=1.0, ge=0, le=1e6)
    clip_high: float = Field(default=4.0, ge=0, le=1e6)


class Sapo(_Algorithm):
    """A soft gate in place of a clip (arXiv 2511.20347): tokens far from the ratio 1 lose their gradient gradually."""

    type: Literal["sapo"] = "sapo"
    weighting: Literal["rollout_mean", "token_mean", "seq_mean_token_mean", "prompt_mean", "rollout_sum_const"] = (
        "seq_mean_token_mean"
    )
    tau_positive: float = Field(default=1.0, gt=0, le=1e3)
    """Steepness of the gate for tokens with a positive advantage."""
    tau_negative: float = Field(default=1.05, gt=0, le=1e3)
    """Steepness for the other tokens."""


class DppoTv(_Algorithm):
    """Importance sampling to the engine, without the tokens whose probability has moved too far (arXiv 2602.04879).

    It needs μ alone: no second forward pass.
    """

    type: Literal["dppo_tv"] = "dppo_tv"
    mask_low: float = Field(default=0.2, gt=0, le=1)
    """Tokens with a negative advantage do not train once π - μ is below -`mask_low`."""
    mask_high: float = Field(default=0.2, gt=0, le=1)
    """Tokens with a positive advantage do not train once π - μ is above `mask_high`."""
    drift_coefficient: float = Field(default=1e-3, ge=0, le=1e6)
    """Factor of (log π - log μ)², a penalty on every token with an advantage."""

    @model_validator(mode="after")
    def _needs_the_engines_ratio(self) -> DppoTv:
        if self.correction.type == "decoupled":
            raise ValueError(
                "correction 'decoupled' corrects for the engine, which 'dppo_tv' compares with itself: write 'bypass'"
            )
        return self


class ImportanceSampling(_Algorithm):
    """-A·ρ without a clip. Each token has its own ratio alone: what changed earlier in its row is a bias."""

    type: Literal["importance_sampling"] = "importance_sampling"


class Reinforce(_Algorithm):
    """-A·log π without a ratio: unbiased for tokens of the policy that is trained, and biased for older ones."""

    type: Literal["reinforce"] = "reinforce"


Algorithm = Annotated[
    PpoClip | Gspo | Cispo | Sapo | DppoTv | ImportanceSampling | Reinforce, Field(discriminator="type")
]


class Optimizer(_Document):
    """AdamW."""

    learning_rate: float = Field(default=1e-6, gt=0, le=1.0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0, le=1e3)
    max_grad_norm: float = Field(default=1.0, gt=0, le=1e9)
    warmup_steps: int = Field(default=0, ge=0, le=1_000_000)
    """Steps over which the rate grows linearly to `learning_rate`."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The rate after the warm-up: `linear` and `cosine` fall towards `minimum_share` until `training.steps`."""
    minimum_share: float = Field(default=0.0, ge=0, lt=1)
    """The share of `learning_rate` that `linear` and `cosine` approach."""

    @model_validator(mode="after")
    def _a_minimum_needs_a_fall(self) -> Optimizer:
        if self.minimum_share > 0 and self.schedule == "constant":
            raise ValueError(
                "minimum_share has no meaning with schedule 'constant': write schedule 'cosine' or 'linear', or remove"
                " minimum_share"
            )
        return self


class EarlyStopping(_Document):
    """Ends training before `training.steps`; the run completes, and its reason says why."""

    metric: Literal["evaluation_reward", "train_reward"] = "evaluation_reward"
    """The mean reward of each version that was measured on `evaluation.dataset`, or of each step's rollouts."""
    average_over: int = Field(default=1, ge=1, le=1000)
    """Values whose moving mean counts as one, against noise."""
    target: float | None = Field(default=None, ge=-1e6, le=1e6)
    """The run stops once the metric reaches this."""
    patience: int | None = Field(default=None, ge=1, le=1000)
    """The run stops once so many values in a row were not better than the best before them."""
    min_improvement: float = Field(default=0.0, ge=0, le=1e6)
    """A value counts as better if it exceeds the best by more than this."""

    @model_validator(mode="after")
    def _something_stops(self) -> EarlyStopping:
        if self.target is None and self.patience is None:
            raise ValueError("nothing would ever stop the run: set target, patience or both")
        if self.min_improvement > 0 and self.patience is None:
            raise ValueError("min_improvement has no meaning without patience: set patience, or remove it")
        return self


class Lora(_Document):
    """Low-rank adapters: they alone are trained, and the base model is the KL reference without a second copy.

    Adapters take a rate about a hundred times that of full training: set `optimizer.learning_rate` to 1e-4. There is no
    dropout: the policy that is trained must be the one that sampled.
    """

    rank: int = Field(default=16, ge=1, le=1024)
    alpha: float = Field(default=32.0, gt=0, le=1e6)
    """The adapter's product is scaled by alpha / rank."""
    target_modules: Literal["all-linear"] | Annotated[list[Word], Field(min_length=1, max_length=100)] = "all-linear"
    """Linear layers of the decoder by the last part of their names, such as `q_proj`; the head is none of them."""


class Role(_Document):
    """One of the agents of a run, recognised by its calls: a call has the first role whose conditions all hold."""

    name: Word
    agent_name: Word | None = None
    """Pattern (fnmatch) of the agent's name: the header `x-agent-name`, or the name in answers that it sends back."""
    identity: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")] | None = None
    """The fingerprint of its system prompt and tools, as `leyden run agents` shows it."""
    system: Annotated[str, Field(min_length=1, max_length=10_000, pattern=r"^[^\x00]+$")] | None = None
    """A text that its system prompt contains."""
    tools: list[Word] = Field(default_factory=list, max_length=100)
    """Names of tools that its calls offer to the model, among others."""
    model: Word | None = None
    """Pattern (fnmatch) of the model name that its calls ask for."""

    @property
    def has_conditions(self) -> bool:
        """False: every call has this role that no earlier role has."""
        return any((self.agent_name, self.identity, self.system, self.tools, self.model))


class Training(_Document):
    """Computation of a step: optimiser, precision, memory and checks."""

    steps: int = Field(default=100, ge=0, le=1_000_000)
    """Optimiser steps; 0 trains nothing: the run makes its evaluations of version 0 alone."""
    early_stopping: EarlyStopping | None = None
    """Null: training ends after `steps`."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of matrix products; master weights stay float32."""
    frozen: list[Word] = Field(default_factory=list, max_length=1000)
    """Patterns (fnmatch) of parameter names that are not trained, such as `model.layers.[0-9].*`. With `lora`, layers
    whose weights match get no adapter."""
    lora: Lora | None = None
    """Train LoRA adapters in place of the weights; null trains the weights."""
    micro_batch_tokens: int = Field(default=4096, ge=16, le=2**31 - 1)
    """Maximum tokens of one forward pass, without the shared prefix."""
    activation_checkpointing: bool = False
    """Compute each layer again in the backward pass: less memory, about a third more time."""
    attention: Literal["dense", "flex"] = "dense"
    """Kernel of attention on CUDA devices. `dense`: a mask of every pair of tokens. `flex`: FlexAttention, compiled,
    which leaves out blocks of tokens that do not see each other; no GPU has run it. A CPU has a kernel of its own."""
    max_logprob_gap: float = Field(default=0.1, gt=0, le=1e6)
    """Mean |trainer - engine| log-probability at equal versions above which the run fails (`TRAINER_GAP_PATIENCE`).
    Right implementations differ by 1e-5 in float32, and by 0.035 to 0.045 where one of them computes in bfloat16."""
    min_effective_share: float = Field(default=0.5, ge=0, le=1)
    """Effective sample size of trainer / engine at equal versions, as a share, below which the run fails, too."""
    constrained_calls: Literal["leave_out", "mask", "train"] = "leave_out"
    """Calls whose answer a grammar constrained (`response_format`, a required tool). `leave_out`: they do not train.
    `mask`: their tokens train, except those that the grammar left a probability of at least 0.999. `train`: all train.
    The engine's log-probabilities of such tokens are not the policy's, which `max_logprob_gap` sees."""
    keep_checkpoints: int = Field(default=2, ge=1, le=1_000_000)
    """Checkpoints with optimiser state kept on disk, newest first; version 0, the last and the best stay."""


MAX_PLANNED_EVALUATIONS = 1000


class Evaluation(_Document):
    """Rollouts on held-out tasks, never trained."""

    dataset: Word
    """Id or name of the dataset."""
    rollouts_per_task: int = Field(default=1, ge=1, le=1024)
    max_tasks: int | None = Field(default=None, ge=1, le=2**31 - 1)
    at_start: bool = True
    """Evaluate version 0 before the first step."""
    every: int | None = Field(default=None, ge=1, le=1_000_000)
    """Evaluate the version of every n-th step; training waits for it. Null: at start and end alone."""
    at_end: bool = True
    """Evaluate the last version after the last step."""

    def planned_versions(self, steps: int) -> list[int | None]:
        """The versions to measure, in order; None is the last one.

        >>> Evaluation(dataset="held-out", every=10).planned_versions(steps=30)
        [0, 10, 20, None]
        """
        end = steps if self.at_end else steps + 1
        between = [] if self.every is None else list(range(self.every, end, self.every))
        return [0] * self.at_start + between + [None] * self.at_end


class RunConfig(_Document):
    """The body of `POST /v1/runs`."""

    name: str = Field(min_length=1, max_length=200, pattern=r"^[\w][\w .:-]*$")
    recipe: Word | None = None
    """Settings to begin with (`leyden recipes`): the document overrides them. The stored one holds all values and no
    recipe."""
    dataset: Word
    """Id or name of the training dataset."""
    agent: Agent
    model: FolderPath | None = None
    """Absolute folder of the base model (Hugging Face format), no id of the Hub; null for the model of the pool."""
    pool: PoolName = DEFAULT_POOL
    """The pool of engines that samples the run (`leyden pools`). Runs of one pool take turns."""
    runner: RunnerConfig = Field(default_factory=ProcessRunner)
    roles: list[Role] = Field(default_factory=list, max_length=100)
    """Names for the agents of a rollout that has several, in the order in which they are tried."""
    train: list[Word] | None = Field(default=None, max_length=100)
    """The roles whose calls train; calls of other roles, or of none, stay context. Null: all calls train."""
    sampling: Sampling = Field(default_factory=Sampling)
    credit: Credit = Field(default_factory=Credit)
    algorithm: Algorithm = Field(default_factory=PpoClip)
    optimizer: Optimizer = Field(default_factory=Optimizer)
    training: Training = Field(default_factory=Training)
    evaluation: Evaluation | None = None

    @classmethod
    def stored(cls, document: Mapping[str, Any]) -> RunConfig:
        """Returns the run of a stored document, without what a newer version has added to it."""
        return cls.model_validate(document, extra="ignore")

    @model_validator(mode="after")
    def _a_critic_replaces_the_baseline(self) -> RunConfig:
        baseline, has_critic = self.credit.baseline, self.algorithm.critic is not None
        if has_critic and baseline.type != "value":
            raise ValueError(
                f"algorithm.critic computes advantages itself, but credit.baseline.type is {baseline.type!r}: write"
                " 'value', or remove the critic"
            )
        if not has_critic and baseline.type == "value":
            raise ValueError(
                "credit.baseline.type 'value' needs the values of a critic: set algorithm.critic, even to {}"
            )
        if has_critic and (baseline.per != "rollout" or self.credit.rule != DiscountedCredit()):
            raise ValueError(
                "credit.rule and credit.baseline.per do not act with algorithm.critic, which takes the calls' rewards:"
                " remove them, and set algorithm.critic.gamma and gae_lambda"
            )
        if has_critic and self.sampling.replay is not None and self.sampling.replay.priority == "advantage":
            raise ValueError(
                "sampling.replay.priority 'advantage' needs advantages before training, and algorithm.critic computes"
                " them in training: write 'freshness' or 'solve_rate'"
            )
        if has_critic and (baseline.whiten or self.sampling.refill_zero_variance):
            raise ValueError(
                "algorithm.critic whitens advantages itself and trains groups without variance: remove"
                " credit.baseline.whiten and sampling.refill_zero_variance"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _begins_with_its_recipe(cls, document: Any) -> Any:
        return expanded(document) if isinstance(document, Mapping) else document

    @field_validator("recipe")
    @classmethod
    def _a_recipe_exists(cls, name: str | None) -> str | None:
        if name is not None:
            raise ValueError(f"there is no recipe {name!r}: write one of {', '.join(RECIPES)}")
        return name

    @model_validator(mode="after")
    def _a_moving_average_needs_no_siblings(self) -> RunConfig:
        if self.credit.baseline.type == "ema" and self.sampling.min_siblings > 1:
            raise ValueError(
                f"sampling.min_siblings {self.sampling.min_siblings} excludes groups that credit.baseline 'ema' can"
                " use: write min_siblings 1"
            )
        return self

    @model_validator(mode="after")
    def _the_rate_has_steps_to_fall(self) -> RunConfig:
        warmup, steps = self.optimizer.warmup_steps, self.training.steps
        if self.optimizer.schedule != "constant" and 0 < steps <= warmup:
            raise ValueError(
                f"optimizer.warmup_steps {warmup} leaves none of training.steps {steps} to schedule"
                f" {self.optimizer.schedule!r}: lower it, or write schedule 'constant'"
            )
        return self

    @model_validator(mode="after")
    def _refills_replace_what_teaches_nothing(self) -> RunConfig:
        if self.sampling.refill_zero_variance and self.algorithm.kl_coefficient > 0:
            raise ValueError(
                "sampling.refill_zero_variance replaces groups that algorithm.kl_coefficient above 0 trains: remove one"
                " of them"
            )
        if self.sampling.refill_zero_variance and self.credit.baseline.whiten:
            raise ValueError(
                "sampling.refill_zero_variance replaces groups that credit.baseline.whiten trains: remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _a_narrow_band_is_on_policy(self) -> RunConfig:
        correction, lag = self.algorithm.correction, self.sampling.max_policy_lag
        if correction.type == "decoupled" and correction.weights == "mis_geo" and lag > 0 and correction.cap is None:
            raise ValueError(
                "algorithm.correction.weights 'mis_geo' drops rows of older versions with its default band: write"
                " sampling.max_policy_lag 0, or set algorithm.correction.cap and floor"
            )
        return self

    @model_validator(mode="after")
    def _stopping_has_values(self) -> RunConfig:
        stopping, plan = self.training.early_stopping, self.evaluation
        if stopping is not None and stopping.metric == "evaluation_reward" and (plan is None or plan.every is None):
            raise ValueError(
                "training.early_stopping.metric 'evaluation_reward' needs evaluations during training: set"
                " evaluation.every, or write metric 'train_reward'"
            )
        return self

    @model_validator(mode="after")
    def _evaluations_are_few(self) -> RunConfig:
        every, steps = self.evaluation.every if self.evaluation else None, self.training.steps
        if every is not None and steps // every > MAX_PLANNED_EVALUATIONS:
            raise ValueError(
                f"evaluation.every {every} makes {steps // every} evaluations in training.steps {steps}: write at least"
                f" {-(-steps // MAX_PLANNED_EVALUATIONS)}"
            )
        return self

    @model_validator(mode="after")
    def _roles_differ(self) -> RunConfig:
        names = [role.name for role in self.roles]
        double = sorted({name for name in names if names.count(name) > 1})
        if double:
            raise ValueError(f"roles: {double} name two roles each: write one role, or two names")
        shadowing = next((role.name for role in self.roles[:-1] if not role.has_conditions), None)
        if shadowing is not None:
            raise ValueError(f"roles: {shadowing!r} has no condition and takes every call: write it last")
        unknown = [name for name in self.train or () if name not in names]
        if unknown:
            raise ValueError(f"train: {unknown} are none of the roles {names}: add them to roles")
        if self.train == []:
            raise ValueError("train: no role trains: name one, or write training.steps 0 for evaluations alone")
        if self.credit.baseline.per == "role" and not self.roles:
            raise ValueError("credit.baseline.per 'role' compares the calls of one role: add roles, or write 'rollout'")
        return self

    @model_validator(mode="after")
    def _an_image_holds_the_agents_files(self) -> RunConfig:
        if self.runner.type == "kubernetes" and self.agent.directory is not None:
            raise ValueError(
                "agent.directory is a folder of a runner's machine, and runner.type 'kubernetes' has none: "
                "put the files into runner.image"
            )
        return self

    @model_validator(mode="after")
    def _mini_batches_have_groups(self) -> RunConfig:
        if self.algorithm.mini_batches > self.sampling.groups_per_step:
            raise ValueError(
                f"algorithm.mini_batches {self.algorithm.mini_batches} exceeds sampling.groups_per_step"
                f" {self.sampling.groups_per_step}: a mini-batch has at least one group"
            )
        return self

    @model_validator(mode="after")
    def _a_task_file_has_a_place(self) -> RunConfig:
        name = self.agent.task_file
        if name is None:
            return self
        if self.runner.type == "kubernetes" and (not name.startswith("/") or ".." in name.split("/")):
            raise ValueError("agent.task_file: write an absolute path of the pod, such as /app/input.json")
        if self.runner.type == "process" and ("/" in name or name in {".", ".."}):
            raise ValueError("agent.task_file: write a name in the agent's working folder, such as input.json")
        return self
