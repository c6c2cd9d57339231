"""The document that describes a run. Unknown or contradictory fields are refused with their path and the remedy.

Defaults are the recipe that `make demo` uses where it can be general, and `docs/how-to` explains when to move them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Argument = Annotated[str, Field(max_length=100_000, pattern=r"^[^\x00]*$")]
"""A word of a command or a value of its environment; the kernel takes 128 KiB."""
VariableName = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^=\x00]+$")]
Word = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00]+$")]
FolderPath = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]+$")]


class _Document(BaseModel):
    # Strict: a number is not written as a text, nor a truth value as a number.
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, strict=True, allow_inf_nan=False
    )


class Agent(_Document):
    """The command that runs the agent once; the environment holds its task and its endpoints."""

    command: list[Argument] = Field(min_length=1, max_length=256)
    """Program and arguments, no shell. `{python}` as first word is the runner's own interpreter."""
    environment: dict[VariableName, Argument] = Field(default_factory=dict, max_length=256)
    """Added to the block that the platform gives. Names the platform sets itself are refused."""
    directory: Annotated[FolderPath, Field(pattern=r"^/[^\x00]*$")] | None = None
    """A folder whose files are copied into the attempt's fresh working folder; absolute, on the runner's disk."""

    @model_validator(mode="after")
    def _platform_names_are_reserved(self) -> Agent:
        reserved = {n for n in self.environment if n.startswith(("LEYDEN_", "OPENAI_", "ANTHROPIC_", "OTEL_EXPORTER_"))}
        allowed = {"OPENAI_MODEL"}
        if reserved - allowed:
            raise ValueError(
                f"environment sets {sorted(reserved - allowed)}, which the platform sets itself: remove them"
            )
        return self


class _Runner(_Document):
    timeout_seconds: float = Field(default=300.0, gt=0, le=86_400)
    """Wall time of one attempt; then SIGTERM, a grace, SIGKILL, and the outcome `timeout`."""
    output_bytes: int = Field(default=1_000_000, ge=1_000, le=100_000_000)
    """The bytes of stdout and of stderr that are stored, from the end; the runner drops the rest."""
    grant_reward: bool = False
    """Whether the agent may post its own reward (LEYDEN_REWARD_URL)."""


class ProcessRunner(_Runner):
    """Each attempt is a process tree on the runner's machine, for agents whose code is trusted."""

    type: Literal["process"] = "process"
    memory_bytes: int | None = Field(default=4 * 2**30, ge=2**24, le=2**60)
    """Address space of each process of the agent (RLIMIT_AS); null for no limit."""
    cpu_seconds: int | None = Field(default=None, ge=1, le=10**9)
    """CPU time of each process of the agent (RLIMIT_CPU); null for no limit."""


def _process_by_default(document: Any) -> Any:
    return {"type": "process", **document} if isinstance(document, dict) else document


RunnerConfig = Annotated[ProcessRunner, BeforeValidator(_process_by_default)]
"""The backend that executes a run's attempts, by `type`. A second one joins as `Annotated[ProcessRunner |
KubernetesRunner, Field(discriminator="type"), BeforeValidator(_process_by_default)]`: pydantic refuses to discriminate
a union of one."""


class Sampling(_Document):
    """How many rollouts are made, and how old they may be."""

    group_size: int = Field(default=8, ge=1, le=1024)
    """Siblings per task; the unit of a baseline."""
    groups_per_step: int = Field(default=8, ge=1, le=4096)
    """Groups that one optimiser step consumes."""
    max_policy_lag: int = Field(default=1, ge=0, le=64)
    """η: how many versions older than the version being improved a token may be. 0 alternates sampling and training."""
    max_attempts: int = Field(default=3, ge=1, le=100)
    """Executions of one rollout before infrastructure failures exclude it."""
    agent_failure: Literal["reward", "exclude"] = "reward"
    """A crash or timeout of the agent itself: an outcome with `failure_reward`, or left out of its group."""
    failure_reward: float = Field(default=0.0, ge=-1e6, le=1e6)
    """The reward of an agent's own failure, where `agent_failure` is `reward`."""
    min_siblings: int = Field(default=2, ge=1, le=1024)
    """A group with fewer counted siblings than this is excluded, and a group of the next task takes its place."""
    seed: int = Field(default=0, ge=-(2**63), le=2**63 - 1)
    """Order of tasks; the same seed visits them in the same order."""
    temperature: float | None = Field(default=None, ge=0, le=10)
    """Temperature of calls that name none; the agent's own value overrides it."""

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
    """Tool name to what a success earns; tools not named earn `default_weight`."""
    default_weight: float = Field(default=0.0, ge=-1e6, le=1e6)
    failure: float = Field(default=0.0, ge=-1e6, le=0.0)
    """Reward of a failed tool call: 0, or a penalty as a negative factor of the tool's weight."""
    alpha: float | None = Field(default=None, ge=0.0, le=1.0)
    """Mix: calls earn α · status and the outcome counts (1 - α). Null adds both unscaled."""


class IdenticalCredit(_Document):
    """Every call gets the rollout's whole return: the paper's rule."""

    type: Literal["identical"] = "identical"


class EqualSplitCredit(_Document):
    """Every call gets an equal part of the rollout's return."""

    type: Literal["equal_split"] = "equal_split"


class DiscountedCredit(_Document):
    """Every call gets its own reward and γ times the mean return of the calls that follow it in the call tree."""

    type: Literal["discounted"] = "discounted"
    gamma: float = Field(default=0.95, ge=0.0, le=1.0)


CreditRule = Annotated[IdenticalCredit | EqualSplitCredit | DiscountedCredit, Field(discriminator="type")]


class Baseline(_Document):
    """The number that is subtracted from a return, among the siblings of a group."""

    type: Literal["none", "mean", "mean_std", "leave_one_out"] = "mean"
    """`mean` is Dr. GRPO, `mean_std` GRPO, `leave_one_out` RLOO."""
    per: Literal["rollout", "state"] = "rollout"
    """One statistic per group, or one among siblings' calls with the same tool history (GiGPO's anchor)."""


class Credit(_Document):
    """From rewards to one advantage per model call."""

    rule: CreditRule = Field(default_factory=DiscountedCredit)
    air: Air | None = None
    """Null: outcomes and explicit rewards alone."""
    baseline: Baseline = Field(default_factory=Baseline)

    @model_validator(mode="after")
    def _states_need_call_returns(self) -> Credit:
        if self.baseline.per == "state" and self.rule.type == "identical":
            raise ValueError(
                "credit.baseline.per 'state' compares returns of calls, but credit.rule 'identical' gives every call"
                " of a rollout the same: write rule 'discounted' or per 'rollout'"
            )
        return self


class BypassCorrection(_Document):
    """π_x = μ: the ratio is taken to the engine's own log-probabilities; one forward pass."""

    type: Literal["bypass"] = "bypass"


class DecoupledCorrection(_Document):
    """π_x recomputed by the trainer at the step's start; truncated importance weights correct for the sampler."""

    type: Literal["decoupled"] = "decoupled"
    cap: float = Field(default=2.0, gt=0, le=1e6)
    """C of token-level truncated importance sampling."""


Correction = Annotated[BypassCorrection | DecoupledCorrection, Field(discriminator="type")]


class _Algorithm(_Document):
    weighting: Literal["rollout_mean", "token_mean", "seq_mean_token_mean", "prompt_mean", "rollout_sum_const"] = (
        "rollout_mean"
    )
    """How tokens share the loss (learning specification 6.2)."""
    sum_constant: int | None = Field(default=None, ge=1, le=10**9)
    """L_const of `rollout_sum_const`."""
    correction: Correction = Field(default_factory=BypassCorrection)
    kl_coefficient: float = Field(default=0.0, ge=0.0, le=1e6)
    """β of the k3 penalty to policy version 0."""
    mask_ratio_above: float | None = Field(default=None, gt=1.0, le=1e6)
    """Off-policy mask: tokens whose π_old / μ is above this or below its inverse do not train, in both corrections."""

    @model_validator(mode="after")
    def _constant_where_needed(self) -> _Algorithm:
        if (self.weighting == "rollout_sum_const") != (self.sum_constant is not None):
            raise ValueError(
                "sum_constant belongs to weighting 'rollout_sum_const' and only there: set both or neither"
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


Algorithm = Annotated[PpoClip | Gspo | Cispo, Field(discriminator="type")]


class Optimizer(_Document):
    """AdamW."""

    learning_rate: float = Field(default=1e-6, gt=0, le=1.0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0, le=1e3)
    max_grad_norm: float = Field(default=1.0, gt=0, le=1e9)
    warmup_steps: int = Field(default=0, ge=0, le=1_000_000)


class Training(_Document):
    """How the trainer computes; none of it changes the loss."""

    steps: int = Field(default=100, ge=1, le=1_000_000)
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of matrix products; master weights stay float32."""
    frozen: list[Word] = Field(default_factory=list, max_length=1000)
    """Patterns (fnmatch) of parameter names that are not trained, such as `model.layers.[0-9].*`."""
    micro_batch_tokens: int = Field(default=4096, ge=16, le=2**31 - 1)
    """Bound on the tokens of one forward pass beyond the shared prefix."""
    activation_checkpointing: bool = False
    max_logprob_gap: float = Field(default=0.05, gt=0, le=1e6)
    """Mean |trainer - engine| log-probability at equal versions above which training stops."""
    keep_checkpoints: int = Field(default=2, ge=1, le=1_000_000)
    """Checkpoints with optimiser state kept on disk, newest first; version 0 and the last are never removed."""


class Evaluation(_Document):
    """Rollouts on held-out tasks, never trained."""

    dataset: Word
    """Id or name of the dataset."""
    rollouts_per_task: int = Field(default=1, ge=1, le=1024)
    max_tasks: int | None = Field(default=None, ge=1, le=2**31 - 1)
    at_start: bool = True
    """Evaluate version 0 before the first step."""
    at_end: bool = True
    """Evaluate the last version after the last step."""


class RunConfig(_Document):
    """Everything that `POST /v1/runs` says of a run."""

    name: str = Field(min_length=1, max_length=200, pattern=r"^[\w][\w .:-]*$")
    dataset: Word
    """Id or name of the dataset whose tasks are trained on."""
    agent: Agent
    model: FolderPath | None = None
    """Folder of the base model (Hugging Face format) as trainer and engines see it; null for the platform's default."""
    runner: RunnerConfig = Field(default_factory=ProcessRunner)
    sampling: Sampling = Field(default_factory=Sampling)
    credit: Credit = Field(default_factory=Credit)
    algorithm: Algorithm = Field(default_factory=PpoClip)
    optimizer: Optimizer = Field(default_factory=Optimizer)
    training: Training = Field(default_factory=Training)
    evaluation: Evaluation | None = None
