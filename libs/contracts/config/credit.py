"""How rewards become one advantage per model call: rules, intermediate rewards, shaping and baselines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from leyden.libs.contracts.config.document import Document, Word
from leyden.libs.contracts.config.patterns import LinearPattern


class FailureRule(Document):
    """A result of a tool that is a failure: `pattern` is found in its text, or a field of its JSON has a value."""

    pattern: LinearPattern | None = None
    """A regular expression without look-around and back-references, such as `(?i)no such table`."""
    path: str | None = Field(default=None, min_length=1, max_length=200)
    """A field of a result that is JSON, such as `status` or `result.0.code`."""
    values: list[bool | int | float | str | None] = Field(default_factory=list, max_length=100)
    """The values of the field that are failures, such as `[404, 500]` or `[false]`."""

    @model_validator(mode="after")
    def _it_asks_for_one_thing(self) -> FailureRule:
        if (self.pattern is None) == (self.path is None) or (self.path is None) == bool(self.values):
            raise ValueError("write either pattern, or path and values")
        return self


class Air(Document):
    """Automatic intermediate rewards from the status of a call's tools (Agent Lightning, arXiv 2508.03680, 3.4.2)."""

    weights: dict[Word, Annotated[float, Field(ge=-1e6, le=1e6)]] = Field(default_factory=dict, max_length=1000)
    """Reward of a success by tool name; other tools earn nothing. One call earns at most 1, or loses 1."""
    failure: float = Field(default=-1.0, ge=-1e6, le=0.0)
    """Reward of a failed tool call as a factor of the tool's weight: -1 takes what a success gives, 0 nothing."""
    null: Literal["failure", "nothing", "success"] = "failure"
    """The meaning of a result without content, such as `null`, `[]` or an empty text, with and without a span."""
    failures: dict[Word, Annotated[list[FailureRule], Field(max_length=20)]] = Field(
        default_factory=dict, max_length=1000
    )
    """Rules by tool that decide which of its results are failures, in place of the built-in forms of errors and of its
    span; an empty list: none is. A mark of the wire format counts in any case. Other results with content are
    successes, plain texts too."""
    tool_seconds: float | None = Field(default=None, gt=0, le=1e6)
    """A tool call that took longer has failed (`hung`), whatever it returned: by its span, else by the time from an
    answer with this one tool call to the request with its result. It ends no tool. Null: no limit but the attempt's."""
    alpha: float | None = Field(default=None, ge=0.0, le=1.0)
    """Mix: calls earn α · status and the outcome counts (1 - α). Null adds both unscaled."""
    from_results: bool = True
    """Whether a tool call without a span takes its status from the tool's result in the conversation: an error, by
    Anthropic's mark or by the forms that frameworks give to errors; a success, if it is JSON or a number; none, if it
    is another text. False: from telemetry alone."""


class IdenticalCredit(Document):
    """Every call gets the rollout's full return: the rule of the Agent Lightning paper."""

    type: Literal["identical"] = "identical"


class EqualSplitCredit(Document):
    """Every call gets an equal part of the rollout's return."""

    type: Literal["equal_split"] = "equal_split"


class DiscountedCredit(Document):
    """Every call gets its own reward and γ times the mean return of the calls that follow it in the call tree.

    With γ below 1 the first calls of a long rollout learn little: 0.95 leaves 0.36 of a reward 20 calls later.
    """

    type: Literal["discounted"] = "discounted"
    gamma: float = Field(default=1.0, ge=0.0, le=1.0)


class TemporalCredit(Document):
    """Every call gets its own reward and γ times the return of the rollout's next call in order of arrival, in whatever
    branch: for agents whose prompts do not extend each other, so that the call tree knows no order."""

    type: Literal["temporal"] = "temporal"
    gamma: float = Field(default=1.0, ge=0.0, le=1.0)


class TokenDiscountedCredit(Document):
    """γ for each trained token up to the reward, along the call tree, as REINFORCE++ has it. The return of a call is
    that of its last token."""

    type: Literal["token_discounted"] = "token_discounted"
    gamma: float = Field(default=1.0, ge=0.0, le=1.0)


class TemporalDiscountCredit(Document):
    """An equal part of the rollout's return R, discounted from the end: R · γ^(N - t) / N for call t = 0 … N - 1."""

    type: Literal["temporal_discount"] = "temporal_discount"
    gamma: float = Field(default=0.99, ge=0.0, le=1.0)
    minus: Literal["nothing", "future_average"] = "nothing"
    """`future_average` subtracts the mean reward of the calls from t on. It is negative for every call where the
    reward comes last and is positive."""


class OwnCredit(Document):
    """Every call gets its own reward and the rollout's outcome: α · status + (1 - α) · outcome with `air.alpha`. A call
    whose tools have no status gets the outcome alone, as an answer does."""

    type: Literal["own"] = "own"


CreditRule = Annotated[
    IdenticalCredit
    | EqualSplitCredit
    | DiscountedCredit
    | TemporalCredit
    | TokenDiscountedCredit
    | TemporalDiscountCredit
    | OwnCredit,
    Field(discriminator="type"),
]


class Overlong(Document):
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


class Shaping(Document):
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


class Baseline(Document):
    """The baseline that is subtracted from a return, computed over the rollouts of a group."""

    type: Literal["none", "mean", "mean_std", "leave_one_out", "opo", "ema", "remax", "value", "monte_carlo"] = "mean"
    """`mean` subtracts the group's mean, which is Dr. GRPO together with `algorithm.weighting` `rollout_sum_const`;
    `mean_std` is GRPO, `leave_one_out` RLOO; `opo` weighs each rollout's return with its trained
    tokens (OPO). `ema` is an average over the run's earlier groups, for groups of one; `per: role` has one per role.
    `remax` is the return of one more rollout of the group, which the gateway decodes greedily and which never trains.
    `value` leaves advantages to `algorithm.critic`. `monte_carlo` re-rolls a rollout from some of its calls, and takes
    the mean reward of the re-rolls as the value of the state before the call (VinePPO)."""
    calls: int = Field(default=4, ge=1, le=64)
    """Calls of a rollout before which `monte_carlo` measures the value, at most: spread evenly over the rollout."""
    samples: int = Field(default=4, ge=1, le=16)
    """Re-rolls from each of them. A rollout is followed by up to `calls` times `samples` re-rolls."""
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

    def added_rollouts(self, siblings: int) -> int:
        """Returns the most rollouts that the baseline adds to a group of so many siblings."""
        return {"remax": 1, "monte_carlo": siblings * self.calls * self.samples}.get(self.type, 0)

    def rerolled_calls(self, calls: int) -> list[int]:
        """Returns the calls, counted from 0, from which a rollout with so many calls is re-rolled.

        They are spread evenly. Call 0 is none of them: the rollout's siblings begin there.

        >>> [Baseline(type="monte_carlo", calls=4).rerolled_calls(calls) for calls in (20, 3, 1)]
        [[4, 8, 12, 16], [1, 2], []]
        """
        count = min(self.calls, calls - 1)
        return [number * calls // (count + 1) for number in range(1, count + 1)]

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> Baseline:
        if self.whiten and self.type == "mean_std":
            raise ValueError("whiten normalises again what 'mean_std' has normalised: write type 'mean' or drop whiten")
        if self.type == "ema" and self.per not in {"rollout", "role"}:
            raise ValueError(f"per '{self.per}' compares siblings, which 'ema' does not: write per 'rollout' or 'role'")
        if self.type == "none" and self.per == "gigpo":
            raise ValueError("per 'gigpo' compares siblings, which 'none' does not: write type 'mean' or 'mean_std'")
        if self.type == "remax" and self.per == "gigpo":
            raise ValueError("per 'gigpo' compares siblings, which 'remax' does not: write per 'rollout' or 'depth'")
        if self.type == "monte_carlo" and self.per != "rollout":
            raise ValueError(f"per '{self.per}' compares siblings, which 'monte_carlo' does not: write per 'rollout'")
        fields = type(self).model_fields
        for name, acts in (
            ("state_weight", self.per == "gigpo"),
            ("ema_decay", self.type == "ema"),
            ("min_spread", self.type not in {"none", "ema", "remax", "value", "monte_carlo"}),
            ("calls", self.type == "monte_carlo"),
            ("samples", self.type == "monte_carlo"),
        ):
            if getattr(self, name) != fields[name].default and not acts:
                raise ValueError(f"{name} has no effect with type '{self.type}' and per '{self.per}': remove it")
        return self


class Credit(Document):
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
        if self.baseline.type == "monte_carlo" and self.rule.type != "identical":
            raise ValueError(
                f"credit.rule '{self.rule.type}' divides a return over calls, which baseline 'monte_carlo' measures"
                " from call to call: write rule 'identical'"
            )
        if self.baseline.type != "none" and self.rule.type == "token_discounted":
            raise ValueError(
                f"credit.rule 'token_discounted' gives each token its own return, and baseline '{self.baseline.type}'"
                " compares calls: write baseline 'none', with whiten true for REINFORCE++"
            )
        return self
