"""The computation of a step: optimiser, adapters, precision and memory, and the end of training."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from leyden.libs.contracts.config.document import Document, Word
from leyden.libs.contracts.config.rates import FULL_RATE


class Optimizer(Document):
    """AdamW."""

    moments: Literal["float32", "bfloat16", "8bit"] = "float32"
    """How AdamW's moments are stored between steps. `bfloat16`: half the memory and half the checkpoint; with a `beta2`
    above 0.99 a step would change the second moment by less than its last digit. `8bit`: a quarter of both, by
    codes with a scale for each block of 256 values; updates differ by 15 % and more from those of float32."""
    offload: bool = False
    """Keep the moments in host memory: a step brings those of one parameter at a time to the device. Same results."""
    learning_rate: float | None = Field(default=None, gt=0, le=1.0)
    """Null: 1e-6, or 1e-5 with LoRA; the stored document has the number."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0, le=1e3)
    max_grad_norm: float = Field(default=1.0, gt=0, le=1e9)
    warmup_steps: int = Field(default=0, ge=0, le=1_000_000)
    """Steps over which the rate grows linearly to `learning_rate`."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The rate after the warm-up: `linear` and `cosine` fall towards 0 until `training.steps`. A run that continues
    another one counts its own steps: the rate jumps back to the start of the schedule, warm-up included."""

    @property
    def rate(self) -> float:
        """The learning rate; a run's document has resolved null."""
        return FULL_RATE if self.learning_rate is None else self.learning_rate

    @model_validator(mode="after")
    def _moments_have_the_digits(self) -> Optimizer:
        if self.moments == "bfloat16" and (self.beta1 > 0.95 or self.beta2 > 0.99):
            raise ValueError(
                "moments bfloat16 need a beta1 of at most 0.95 and a beta2 of at most 0.99: a step's change would be"
                " less than their last digit; lower them, or write moments float32"
            )
        return self


class EarlyStopping(Document):
    """Ends training before `training.steps`; the run completes, and its reason says why."""

    metric: Literal["evaluation_reward", "train_reward"] = "evaluation_reward"
    """The mean reward of each version that the run's own evaluations measured, on the tasks that all of them so far
    counted, or of each step's rollouts. An evaluation that lost more than half of its tasks is left out."""
    average_over: int = Field(default=1, ge=1, le=1000)
    """Values whose moving mean counts as one, against noise."""
    target: float | None = Field(default=None, ge=-1e6, le=1e6)
    """The run stops once the metric reaches this; an evaluation that lost a task does not reach it."""
    patience: int | None = Field(default=None, ge=1, le=1000)
    """The run stops once so many values in a row were not better than the best before them."""

    @model_validator(mode="after")
    def _something_stops(self) -> EarlyStopping:
        if self.target is None and self.patience is None:
            raise ValueError("nothing would ever stop the run: set target, patience or both")
        return self


class Lora(Document):
    """Low-rank adapters: they alone are trained, and a KL reference is the same model behind other adapters or none.

    Adapters take ten to a hundred times the rate of full training: `optimizer.learning_rate` is 1e-5 where it is left
    out. There is no dropout: the policy that is trained must be the one that sampled.
    """

    rank: int = Field(default=16, ge=1, le=1024)
    alpha: float = Field(default=32.0, gt=0, le=1e6)
    """The adapter's product is scaled by alpha / rank."""
    target_modules: Literal["all-linear"] | Annotated[list[Word], Field(min_length=1, max_length=100)] = "all-linear"
    """Linear layers of the decoder by the last part of their names, such as `q_proj`; the head is none of them."""
    base_dtype: Literal["float32", "bfloat16"] | None = None
    """Type in which the base model's matrices lie in memory. Adapters, their gradients and moments are float32, and so
    are embeddings and norms. A base model that was published in bfloat16 loses nothing. Null: on CUDA devices that of
    `training.precision`, elsewhere float32."""


class Training(Document):
    """Computation of a step: optimiser, precision, memory and checks."""

    steps: int = Field(default=100, ge=0, le=1_000_000)
    """Optimiser steps; 0 trains nothing: the run makes its evaluations of version 0 alone."""
    early_stopping: EarlyStopping | None = None
    """Null: training ends after `steps`."""
    precision: Literal["float32", "bfloat16"] | None = None
    """Precision of matrix products; master weights stay float32. Null: by the trainer's device, bfloat16 on CUDA and
    float32 elsewhere. A run keeps what its trainer resolved (`leyden run show`)."""
    export_dtype: Literal["float32", "bfloat16"] | None = None
    """Type of the weights in versions, which engines load; null for that of `precision`, on a CPU for `float32`. With
    `bfloat16` a version has half the size, and without LoRA its checkpoint holds the weights in float32, too. Adapters
    are float32."""
    frozen: list[Word] = Field(default_factory=list, max_length=1000)
    """Patterns (fnmatch) of parameter names that are not trained, such as `model.layers.[0-9].*`. With `lora`, layers
    whose weights match get no adapter."""
    router: Literal["frozen", "trained"] = "frozen"
    """Routers of a mixture of experts, which choose each token's experts. `frozen`: they stay those of the base model,
    and gradients pass through their shares. `trained`: they learn with the other weights. Neither adds a loss that
    balances experts. A model without routers refuses `trained`. Those of further policies stay frozen."""
    routing_replay: bool = False
    """Compute each token with the experts that the engine chose for it, and with the shares that the trainer's router
    gives these (R3, arXiv 2510.11370): a choice that rounding would make otherwise is then the engine's. The engines
    must return them: start SGLang with `--enable-return-routed-experts`. A token without a record has the trainer's own
    choice, and `routing_unrecorded_tokens` counts it. Those of further policies are not replayed."""
    lora: Lora | None = None
    """Train LoRA adapters in place of the weights; null trains the weights."""
    micro_batch_tokens: int = Field(default=4096, ge=16, le=2**31 - 1)
    """Maximum tokens of one forward pass, without the shared prefix."""
    activation_checkpointing: bool = False
    """Compute each layer again in the backward pass: less memory, about a third more time."""
    compile: bool = False
    """Compile norms, projections and MLP of each layer with `torch.compile`: the first step takes up to minutes more.
    Attention stays as it is. Results differ in their last digits, after a restart, too; no GPU has run it."""
    attention: Literal["dense", "flex"] | None = None
    """Kernel of attention on CUDA devices. `dense`: a mask of every pair of tokens. `flex`: FlexAttention, compiled,
    which leaves out blocks of tokens that do not see each other. Null: `flex` where Triton is installed, else
    `dense`. A CPU has a kernel of its own."""
    max_logprob_gap: float = Field(default=0.1, gt=0, le=1e6)
    """Mean |trainer - engine| log-probability at equal versions above which the run fails (`TRAINER_GAP_PATIENCE`). A
    step that cannot compare them has no part in it, and is a warning.
    Right implementations differ by 1e-5 in float32, and by 0.035 to 0.045 where one of them computes in bfloat16."""
    min_effective_share: float = Field(default=0.5, ge=0, le=1)
    """Effective sample size of trainer / engine at equal versions, as a share, below which the run fails, too."""
    constrained_calls: Literal["leave_out", "mask", "train"] = "leave_out"
    """Calls whose answer a grammar constrained (`response_format`, a required tool). `leave_out`: they do not train.
    `mask`: their tokens train, except those that the grammar left a probability of at least 0.999. `train`: all train.
    The engine's log-probabilities of such tokens are not the policy's, which `max_logprob_gap` sees."""
    keep_checkpoints: int = Field(default=2, ge=1, le=1_000_000)
    """Newest versions whose weights and checkpoints stay on disk. The best version stays with its checkpoint, too, as
    do version 0, a KL reference and a version that is being evaluated. Weights of `sampling.max_policy_lag` versions
    before the newest stay without checkpoints until the last step: the trainer compares itself with the engine at the
    version that sampled."""

    @model_validator(mode="after")
    def _replays_what_is_not_compiled(self) -> Training:
        if self.routing_replay and self.compile:
            raise ValueError("routing_replay changes parts of layers that compile fixes: remove one of them")
        return self

    @model_validator(mode="after")
    def _adapters_stand_beside_no_router(self) -> Training:
        if self.router == "trained" and self.lora is not None:
            raise ValueError("router 'trained' trains weights, and lora adapters alone: remove one of them")
        return self
