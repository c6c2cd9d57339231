"""The losses of the policy, by `type`, and the critic."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from leyden.libs.contracts.config.corrections import Correction, DecoupledCorrection
from leyden.libs.contracts.config.distillation import Distillation
from leyden.libs.contracts.config.document import Document, FolderPath, Word

Weighting = Literal["rollout_mean", "token_mean", "seq_mean_token_mean", "prompt_mean", "rollout_sum_const"]


class Critic(Document):
    """Values of states by a linear head on last hidden states. They and GAE (arXiv 1506.02438) make the advantages.

    The head learns targets in units of their running deviation, so that rewards of any size learn alike."""

    trunk: Literal["shared", "own"] = "shared"
    """The model below the head. `shared`: the policy's, whose weights the value loss then moves, too. `own`: a second
    model, trained by the value loss alone: 16 bytes a parameter, and 1.6 times the time of a step. `training.lora` and
    `training.frozen` do not act on it."""
    model: FolderPath | None = None
    """Folder of an `own` trunk's first weights, of a model with the same tokens; null for the policy's base model."""
    per: Literal["token", "call"] = "token"
    """`token`: a value before each sampled token, as in PPO. `call`: one before each call, as a learned baseline."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount from one token, or call, to the next."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """λ of GAE: 1 is the return minus the value, 0 the reward plus the change of the value."""
    value_clip: float | None = Field(default=0.2, gt=0, le=1e6)
    """Bound on a value's distance from that at the start of the batch, in the value loss and in units of the targets'
    deviation; null for none."""
    coefficient: float = Field(default=0.5, gt=0, le=1e6)
    """Weight of the value loss beside the policy loss."""
    warmup_steps: int = Field(default=0, ge=0, le=1_000_000)
    """First steps, in which only the value head learns, or the `own` model."""
    learning_rate: float = Field(default=1e-3, gt=0, le=1.0)
    """The value head's own; it follows the schedule of `optimizer.learning_rate`."""
    trunk_learning_rate: float | None = Field(default=None, gt=0, le=1.0)
    """That of an `own` trunk, by the same schedule; null for `optimizer.learning_rate`."""
    max_grad_norm: float | None = Field(default=None, gt=0, le=1e9)
    """Bound on the gradient norm of the value head, or of an `own` model with its head, which is clipped apart from the
    policy's; null for `optimizer.max_grad_norm`."""

    @model_validator(mode="after")
    def _fields_of_an_own_trunk(self) -> Critic:
        given = [name for name in ("model", "trunk_learning_rate") if getattr(self, name) is not None]
        if given and self.trunk == "shared":
            raise ValueError(f"{', '.join(given)} has no effect on a shared trunk: write trunk 'own', or remove it")
        return self


class _Algorithm(Document):
    weighting: Weighting = "rollout_mean"
    """Aggregation of token losses (learning specification 6.2)."""
    sum_constant: int | None = Field(default=None, ge=1, le=10**9)
    """L_const of `rollout_sum_const`."""
    correction: Correction | None = None
    """Null: by the trainer's device. On CUDA devices, whose results differ from the engine's by more than a clip,
    `decoupled` for losses that bound a ratio, unless their bounds would then have no effect; else `bypass`."""
    critic: Critic | None = None
    """Learned values in place of a baseline over siblings; with `credit.baseline.type: value`. Null for none."""
    distillation: Distillation | None = None
    """A teacher's judgement of the sampled tokens as their advantages, or beside those of rewards. Null for none."""
    kl_coefficient: float = Field(default=0.0, ge=0.0, le=1e6)
    """β of the KL penalty to version 0, or to the version of `kl_reference_every`; 0 for none. Version 0 is the base
    model, or of a continued run the version that it continues."""
    kl_reference_every: int | None = Field(default=None, ge=1, le=1_000_000)
    """n: the reference of the step after step s is the run's version floor(s / n) · n, which stays on disk. Null:
    version 0."""
    kl_estimator: Literal["k1", "k2", "k3", "k3+"] = "k3"
    """The estimate of KL(π ‖ reference) at a sampled token, with d = log π - log reference: `k1` d, `k2` d²/2, `k3`
    e^-d + d - 1; `k3+` has k3's value and k2's gradient, which is the KL's own."""
    kl_in: Literal["loss", "reward"] = "loss"
    """`loss` adds β times the estimate to each token's loss. `reward` subtracts it from each token's reward: a token's
    advantage falls by the sum from it to the end of its row (discounted under rule `token_discounted`)."""
    entropy_coefficient: float = Field(default=0.0, ge=0.0, le=1e6)
    """c of the entropy bonus: each trained token's loss falls by c times the entropy, at the sampling temperature, of
    the distribution that it was drawn from; 0 for none. Corrections and masks do not weigh it."""
    mini_batches: int = Field(default=1, ge=1, le=4096)
    """Updates of one pass over a step's groups (verl: batch / `ppo_mini_batch_size`). The seed shuffles the groups; a
    group's rollouts stay together, and denominators count the tokens of one mini-batch."""
    epochs: int = Field(default=1, ge=1, le=100)
    """Passes over a step's groups (verl: `ppo_epochs`, TRL: `num_iterations`). With more than one update a step, π_old
    is computed once at its start, and clips act under every correction."""

    def reference_version(self, step: int) -> int | None:
        """The version that is the KL reference after `step` steps; None without one.

        >>> PpoClip(kl_coefficient=0.1, kl_reference_every=10).reference_version(25)
        20
        """
        if self.kl_coefficient == 0:
            return None
        every = self.kl_reference_every
        return 0 if every is None else step // every * every

    @property
    def decoupled(self) -> DecoupledCorrection | None:
        """The correction, where the document names one that recomputes π_old."""
        return self.correction if isinstance(self.correction, DecoupledCorrection) else None

    @property
    def clips_of_the_engine(self) -> list[str]:
        """The bounds of the loss that are not their defaults and could not act if the ratio were that to π_old."""
        # Defaults pass: a stored document names every field.
        fields = type(self).model_fields.items()
        own = {name: field for name, field in fields if name not in _Algorithm.model_fields and name != "type"}
        changed = [name for name, field in own.items() if getattr(self, name) != field.default]
        return changed if self.mini_batches * self.epochs == 1 else []

    @property
    def trains_every_row(self) -> bool:
        """Whether rows without any advantage have a gradient, too, in a group whose other rows have one."""
        return self.trains_every_group

    @property
    def trains_every_group(self) -> bool:
        """Whether groups without variance have a gradient, too."""
        penalised = self.kl_coefficient > 0 or self.entropy_coefficient > 0
        return penalised or self.learns_without_variance

    @property
    def learns_without_variance(self) -> bool:
        """Whether groups in which no rewards differ teach: by more than a penalty, which holds any group back alike."""
        return self.critic is not None or self.distillation is not None

    @property
    def learns_from_rewards(self) -> bool:
        """Whether rewards make its advantages."""
        return self.distillation is None or self.distillation.rewards == "add"

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
            name
            for name in ("kl_estimator", "kl_in", "kl_reference_every")
            if getattr(self, name) != _Algorithm.model_fields[name].default
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
    def _clips_can_act(self) -> _Algorithm:
        if self.decoupled and (changed := self.clips_of_the_engine):
            raise ValueError(
                f"{', '.join(changed)} cannot act with correction 'decoupled': a step makes one update, so the loss's"
                " ratio is 1. Remove it, write correction 'bypass', or set mini_batches or epochs above 1"
            )
        return self


class PpoClip(_Algorithm):
    """PPO's clipped objective with group advantages: GRPO, Dr. GRPO (with weighting `rollout_sum_const`) and DAPO by
    their settings."""

    type: Literal["ppo_clip"] = "ppo_clip"
    clip_low: float = Field(default=0.2, ge=0, lt=1)
    clip_high: float = Field(default=0.28, ge=0, le=1e6)
    dual_clip: float | None = Field(default=3.0, gt=1, le=1e6)
    """c: bound on the loss of tokens with a negative advantage; null for none."""


class Gspo(_Algorithm):
    """Sequence-level ratios (arXiv 2507.18071)."""

    type: Literal["gspo"] = "gspo"
    weighting: Weighting = "seq_mean_token_mean"
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
    weighting: Weighting = "seq_mean_token_mean"
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

    @property
    def trains_every_row(self) -> bool:
        """The penalty on drift moves tokens without an advantage; as in prime-rl, groups without variance have none."""
        return True

    @model_validator(mode="after")
    def _needs_the_engines_ratio(self) -> DppoTv:
        if self.decoupled:
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


class Sft(_Algorithm):
    """Supervised fine-tuning: the mean cross-entropy of the sampled tokens of demonstrations, which are stored rollouts
    on tasks of the run's `dataset`. A run of this type samples nothing but its evaluations; each pass over the
    demonstrations trains every group of them once."""

    type: Literal["sft"] = "sft"
    weighting: Weighting = "token_mean"
    runs: list[Word] = Field(default_factory=list, max_length=100)
    """Ids of the runs whose finished rollouts are demonstrations, of training and of evaluations alike. They have the
    pool of this run, whose tokens are those of its model; calls that a provider answered are recorded in them, too."""
    min_reward: float = Field(default=1.0, ge=-1e6, le=1e6)
    """Rollouts that earned less are no demonstrations."""
    per_task: int | None = Field(default=None, ge=1, le=1024)
    """At most so many demonstrations of a task: those that earned most, the newest first. Null: all."""

    @property
    def learns_from_rewards(self) -> bool:
        """Rewards select demonstrations, and weigh none."""
        return False

    @model_validator(mode="after")
    def _clips_can_act(self) -> Sft:
        if self.decoupled:
            raise ValueError(
                "correction 'decoupled' corrects for the policy that sampled, which demonstrations do not know: write"
                " 'bypass'"
            )
        return self


Algorithm = Annotated[
    PpoClip | Gspo | Cispo | Sapo | DppoTv | ImportanceSampling | Reinforce | Sft, Field(discriminator="type")
]
