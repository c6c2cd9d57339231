"""Rules about the newest attempts of a run and their model calls."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import text

from leyden.libs.contracts.alarms import ALARM_RULES, Finding
from leyden.libs.contracts.states import CONTEXT_EXCEEDED
from leyden.libs.contracts.untrainable import FROZEN, UNKNOWN, remedy_of
from leyden.libs.store.database import ReadSession

MAX_CAUSE = 300
"""Characters of a cause."""

Attempt = Mapping[str, Any]

_NEWEST = text("""
    SELECT o.kind, o.detail, right(o.stderr_tail, 2000) AS stderr, r.reason,
           c.calls, c.overflows, c.unfinished, c.training, c.untrainable, c.untrainable_reason
    FROM (SELECT o.* FROM outcomes o JOIN rollouts r ON r.id = o.rollout_id AND r.rerolls_of IS NULL
          WHERE o.run_id = :run_id AND o.kind <> 'cancelled' ORDER BY o.created_at DESC LIMIT :attempts) o
    JOIN rollouts r ON r.id = o.rollout_id
    JOIN groups g ON g.id = r.group_id
    CROSS JOIN LATERAL (
        SELECT count(*) AS calls, count(*) FILTER (WHERE m.finish_reason = :overflow) AS overflows,
               count(*) FILTER (WHERE m.status <> 'completed' AND m.finish_reason IS DISTINCT FROM :overflow)
                   AS unfinished,
               count(*) FILTER (WHERE of_training) AS training,
               count(*) FILTER (WHERE of_training AND m.status = 'completed' AND NOT m.trainable AND NOT r.greedy)
                   AS untrainable,
               max(m.untrainable_reason) FILTER (WHERE of_training AND m.status = 'completed') AS untrainable_reason
        FROM model_calls m
        -- Evaluations and frozen policies train nothing, and sample as their agents ask.
        CROSS JOIN LATERAL (SELECT g.evaluation_id IS NULL
            AND NOT coalesce(starts_with(m.untrainable_reason, :frozen), false) AS of_training) AS chosen
        WHERE m.run_id = :run_id AND m.rollout_id = o.rollout_id AND m.attempt = o.attempt) c
""")


async def of_attempts(session: ReadSession, run_id: str) -> list[Finding]:
    """The rules about attempts that hold for a run with records."""
    newest = ALARM_RULES["agents_fail"].window
    scope = {"run_id": run_id, "attempts": newest, "overflow": CONTEXT_EXCEEDED, "frozen": FROZEN}
    rows = await session.execute(_NEWEST, scope)
    return judge_attempts([dict(row) for row in rows.mappings()])


def judge_attempts(attempts: Sequence[Attempt]) -> list[Finding]:
    """The rules that hold for these attempts, which are the newest ones of a run."""
    return [*_failures(attempts), *_silent(attempts), *_overflows(attempts), *_calls(attempts)]


def _failures(attempts: Sequence[Attempt]) -> Iterator[Finding]:
    """The most frequent failure of agents, numbers apart, and those of the platform with their most frequent cause."""
    agents = [_cause(one) for one in attempts if one["kind"] in {"agent_error", "timeout"}]
    alike = Counter((kind, _pattern(cause)) for kind, cause in agents)
    for (kind, pattern), count in alike.most_common(1):
        cause = next(cause for other, cause in agents if (other, _pattern(cause)) == (kind, pattern))
        yield from _share("agents_fail", count, attempts, f"ended as {kind}: {cause}", cause=cause)
    platform = [cause for kind, cause in map(_cause, attempts) if kind == "infra_error"]
    for pattern, _ in Counter(map(_pattern, platform)).most_common(1):
        cause = next(cause for cause in platform if _pattern(cause) == pattern)
        yield from _share("platform_fails", len(platform), attempts, f"ended as infra_error: {cause}", cause=cause)


def _silent(attempts: Sequence[Attempt]) -> Iterator[Finding]:
    without_reward = sum(one["reason"] == "no_reward" and one["kind"] == "succeeded" for one in attempts)
    yield from _share("no_reward", without_reward, attempts, "gave no reward")
    without_call = sum(not one["calls"] and one["kind"] != "infra_error" for one in attempts)
    yield from _share("no_model_call", without_call, attempts, "made no model call")


def _overflows(attempts: Sequence[Attempt]) -> Iterator[Finding]:
    calls, beyond = sum(one["calls"] for one in attempts), sum(one["overflows"] for one in attempts)
    which = sum(one["overflows"] > 0 for one in attempts)
    sent = f"sent messages beyond the model's context, in {beyond} of the {calls} model calls of all"
    yield from _share("context_overflows", which, attempts, sent, overflows=beyond, calls=calls)


def _share(
    name: str, count: int, attempts: Sequence[Attempt], ended: str, **evidence: str | float
) -> Iterator[Finding]:
    """Args: count: of the attempts that ended so"""
    rule = ALARM_RULES[name]
    if count >= rule.at_least and count > rule.limit * len(attempts):
        of_all: dict[str, float | str] = {"attempts": len(attempts), "share": count / len(attempts)}
        figures = {"count": count, **of_all, **evidence}
        yield Finding(name, f"{count} of the last {len(attempts)} attempts {ended}", figures)


def _calls(attempts: Sequence[Attempt]) -> Iterator[Finding]:
    calls, untrainable = (sum(one[name] for one in attempts) for name in ("training", "untrainable"))
    rule = ALARM_RULES["untrainable_calls"]
    if len(attempts) >= rule.at_least and untrainable > rule.limit * calls:
        reasons = Counter(one["untrainable_reason"] or UNKNOWN for one in attempts if one["untrainable"])
        why = reasons.most_common(1)[0][0]
        figures = {"count": untrainable, "calls": calls, "share": untrainable / calls}
        reason = f"{untrainable} of the last {calls} model calls do not train: {why}"
        yield Finding(rule.name, reason, figures, remedy_of(why))
    # Calls of an attempt that the platform ended were cut off by it.
    theirs = [one for one in attempts if one["kind"] != "infra_error"]
    calls, unfinished = (sum(one[name] for one in theirs) for name in ("calls", "unfinished"))
    rule = ALARM_RULES["calls_fail"]
    if len(theirs) >= rule.at_least and unfinished > rule.limit * calls:
        figures = {"count": unfinished, "calls": calls, "share": unfinished / calls}
        yield Finding(rule.name, f"{unfinished} of the last {calls} model calls have no complete answer", figures)


def _pattern(cause: str) -> str:
    return re.sub(r"\d+", "#", cause)


def _cause(attempt: Attempt) -> tuple[str, str]:
    """The kind and the detail, and of an agent's own failure the last line that it wrote to stderr."""
    lines = attempt["stderr"].split("\n") if attempt["kind"] == "agent_error" else []
    last = next((line.strip() for line in reversed(lines) if line.strip()), None)
    cause = ": ".join(part for part in (attempt["detail"], last) if part)[:MAX_CAUSE] or "no cause is known"
    return attempt["kind"], cause
