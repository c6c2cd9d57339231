"""A rollout as transitions: state, action, reward and next state."""

from __future__ import annotations

from typing import Literal

from leyden.libs.contracts.api.body import Body


class Excerpt(Body):
    """The beginning of a text."""

    text: str
    cut: bool
    """Whether the text goes on."""
    characters: int
    """The length of the whole text."""


class State(Body):
    """The semantic variables at a moment of an attempt."""

    variables: dict[str, Excerpt]
    """`task.FIELD`: a field of the task. `tool.NAME`: the newest result of a tool, from its span when it ended, or from
    the request that sent it to the model. `agent.NAME`: the newest value that the agent's telemetry gave to a component
    that is `from: otlp`."""
    left_out: bool
    """Whether there are more: a state has the first 30 fields of the task, and 30 others, those that changed last."""


class Transition(Body):
    """One step of an attempt: a call to the model, or a tool that ran."""

    type: Literal["llm", "tool"]
    """`tool`: a span of a tool; embeddings are such spans. A tool without a span is in the next state alone."""
    id: str
    """The id of the call, or of the span."""
    attempt: int
    component: str | None
    """The tool, or the role of the call, else the name of its agent; null where unknown."""
    status: str
    started_ns: int
    """Nanoseconds since the epoch: the arrival at the gateway, or the start by the clock of the span's sender."""
    state: State
    input: Excerpt | None
    """The turns that the call adds to its parent's conversation, as JSON, or the tool's arguments; null where the
    span has none."""
    output: Excerpt | None
    """The answer as JSON, or the tool's result; null without one."""
    whole: str
    """The path of a page whose one item has all of it."""
    reward: float | None
    """The intermediate reward of a call, by credit: that of the tools that it asked for (`credit.air`), and all that
    was given to it. Null: unknown, as for tools and for a call that credit has not computed. The reward of the rollout
    itself is not among them."""
    next_state: State | None
    """The state at the next step; null for the last one so far."""
