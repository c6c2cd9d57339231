"""Counts of a group's model calls: credit writes them, and steps and runs show their sums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict

from leyden.libs.contracts.untrainable import remedy_of


class CallCounts(BaseModel):
    """Counts of the model calls of counted attempts, without those of greedy rollouts and of re-rolls."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    calls: int = 0
    untrainable: dict[str, int] = {}
    """Calls that do not train, by reason."""
    malformed: int = 0
    """Answers with a tool call whose arguments are no JSON object."""
    empty: int = 0
    """Complete answers without a text and without a tool call."""
    cut: int = 0
    """Answers that `max_tokens` or the model's context cut off."""
    overflows: int = 0
    """Calls that were refused because their messages exceed the model's context."""
    tools: dict[str, dict[str, int]] = {}
    """Tool calls by tool and status: `ok`, `error`, `bare` (it returned a text that shows neither), `unset`."""
    states: int = 0
    """States inside rollouts whose value baseline `monte_carlo` was to measure by re-rolls."""
    unmeasured: int = 0
    """Those of them that have no value: fewer than half of their re-rolls count, since others diverged or were
    excluded."""
    roles: dict[str, int] | None = None
    """Calls by role, without those that have none; null where a version counted that did not know roles."""


def tool_failures(counts: CallCounts) -> dict[str, tuple[int, int]]:
    """By tool the calls that failed, and those whose end is known; tools without such a call are left out. A bare text
    is an end that is no known failure.

    >>> tool_failures(CallCounts(tools={"sql": {"ok": 1, "error": 3, "bare": 2, "unset": 9}, "search": {"unset": 2}}))
    {'sql': (3, 6)}
    """
    ends = ("ok", "error", "bare")
    found = {tool: (one.get("error", 0), sum(one.get(end, 0) for end in ends)) for tool, one in counts.tools.items()}
    return {tool: (failed, known) for tool, (failed, known) in found.items() if known}


def total(counts: Iterable[CallCounts]) -> CallCounts:
    """The sum of counts."""
    every = list(counts)
    untrainable: Counter[str] = Counter()
    tools: dict[str, Counter[str]] = {}
    roles: Counter[str] = Counter()
    for one in every:
        roles.update(one.roles or {})
        untrainable.update(one.untrainable)
        for tool, statuses in one.tools.items():
            tools.setdefault(tool, Counter()).update(statuses)
    return CallCounts(
        calls=sum(one.calls for one in every),
        untrainable=dict(untrainable.most_common()),
        malformed=sum(one.malformed for one in every),
        empty=sum(one.empty for one in every),
        cut=sum(one.cut for one in every),
        overflows=sum(one.overflows for one in every),
        tools={tool: dict(statuses) for tool, statuses in sorted(tools.items())},
        states=sum(one.states for one in every),
        unmeasured=sum(one.unmeasured for one in every),
        roles=None if any(one.roles is None for one in every) else dict(sorted(roles.items())),
    )


def why_nothing_trains(counts: CallCounts) -> str:
    """The reason for which calls without a trainable token have none, with the remedy of the most frequent.

    >>> why_nothing_trains(CallCounts(calls=8, untrainable={"beside the agent's work": 8}))
    "of 8 model calls 8 beside the agent's work: write credit.auxiliary_calls 'train'"
    """
    return ": ".join(filter(None, nothing_trains(counts)))


def nothing_trains(counts: CallCounts) -> tuple[str, str]:
    """The reason for which calls without a trainable token have none, and the remedy; empty where none is known."""
    if not counts.calls:
        return "its rollouts made no model call of this policy", "does the agent use OPENAI_BASE_URL?"
    if not counts.untrainable:
        return "no call of its rollouts has a sampled token", ""
    named = ", ".join(f"{count} {reason}" for reason, count in counts.untrainable.items())
    return f"of {counts.calls} model calls {named}", remedy_of(next(iter(counts.untrainable)))
