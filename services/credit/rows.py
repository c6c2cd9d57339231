"""Between the store's rows and the plain records that credit computes with."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

import numpy as np

from leyden.libs.contracts.call_counts import CallCounts, total, why_nothing_trains
from leyden.libs.contracts.conversation import ToolCall, parse_turn
from leyden.libs.contracts.ids import sample_id
from leyden.libs.contracts.states import CONTEXT_EXCEEDED, CallStatus, GroupVerdict, OutcomeKind
from leyden.libs.store.records.chains import MissingParent, full_prompt
from leyden.libs.store.samples import NewCallCredit, NewGroupCredit, NewSample, PendingGroup, SiblingRows
from leyden.services.credit.group import CREDIT_VERSION, CallCredit, Credited, Excluded
from leyden.services.credit.paths import Path
from leyden.services.credit.records import (
    LOGPROB,
    TOKEN,
    AskedTool,
    BrokenRecord,
    Call,
    Reward,
    Rollout,
    ToolResult,
    ToolSpan,
)


def rollouts_by_group(
    rows: SiblingRows, policies: Mapping[str, str | None] = MappingProxyType({})
) -> dict[str, list[Rollout]]:
    """The finished siblings of each group, in order.

    Args:   policies: those of the roles that do not have the run's own model
    Raises: BrokenRecord: a call contradicts itself, or its parent is missing
    """
    groups: dict[str, list[Rollout]] = defaultdict(list)
    rollouts: dict[str, Rollout] = {}
    for row in rows.rollouts:
        ended = OutcomeKind(row.ended or OutcomeKind.SUCCEEDED)
        rollouts[row.id] = Rollout(
            row.id,
            row.reward,
            ended=ended,
            greedy=row.greedy,
            failed=row.failed,
            rerolls_of=row.rerolls_of,
            from_call=row.from_call,
        )
        groups[row.group_id].append(rollouts[row.id])
    by_id = {row.id: row for row in rows.calls}
    prompts: dict[str, bytes] = {}
    for row in rows.calls:
        rollouts[row.rollout_id].calls.append(_call(row, by_id, prompts, policies.get(row.role)))
    for row in rows.spans:
        rollouts[row.rollout_id].spans.append(_span(row))
    for row in rows.rewards:
        rollouts[row.rollout_id].rewards.append(
            Reward(row.value, call_id=row.call_id, response_id=row.response_id, tool_call_id=row.tool_call_id)
        )
    return groups


def verdict_rows(group: PendingGroup, result: Credited | Excluded) -> list[NewGroupCredit]:
    """The group's rows, for the run's own model and for each of its further policies that trains."""
    return [verdict_row(group, result), *(verdict_row(group, result, policy) for policy in group.policy_ids)]


def verdict_row(group: PendingGroup, result: Credited | Excluded, policy: str | None = None) -> NewGroupCredit:
    """The group's row for one policy, by default the run's own model; mean and (population) standard deviation are over
    the rewards of counted siblings."""
    rewards = np.array(result.rewards, np.float64)
    credited = result if isinstance(result, Credited) else None
    return NewGroupCredit(
        group_id=group.id,
        run_id=_policy_id(group, policy),
        verdict=GroupVerdict.CREDITED if credited else GroupVerdict.EXCLUDED,
        reason=_reason(result, policy, group),
        credit_version=CREDIT_VERSION,
        counted_siblings=len(rewards),
        has_variance=credited.has_variance(policy) if credited else False,
        min_policy_version=credited.min_policy_version(policy) if credited else None,
        reward_mean=float(rewards.mean()) if len(rewards) else None,
        reward_std=float(rewards.std()) if len(rewards) else None,
        averages=credited.averages if credited and policy is None else None,
        calls=_counts(credited, policy, group).model_dump() if credited else None,
    )


def credit_rows(group: PendingGroup, result: Credited | Excluded) -> list[NewCallCredit]:
    """One row per call of the forest; none for an excluded group."""
    return [_credit_row(group.run_id, one) for one in result.credits] if isinstance(result, Credited) else []


def sample_rows(group: PendingGroup, result: Credited | Excluded) -> list[NewSample]:
    """One row per path; none for an excluded group."""
    if isinstance(result, Excluded):
        return []
    return [
        sample_row(_policy_id(group, path.policy), group.id, rollout, path)
        for rollout, rows in result.samples.items()
        for path in rows
    ]


def _reason(result: Credited | Excluded, policy: str | None, group: PendingGroup) -> str | None:
    if isinstance(result, Excluded):
        return result.reason
    if policy in result.left_out:
        return result.left_out[policy]
    return None if result.paths(policy) else why_nothing_trains(_counts(result, policy, group))


def _counts(result: Credited, policy: str | None, group: PendingGroup) -> CallCounts:
    """The counts of a policy's calls. The run's own counts have those of policies that do not train, too."""
    own = {policy} if policy is not None else result.counts.keys() - group.policy_ids.keys()
    return total(counts for name, counts in result.counts.items() if name in own)


def _policy_id(group: PendingGroup, policy: str | None) -> str:
    return group.run_id if policy is None else group.policy_ids[policy]


def _call(row: Any, by_id: Mapping[str, Any], prompts: dict[str, bytes], policy: str | None) -> Call:
    try:
        prompt = full_prompt(by_id, row, prompts)
    except MissingParent as error:
        raise BrokenRecord(str(error)) from error
    if len(prompt) != TOKEN.itemsize * row.prompt_tokens:
        raise BrokenRecord(f"call {row.id}: its prompt has another length than its row says")
    answer = parse_turn(row.answer) if row.answer else None
    return Call(
        id=row.id,
        request_id=row.request_id,
        choice=row.choice,
        sequence=row.sequence,
        completed=row.status == CallStatus.COMPLETED,
        trainable=row.trainable,
        recorded_reason=row.untrainable_reason,
        is_cut=row.finish_reason == "length",
        is_overflow=row.finish_reason == CONTEXT_EXCEEDED,
        masks_forced=row.masks_forced,
        prompt=prompt,
        sampled=row.sampled_ids,
        written=row.written_ids,
        logprobs=row.generator_logprobs,
        versions=row.policy_versions,
        temperature=row.temperature,
        role=row.role,
        request_sha256=row.request_sha256,
        seconds=row.total_seconds or 0.0,
        delivered=row.delivered,
        received_at=row.received_at,
        policy=policy,
        offers_tools=row.offers_tools,
        asked=tuple(map(_asked, answer.tool_calls)) if answer else (),
        text=answer.content if answer else "",
        results=tuple(
            ToolResult(one["id"], one["text"], one["is_error"] is True, row.sequence) for one in row.results or ()
        ),
    )


def _asked(call: ToolCall) -> AskedTool:
    return AskedTool(call.name, call.id, call.is_malformed or not is_json_object(call.arguments))


def is_json_object(arguments: str) -> bool:
    """Whether a tool call's arguments are an object of strict JSON: no text, and no NaN in it."""
    try:
        return isinstance(json.loads(arguments, parse_constant=_refuse), dict)
    except (ValueError, RecursionError):
        return False


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _span(row: Any) -> ToolSpan:
    return ToolSpan(
        span_id=row.span_id,
        parent_span_id=row.parent_span_id,
        scope=row.scope,
        tool=row.tool or "unknown",
        status=row.status,
        tool_call_id=row.tool_call_id,
        response_id=row.response_id,
        start_ns=row.start_ns,
        end_ns=row.end_ns,
    )


def _credit_row(run_id: str, one: CallCredit) -> NewCallCredit:
    uses = [{"tool": use.tool, "status": str(use.status), "source": use.source} for use in one.uses]
    return NewCallCredit(
        run_id=run_id,
        call_id=one.call_id,
        rollout_id=one.rollout_id,
        parent_call_id=one.parent_call_id,
        depth=one.depth,
        state_key=one.state_key,
        tools={"calls": uses},
        intermediate_reward=one.intermediate_reward,
        return_=one.return_,
        baseline=one.baseline,
        advantage=one.advantage,
    )


def sample_row(run_id: str, group_id: str, rollout: str, path: Path) -> NewSample:
    """The row of a path for the run that trains it."""
    return NewSample(
        run_id=run_id,
        id=sample_id(rollout, path.branch),
        group_id=group_id,
        rollout_id=rollout,
        branch=path.branch,
        call_id=path.call_id,
        length=len(path.token_ids),
        trained_tokens=path.trained_tokens,
        token_ids=path.token_ids.astype(TOKEN, copy=False).tobytes(),
        mask=path.mask.tobytes(),
        generator_logprobs=path.generator_logprobs.astype(LOGPROB, copy=False).tobytes(),
        advantages=path.advantages.astype(LOGPROB, copy=False).tobytes(),
        temperatures=path.temperatures.astype(LOGPROB, copy=False).tobytes(),
        policy_versions=path.policy_versions.astype(TOKEN, copy=False).tobytes(),
        min_policy_version=path.min_policy_version,
        calls=[asdict(call) for call in path.calls] or None,
    )
