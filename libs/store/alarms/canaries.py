"""Rules about the answers of engines to the canaries of versions."""

from __future__ import annotations

from collections.abc import AsyncIterator

from sqlalchemy import text

from leyden.libs.contracts.alarms import Finding
from leyden.libs.contracts.states import CanaryVerdict
from leyden.libs.store.alarms.attempts import MAX_CAUSE
from leyden.libs.store.database import ReadSession

# Rows of engines that are gone show nothing.
_ANSWERS = text("""
    SELECT a.* FROM canary_answers a JOIN engines e ON e.url = a.url
    WHERE a.run_id = :run AND a.verdict <> 'equal' ORDER BY a.url
""")


async def of_canaries(session: ReadSession, run_id: str) -> AsyncIterator[Finding]:
    """Engines that serve something else than the version that they were given, and those that cannot be compared."""
    for row in await session.execute(_ANSWERS, {"run": run_id}):
        cause = (row.detail or "")[:MAX_CAUSE]
        figures: dict[str, float | str] = {"version": row.policy_version}
        if row.verdict == CanaryVerdict.UNANSWERED:
            reason = f"engine {row.url} cannot be compared with the trainer: {cause}"
            remedy = "use an engine that answers `return_logprob` with the log-probabilities of the prompt"
            yield Finding("not_compared", reason, figures, remedy, row.url)
            continue
        of_answer = {"gap": row.gap, "largest": row.largest, "limit": row.gap_limit, "tokens": row.tokens}
        figures |= {name: one for name, one in {**of_answer, "moved": row.moved}.items() if one is not None}
        reason = f"engine {row.url} was given version {row.policy_version}, and serves something else: {cause}"
        yield Finding("engine_differs", reason, figures, subject=row.url)
