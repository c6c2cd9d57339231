"""The rule about a run's pool of embeddings: without an engine that embeds, attempts that ask end as infra_error."""

from __future__ import annotations

from collections.abc import AsyncIterator

from sqlalchemy import text

from leyden.libs.contracts.alarms import ALARM_RULES, Finding
from leyden.libs.contracts.states import RunPhase
from leyden.libs.store.alarms.attempts import MAX_CAUSE
from leyden.libs.store.database import ReadSession

AT_WORK = {RunPhase.RUNNING, RunPhase.EVALUATING}

# A pool has changed last when its last engine went.
_POOL = text("""
    SELECT p.name IS NOT NULL AS is_known, count(e.url) AS engines,
        count(*) FILTER (WHERE e.state = 'serving') AS serving,
        extract(epoch FROM clock_timestamp() - greatest(coalesce(s.started_at, s.updated_at), max(e.silent_since),
            CASE WHEN count(e.url) = 0 THEN p.updated_at END))::float8 AS seconds,
        (array_agg(concat(e.url, ': ', e.detail) ORDER BY e.url) FILTER (WHERE e.detail IS NOT NULL))[1] AS cause
    FROM run_status s LEFT JOIN pools p ON p.name = :pool AND p.embeddings LEFT JOIN engines e ON e.pool = p.name
    WHERE s.run_id = :run GROUP BY s.started_at, s.updated_at, p.name, p.updated_at
""")


async def of_embeddings(session: ReadSession, run_id: str, phase: RunPhase, pool: str) -> AsyncIterator[Finding]:
    """Args: pool: the one that the run's document names under `embeddings`"""
    if phase not in AT_WORK:
        return
    rule = ALARM_RULES["no_embeddings"]
    row = (await session.execute(_POOL, {"run": run_id, "pool": pool})).one()
    if row.serving or row.seconds <= rule.limit:
        return
    reason = f"no engine of pool {pool!r} has embedded for {row.seconds:.0f} s"
    if not row.is_known:
        reason = f"no pool {pool!r} embeds"
    elif not row.engines:
        reason = f"pool {pool!r} has no engine"
    cause = f": {row.cause[:MAX_CAUSE]}" if row.cause else ""
    figures = {"seconds": row.seconds, "limit_seconds": rule.limit, "engines": row.engines}
    yield Finding(rule.name, f"{reason}{cause}", figures, subject=pool)
