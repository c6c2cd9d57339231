"""A group with the verdicts on it, its siblings, their components and the beginnings of their calls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from sqlalchemy import select, text

from leyden.libs.contracts.api.groups import Group, GroupPolicy, Sibling, SiblingCall
from leyden.libs.contracts.api.rollouts import CallCredit, RewardComponent
from leyden.libs.contracts.states import ENDED, GroupState
from leyden.libs.store import tables
from leyden.libs.store.database import ReadSession
from leyden.libs.store.read.rollouts import rollouts_of_group

TEXT_CHARACTERS = 300
"""Shown of an answer."""


class UnknownGroup(LookupError):
    """No group has this id."""

    def __init__(self, group_id: str) -> None:
        super().__init__(f"no group has the id {group_id!r}: the answer about a rollout names its group")


# A call of a sibling that has no counted attempt yet is one of its last.
_ATTEMPTS = """
    SELECT id, coalesce(attempt, (SELECT max(number) FROM attempts WHERE rollout_id = rollouts.id)) AS attempt
    FROM rollouts WHERE group_id = :group_id AND rerolls_of IS NULL
"""

_CALLS = text(f"""
    SELECT calls.*, credits.parent_call_id, credits.depth, credits.state_key, credits.tools AS credit_tools,
        credits.intermediate_reward, credits.return, credits.baseline, credits.advantage
    FROM ({_ATTEMPTS}) AS shown
    CROSS JOIN LATERAL (
        SELECT id, rollout_id, sequence, status, trainable, untrainable_reason, role, prompt_tokens, completion_tokens,
            finish_reason, md5(prompt_ids) AS asked, md5(sampled_ids || coalesce(written_ids, '')) AS answered,
            left(coalesce(answer ->> 'content', ''), {TEXT_CHARACTERS}) AS text,
            jsonb_path_query_array(coalesce(answer, '{{}}'), '$.tool_calls[*].name') AS tools
        FROM model_calls
        WHERE run_id = :run_id AND rollout_id = shown.id AND attempt = shown.attempt ORDER BY sequence, id LIMIT :calls
    ) AS calls
    LEFT JOIN credits ON credits.run_id = :run_id AND credits.call_id = calls.id
    ORDER BY calls.sequence, calls.id
""")  # noqa: S608  # constants alone

_COUNTS = text(f"""
    SELECT shown.id, shown.attempt, count(calls.id) AS calls,
        coalesce(sum(calls.completion_tokens), 0)::bigint AS tokens
    FROM ({_ATTEMPTS}) AS shown
    LEFT JOIN model_calls AS calls
        ON calls.run_id = :run_id AND calls.rollout_id = shown.id AND calls.attempt = shown.attempt
    GROUP BY shown.id, shown.attempt
""")  # noqa: S608  # constants alone


_POLICIES = text("""
    SELECT policies.name, credit.verdict, credit.reason, credit.has_variance, consumed.step,
        consumed.verdict AS consumption
    FROM policies
    LEFT JOIN group_credits AS credit ON credit.run_id = policies.id AND credit.group_id = :group_id
    LEFT JOIN step_groups AS consumed ON consumed.run_id = policies.id AND consumed.group_id = :group_id
    WHERE policies.run_id = :run_id AND policies.name <> '' AND policies.trains
    ORDER BY policies.name
""")


async def get_group(session: ReadSession, group_id: str, *, calls: int) -> Group:
    """A group with its siblings.

    Args: calls: at most so many of each sibling, the first ones
    Raises: UnknownGroup
    """
    group = await session.get(tables.Group, group_id)
    if group is None:
        raise UnknownGroup(group_id)
    credit = await session.get(tables.GroupCredit, (group_id, group.run_id))
    consumed = await session.get(tables.StepGroup, (group_id, group.run_id))
    task = await session.get(tables.Task, (group.dataset_id, group.task_number))
    return Group(
        id=group.id,
        run_id=group.run_id,
        evaluation_id=group.evaluation_id,
        agent=group.agent,
        number=group.number,
        dataset_id=group.dataset_id,
        task_number=group.task_number,
        task=task.payload if task else {},
        admitted_version=group.admitted_version,
        state=group.state,
        verdict=credit.verdict if credit else None,
        awaits_credit=credit is None and await _is_pending(session, group),
        reason=credit.reason if credit else None,
        reward_mean=credit.reward_mean if credit else None,
        reward_std=credit.reward_std if credit else None,
        has_variance=credit.has_variance if credit else None,
        step=consumed.step if consumed else None,
        consumption=consumed.verdict if consumed else None,
        policies=await _policies(session, group),
        siblings=await _siblings(session, group, calls),
        rerolls=await rollouts_of_group(session, group.id, rerolls=True),
        created_at=group.created_at,
        finished_at=group.finished_at,
    )


async def _is_pending(session: ReadSession, group: tables.Group) -> bool:
    """Whether credit works on the group once it has no verdict."""
    if group.state != GroupState.COMPLETE or group.evaluation_id is not None:
        return False
    phase = await session.scalar(select(tables.RunStatus.phase).where(tables.RunStatus.run_id == group.run_id))
    return phase is not None and phase not in ENDED


async def _policies(session: ReadSession, group: tables.Group) -> list[GroupPolicy]:
    if group.evaluation_id is not None:
        return []
    rows = await session.execute(_POLICIES, {"run_id": group.run_id, "group_id": group.id})
    return [GroupPolicy.model_validate(row, from_attributes=True) for row in rows]


async def _siblings(session: ReadSession, group: tables.Group, limit: int) -> list[Sibling]:
    scope = {"group_id": group.id, "run_id": group.run_id, "calls": limit}
    counts = {row.id: row for row in await session.execute(_COUNTS, scope)}
    calls: dict[str, list[SiblingCall]] = defaultdict(list)
    for record in (await session.execute(_CALLS, scope)).mappings():
        calls[record["rollout_id"]].append(_call(record))
    components = await _components(session, group)
    return [
        Sibling(
            **rollout.model_dump(),
            components=components[rollout.id],
            shown_attempt=counts[rollout.id].attempt,
            calls=calls[rollout.id],
            call_count=counts[rollout.id].calls,
            sampled_tokens=counts[rollout.id].tokens,
        )
        for rollout in await rollouts_of_group(session, group.id)
    ]


async def _components(session: ReadSession, group: tables.Group) -> dict[str, list[RewardComponent]]:
    """Those that the shown rewards are of: the newest ones of an evaluation, else the first ones, which trained."""
    table, rollout = tables.RolloutReward, tables.Rollout
    query = select(table, rollout.attempt).join(rollout, rollout.id == table.rollout_id)
    order = (table.attempt, table.revision, table.position)
    rows = await session.execute(query.where(rollout.group_id == group.id).order_by(*order))
    found: dict[str, dict[tuple[int, int], list[RewardComponent]]] = defaultdict(lambda: defaultdict(list))
    for row, counted in rows:
        if counted is None or row.attempt == counted:
            one = RewardComponent.model_validate(row, from_attributes=True)
            found[row.rollout_id][row.attempt, row.revision].append(one)
    chosen = {name: max(of) if group.evaluation_id else (max(of)[0], 1) for name, of in found.items()}
    return defaultdict(list, {name: found[name][key] for name, key in chosen.items()})


def _call(record: Mapping[Any, Any]) -> SiblingCall:
    values = {name: record[name] for name in SiblingCall.model_fields.keys() - {"credit"}}
    if record["advantage"] is None:
        return SiblingCall(**values, credit=None)
    credit = {name: record[name] for name in CallCredit.model_fields.keys() - {"return_", "tools"}}
    credit |= {"return": record["return"], "tools": record["credit_tools"]}
    return SiblingCall(**values, credit=CallCredit.model_validate(credit))
