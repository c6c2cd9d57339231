"""The agents of a run: by the fingerprints in its calls, and the rewards of those that its document names."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Row, text

from leyden.libs.contracts.api.body import Page
from leyden.libs.contracts.api.runs import AgentProgress, RunAgent
from leyden.libs.contracts.conversation import Tool
from leyden.libs.store.database import ReadSession
from leyden.libs.store.read.paging import decode_cursor, page
from leyden.libs.store.rewards import KNOWN_REWARD, SIBLING

_NAMES = ", ".join(
    f"attributes ->> '{name}'"
    for name in (
        *("gen_ai.agent.name", "agent.name", "langsmith.metadata.lc_agent_name", "ai.telemetry.functionId"),
        *("traceloop.association.properties.lc_agent_name", "graph.node.id"),
    )
)

# The call's span, or that of the HTTP request, and the spans around it may name the agent. `c` is the call.
NAME_IN_SPANS = f"""(
    WITH RECURSIVE around AS (
        SELECT s.trace_id, s.parent_span_id, s.attributes, 0 AS depth FROM spans s
        WHERE s.run_id = c.run_id AND s.rollout_id = c.rollout_id AND s.attempt = c.attempt
            AND (s.span_id = c.parent_span_id OR right(s.response_id, 25) = c.request_id)
        UNION ALL
        SELECT s.trace_id, s.parent_span_id, s.attributes, around.depth + 1 FROM around JOIN spans s
            ON s.run_id = c.run_id AND s.rollout_id = c.rollout_id AND s.attempt = c.attempt
            AND s.trace_id = around.trace_id AND s.span_id = around.parent_span_id AND around.depth < 32
    )
    SELECT coalesce({_NAMES}) FROM around WHERE coalesce({_NAMES}) IS NOT NULL ORDER BY depth LIMIT 1
)"""  # noqa: S608  # constants alone

# The call shown of an agent is its first row that holds its tools. Times in nanoseconds have 19 digits until 2286.
_AGENTS = text(f"""
    WITH found AS (
        SELECT agent, max(agent_name) AS name, array_agg(DISTINCT role) FILTER (WHERE role IS NOT NULL) AS roles,
               count(*) AS calls,
               avg((continuation = 'extend')::int) AS extend_share, avg((continuation = 'fork')::int) AS fork_share,
               avg((continuation = 'fresh')::int) AS fresh_share,
               min(sequence) AS first_ns, max(sequence) AS last_ns,
               substr(coalesce(
                   min(sequence::text || id) FILTER (WHERE parent_call_id IS NULL), min(sequence::text || id)
               ), 20) AS call_id
        FROM model_calls WHERE run_id = :run_id AND agent IS NOT NULL
        GROUP BY agent
        HAVING CAST(:first_ns AS bigint) IS NULL OR (min(sequence), agent) > (:first_ns, :agent)
        ORDER BY min(sequence), agent LIMIT :limit
    )
    SELECT found.*, c.rollout_id, c.tools, coalesce(found.name, {NAME_IN_SPANS}) AS shown_name
    FROM found JOIN model_calls c ON c.run_id = :run_id AND c.id = found.call_id
    ORDER BY first_ns, agent
""")  # noqa: S608  # constants alone


# A greedy rollout is a baseline, and shows what the policy would do, not what it samples.
_CONSUMED = f"""
    FROM step_groups JOIN groups ON groups.id = step_groups.group_id
    JOIN rollouts ON rollouts.group_id = groups.id AND rollouts.state = 'finished' AND {SIBLING}
    CROSS JOIN LATERAL (SELECT {KNOWN_REWARD} AS reward OFFSET 0) AS earned
    WHERE step_groups.run_id = :run_id
"""  # constants alone

# Why: steps are read from the last one back, so the cost does not grow with a run's past.
_PROGRESS = text(f"""
    SELECT named.agent, last.step, of_step.rollouts, of_step.reward_mean
    FROM unnest(CAST(:agents AS text[])) WITH ORDINALITY AS named (agent, place)
    LEFT JOIN LATERAL (
        SELECT s.step FROM step_groups s JOIN groups g ON g.id = s.group_id AND g.agent = named.agent
        WHERE s.run_id = :run_id AND s.step IS NOT NULL ORDER BY s.step DESC LIMIT 1
    ) AS last ON true
    CROSS JOIN LATERAL (
        SELECT count(*) AS rollouts, avg(earned.reward) AS reward_mean {_CONSUMED}
            AND step_groups.step = last.step AND groups.agent = named.agent
    ) AS of_step
    ORDER BY named.place
""")  # noqa: S608  # constants alone

_REWARDS = text(f"""
    SELECT step_groups.step, groups.agent, avg(earned.reward) AS reward_mean {_CONSUMED}
        AND step_groups.step IS NOT NULL AND groups.agent IS NOT NULL
    GROUP BY step_groups.step, groups.agent HAVING count(earned.reward) > 0 ORDER BY step_groups.step, groups.agent
""")  # constants alone


async def agents_progress(session: ReadSession, run_id: str, names: Sequence[str]) -> dict[str, AgentProgress]:
    """The rewards of a run's named agents in the last step that consumed rollouts of each."""
    rows = await session.execute(_PROGRESS, {"run_id": run_id, "agents": list(names)})
    return {row.agent: AgentProgress(step=row.step, rollouts=row.rollouts, reward_mean=row.reward_mean) for row in rows}


async def agents_rewards(session: ReadSession, policy_id: str) -> list[tuple[int, str, float]]:
    """The step, the name and the mean reward of each agent with rollouts in a step, for a run that names its agents."""
    return [tuple(row) for row in await session.execute(_REWARDS, {"run_id": policy_id})]


async def list_agents(session: ReadSession, run_id: str, *, cursor: str | None, limit: int) -> Page[RunAgent]:
    """Agents of a run in the order of their first call. It reads all calls of the run."""
    name = f"agents of {run_id}"
    first_ns, agent = decode_cursor(cursor, name, int, str) or (None, None)
    values = {"run_id": run_id, "first_ns": first_ns, "agent": agent, "limit": limit + 1}
    rows = (await session.execute(_AGENTS, values)).all()
    return page(name, rows, limit, _agent, lambda row: (row.first_ns, row.agent))


def _agent(row: Row[Any]) -> RunAgent:
    return RunAgent(
        identity=row.agent,
        name=row.shown_name,
        roles=row.roles or [],
        tools=sorted(Tool(tool).name for tool in row.tools or ()),
        calls=row.calls,
        extend_share=float(row.extend_share or 0),
        fork_share=float(row.fork_share or 0),
        fresh_share=float(row.fresh_share or 0),
        call_id=row.call_id,
        rollout_id=row.rollout_id,
        first_seen_at=datetime.fromtimestamp(row.first_ns / 1e9, UTC),
        last_seen_at=datetime.fromtimestamp(row.last_ns / 1e9, UTC),
    )
