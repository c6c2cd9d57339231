"""Counts of a group's model calls by policy: those that do not train with their reasons, odd answers, tool statuses."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from leyden.libs.contracts.call_counts import CallCounts
from leyden.libs.contracts.untrainable import AUXILIARY, NO_TOKENS, NOT_DELIVERED, REPEATED
from leyden.services.credit.air import ToolUse
from leyden.services.credit.records import Call, Rollout


def counts_by_policy(
    rollouts: Iterable[Rollout], uses: Mapping[str, Sequence[ToolUse]]
) -> dict[str | None, CallCounts]:
    """The counts of each policy that answered a call; None for the run's own model.

    Args: uses: the tools of every call that has credit, by call id
    """
    calls: dict[str | None, list[Call]] = defaultdict(list)
    for rollout in rollouts:
        for call in rollout.calls if rollout.is_sibling else ():
            calls[call.policy].append(call)
    return {policy: _counts(of_policy, uses) for policy, of_policy in calls.items()}


def _counts(calls: Sequence[Call], uses: Mapping[str, Sequence[ToolUse]]) -> CallCounts:
    tools: dict[str, Counter[str]] = defaultdict(Counter)
    for use in (use for call in calls for use in uses.get(call.id, ())):
        tools[use.tool]["bare" if use.source == "bare" else str(use.status)] += 1
    bodies = {call.request_sha256 for call in calls if call.id in uses} - {b""}
    found = (_reason(call, has_credit=call.id in uses, is_repeated=call.request_sha256 in bodies) for call in calls)
    reasons = Counter(filter(None, found))
    return CallCounts(
        calls=len(calls),
        untrainable=dict(reasons.most_common()),
        malformed=sum(any(one.is_malformed for one in call.asked) for call in calls),
        empty=sum(call.completed and not call.asked and not call.text.strip() for call in calls),
        cut=sum(call.is_cut for call in calls),
        overflows=sum(call.is_overflow for call in calls),
        tools={tool: dict(statuses) for tool, statuses in sorted(tools.items())},
        roles=dict(sorted(Counter(call.role for call in calls if call.role is not None).items())),
    )


def _reason(call: Call, *, has_credit: bool, is_repeated: bool) -> str | None:
    if (reason := call.untrainable_reason) is not None or has_credit:
        return reason
    if not call.sampled:
        return NO_TOKENS
    if call.delivered is False:
        return NOT_DELIVERED
    return REPEATED if is_repeated else AUXILIARY
