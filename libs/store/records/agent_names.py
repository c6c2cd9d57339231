"""Names of agents: a name that a call or its spans have shown belongs to the agent's fingerprint within the run."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import select, text

from leyden.libs.store import tables
from leyden.libs.store.database import ReadSession, Session
from leyden.libs.store.read.agents import NAME_IN_SPANS

# Sorted: transactions that name agents of one run wait for each other in one order.
_LEARN = text(f"""
    INSERT INTO agent_names (run_id, agent, name)
    SELECT run_id, agent, name FROM (
        SELECT c.run_id, c.agent, coalesce(u.name, {NAME_IN_SPANS}) AS name
        FROM (
            SELECT m.run_id, m.agent, max(m.agent_name) AS name, (array_agg(m.id ORDER BY m.sequence))[1] AS call_id
            FROM rollouts r JOIN model_calls m
                ON m.run_id = r.run_id AND m.rollout_id = r.id AND m.attempt = r.attempt AND m.agent IS NOT NULL
            WHERE r.group_id = ANY(:groups) AND m.run_id = ANY(:runs)
                AND NOT EXISTS (SELECT FROM agent_names n WHERE n.run_id = m.run_id AND n.agent = m.agent)
            GROUP BY m.run_id, m.agent) AS u
        JOIN model_calls c ON c.run_id = u.run_id AND c.id = u.call_id AND c.run_id = ANY(:runs)) AS found
    WHERE name IS NOT NULL ORDER BY run_id, agent
    ON CONFLICT DO NOTHING
""")  # noqa: S608  # constants alone


async def learn_names(session: Session, groups: Collection[str], runs: Collection[str]) -> None:
    """Stores the names of the agents in these groups of runs. Idempotency key: run and fingerprint; the first stays."""
    await session.execute(_LEARN, {"groups": list(groups), "runs": list(runs)})


async def agent_name(session: ReadSession, run_id: str, agent: str) -> str | None:
    """The name of a fingerprint in a run; None while nothing has shown it."""
    table = tables.AgentName
    return await session.scalar(select(table.name).where(table.run_id == run_id, table.agent == agent))
