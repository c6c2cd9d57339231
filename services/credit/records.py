"""The plain input of credit: one attempt of each sibling, as the store recorded it.

Axes: P tokens of a call's prompt, S tokens it sampled.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from leyden.libs.contracts import untrainable
from leyden.libs.contracts.states import OutcomeKind

TOKEN = np.dtype("<i4")
LOGPROB = np.dtype("<f4")
FORCED_ABOVE = np.log(0.999)
"""A token of a constrained call counts as forced above this log-probability. A grammar allows shorter tokens of the
same text, so a forced token may have less than 0; where nothing was forced, the token's gradient is near 0."""


class BrokenRecord(ValueError):
    """A recorded call contradicts itself; the message names it."""


@dataclass(frozen=True, slots=True)
class AskedTool:
    """A tool call in a model's answer."""

    tool: str
    tool_call_id: str
    is_malformed: bool = False


@dataclass(frozen=True, slots=True)
class ToolResult:
    """A tool's result in the conversation of a later call, or its beginning.

    `tool_call_id` is None for results that smolagents sends as text of a user, and for those of Ollama's clients: they
    are for the call before. `arrived`: the `sequence` of that call, where it is known.
    """

    tool_call_id: str | None
    text: str
    is_error: bool = False
    arrived: int | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """One model call. Arrays are bytes as stored: prompt int32[P]; sampled, versions int32[S]; logprobs float32[S].

    `delivered` is None where nobody knows whether the agent got the answer, which was complete `seconds` after the
    request came; requests with the same body have one `request_sha256`. `received_at`: when its last byte went to the
    agent, on the scale of `sequence`, where that is known. `policy` is None for the run's own model,
    `offers_tools` where the call has the tools of its parent. `is_cut`: the answer ended for its length.
    `is_overflow`: it was refused because its messages exceed the model's context.
    `written`: another provider's answer in tokens of the run's own model, which nobody sampled.
    `recorded_reason`: the gateway's, for a call that is not `trainable`. `asked` and `text` are the sampled answer's
    tool calls and its text beside them; `results` are those of earlier calls' tools, which the conversation adds.

    Raises: BrokenRecord: the arrays of the sampled tokens differ in length
    """

    id: str
    request_id: str
    choice: int
    sequence: int
    completed: bool
    trainable: bool
    prompt: bytes
    sampled: bytes
    logprobs: bytes
    versions: bytes
    temperature: float
    recorded_reason: str | None = None
    masks_forced: bool = False
    is_cut: bool = False
    is_overflow: bool = False
    role: str | None = None
    request_sha256: bytes = b""
    seconds: float = 0.0
    delivered: bool | None = None
    received_at: int | None = None
    policy: str | None = None
    written: bytes | None = None
    offers_tools: bool | None = None
    asked: tuple[AskedTool, ...] = ()
    text: str = ""
    results: tuple[ToolResult, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.sampled) == len(self.logprobs) == len(self.versions) or len(self.sampled) % TOKEN.itemsize:
            raise BrokenRecord(f"call {self.id}: tokens, log-probabilities and versions differ in length")

    @property
    def ended_at(self) -> float:
        """The end of the answer, on the scale of `sequence`."""
        return self.sequence + self.seconds * 1e9

    @property
    def order(self) -> tuple[int, int]:
        """Sort key: calls by arrival, choices of one request by number."""
        return self.sequence, self.choice

    @property
    def learnable(self) -> bool:
        """True when the loss may see its tokens: completed, reproducible by a trainer, sampled from a distribution."""
        return self.untrainable_reason is None

    @property
    def untrainable_reason(self) -> str | None:
        """Why the loss may not see its tokens; None when it may."""
        if not self.completed:
            return untrainable.OVERFLOW if self.is_overflow else untrainable.UNFINISHED
        if not self.trainable:
            return self.recorded_reason or untrainable.UNKNOWN
        if self.temperature <= 0:
            return untrainable.of_parameters(["temperature"])
        if not self.prompt:
            return untrainable.UNKNOWN
        if self.masks_forced and not len(self.trained_places()):
            return untrainable.FORCED
        return None

    def trained_places(self) -> NDArray[np.intp]:
        """The sampled tokens that train, as indices: all, or those that a grammar left a choice."""
        logprobs = self.logprob_array()
        return np.flatnonzero(logprobs < FORCED_ABOVE) if self.masks_forced else np.arange(len(logprobs))

    def logprob_array(self) -> NDArray[np.float32]:
        """[S] natural log of the probabilities that the tokens were sampled with."""
        return np.frombuffer(self.logprobs, LOGPROB)

    def version_array(self) -> NDArray[np.int32]:
        """[S] policy version of each sampled token."""
        return np.frombuffer(self.versions, TOKEN)


@dataclass(frozen=True, slots=True)
class ToolSpan:
    """One use of a tool, from telemetry."""

    span_id: str
    parent_span_id: str | None
    scope: str | None
    tool: str
    status: str
    tool_call_id: str | None
    response_id: str | None
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward for the call that one of the ids names, else for the rollout."""

    value: float
    call_id: str | None = None
    response_id: str | None = None
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True)
class Rollout:
    """A finished sibling: the counted attempt's calls in order, its tool spans, its rewards.

    `outcome` is the rollout's reward as the controller settled it, `ended` the way in which the agent ended. `greedy`:
    its calls were decoded greedily. `failed`: the agent's own failure, one without a reward among them. `rerolls_of`:
    the sibling whose calls before `from_call` it repeated; None for a sibling.
    """

    id: str
    outcome: float
    calls: list[Call] = field(default_factory=list)
    spans: list[ToolSpan] = field(default_factory=list)
    rewards: list[Reward] = field(default_factory=list)
    ended: OutcomeKind = OutcomeKind.SUCCEEDED
    greedy: bool = False
    failed: bool = False
    rerolls_of: str | None = None
    from_call: int | None = None

    @property
    def is_sibling(self) -> bool:
        """Whether its group's means are over it."""
        return not self.greedy and self.rerolls_of is None

    @property
    def reward(self) -> float:
        """All that it earned without AIR, as `store.rewards.REWARD` has it."""
        return self.outcome + sum(reward.value for reward in self.rewards)
