"""Reasons for which a run does not learn: its newest attempts fail in the same way, or its steps met trouble."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import select, text

from leyden.libs.contracts.call_counts import CallCounts, tool_failures, total, why_nothing_trains
from leyden.libs.contracts.untrainable import UNKNOWN, remedy_of
from leyden.libs.store import tables
from leyden.libs.store.database import ReadSession
from leyden.libs.store.read.call_counts import absent_roles, of_steps
from leyden.libs.store.runs import failure_rewards, grading
from leyden.libs.store.runs.trainer_ends import trainer_ends

ATTEMPTS = 100
MIN_ATTEMPTS, MIN_GROUPS, MIN_TOOL_CALLS, MIN_TOOL_STEPS = 4, 4, 10, 4
"""Fewer prove nothing."""
SHARE = 0.5
"""A warning is about more than this share of the attempts, or of their model calls."""
MAX_CAUSE = 300

STEPS = 20
_NEWEST_STEPS = text("SELECT number FROM steps WHERE run_id = :run_id ORDER BY number DESC LIMIT :steps")
_UNCOMPARED = text("""
    SELECT count(*) AS steps, count(*) FILTER (WHERE (metrics ->> 'logprob_gap_tokens')::float = 0) AS uncompared
    FROM (SELECT metrics FROM steps WHERE run_id = :run_id ORDER BY number DESC LIMIT :steps) newest
""")
_DAMAGED = text("""
    SELECT count(*), (array_agg(step ORDER BY created_at DESC))[1], (array_agg(cause ORDER BY created_at DESC))[1]
    FROM damaged_steps WHERE run_id = :run_id
""")

_NEWEST = text("""
    SELECT o.kind, o.detail, right(o.stderr_tail, 2000) AS stderr, r.group_id, r.reason, v.has_variance,
           v.min_policy_version IS NOT NULL AS is_trainable,
           c.calls, c.untrainable, c.untrainable_reason
    FROM (SELECT * FROM outcomes WHERE run_id = :run_id AND kind <> 'cancelled'
          ORDER BY created_at DESC LIMIT :attempts) o
    JOIN rollouts r ON r.id = o.rollout_id
    LEFT JOIN group_credits v ON v.group_id = r.group_id AND v.run_id = r.run_id AND v.verdict = 'credited'
    CROSS JOIN LATERAL (
        SELECT count(*) AS calls, count(*) FILTER (
                   WHERE m.status = 'completed' AND NOT m.trainable AND NOT r.greedy) AS untrainable,
               max(m.untrainable_reason) FILTER (WHERE m.status = 'completed') AS untrainable_reason
        FROM model_calls m WHERE m.run_id = :run_id AND m.rollout_id = o.rollout_id AND m.attempt = o.attempt) c
""")


async def run_warnings(session: ReadSession, run_id: str) -> list[str]:
    """The warnings of a run that is not pruned, each with its remedy; empty when most attempts are well."""
    rows = await session.execute(_NEWEST, {"run_id": run_id, "attempts": ATTEMPTS})
    attempts = warnings_of([dict(row) for row in rows.mappings()])
    attempts += await failure_rewards.warnings(session, run_id)
    attempts += await grading.warnings(session, run_id)
    return [*await _idle_step(session, run_id), *attempts, *[one async for one in _of_steps(session, run_id)]]


def failing_tools(steps: Mapping[int, CallCounts]) -> list[str]:
    """Tools most of whose calls failed in these steps. In its first steps a policy may not know a tool yet."""
    if len(steps) < MIN_TOOL_STEPS:
        return []
    return [
        f"tool {tool} failed in {failed} of the {known} calls of the last {len(steps)} steps whose end is known: read"
        " one with `leyden rollout show`, or say by credit.air.failures what a failure of this tool is"
        for tool, (failed, known) in tool_failures(total(steps.values())).items()
        if known >= MIN_TOOL_CALLS and failed > SHARE * known
    ]


async def _of_steps(session: ReadSession, run_id: str) -> AsyncIterator[str]:
    newest = await session.scalars(_NEWEST_STEPS, {"run_id": run_id, "steps": STEPS})
    for warning in failing_tools(await of_steps(session, run_id, newest.all())):
        yield warning
    for absent in (await absent_roles(session, run_id)).values():
        yield str(absent)
    steps, uncompared = (await session.execute(_UNCOMPARED, {"run_id": run_id, "steps": STEPS})).one()
    if uncompared:
        yield (
            f"in {uncompared} of the last {steps} steps trainer and engine were not compared: the weights that sampled"
            " the tokens are gone, or there is no memory for a second model; the trainer's log names the cause"
        )
    ends, last_end = await trainer_ends(session, run_id)
    if last_end is not None:
        yield (
            f"a trainer of the run ended {ends} times; the last, after step {last_end.step}:"
            f" {last_end.reason[:MAX_CAUSE]}"
        )
    times, step, cause = (await session.execute(_DAMAGED, {"run_id": run_id})).one()
    if times:
        yield (
            f"a trainer found files of steps damaged, {times} times, and went back to an older checkpoint: check the"
            f" storage of TRAINER_FOLDER. The last, of step {step}: {cause[:MAX_CAUSE]}"
        )


def warnings_of(attempts: Sequence[Mapping[str, Any]]) -> list[str]:
    """The warnings about these attempts, worst first."""
    if len(attempts) < MIN_ATTEMPTS:
        return []
    found = [*_failures(attempts)]
    silent = [one for one in attempts if one["reason"] == "no_reward" and one["kind"] == "succeeded"]
    if len(silent) > SHARE * len(attempts):
        remedy = 'end its output with a line such as {"reward": 1.0}, or name graders in `reward`'
        found.append(f"{_count(silent, attempts)} gave no reward: {remedy}")
    mute = [one for one in attempts if not one["calls"] and one["kind"] != "infra_error"]
    if len(mute) > SHARE * len(attempts):
        found.append(f"{_count(mute, attempts)} made no model call: does the agent use OPENAI_BASE_URL?")
    calls, untrainable = (sum(one[name] for one in attempts) for name in ("calls", "untrainable"))
    if untrainable > SHARE * calls:
        reasons = Counter(one["untrainable_reason"] or UNKNOWN for one in attempts if one["untrainable"])
        why = reasons.most_common(1)[0][0]
        found.append(f"{untrainable} of the last {calls} model calls do not train: {why}: {remedy_of(why)}")
    return found + _equal_rewards(attempts)


async def _idle_step(session: ReadSession, run_id: str) -> list[str]:
    """Says that the newest step had no token that can be trained."""
    query = select(tables.Step).where(tables.Step.run_id == run_id).order_by(tables.Step.number.desc()).limit(1)
    step = (await session.scalars(query)).one_or_none()
    if step is None or step.metrics.get("trainable_tokens", 1):
        return []
    counts = (await of_steps(session, run_id, [step.number])).get(step.number, CallCounts())
    return [f"step {step.number} had no token that can be trained: {why_nothing_trains(counts)}"]


def _failures(attempts: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    """The most frequent failure, numbers apart."""
    failed = [(one["kind"], _cause(one)) for one in attempts if one["kind"] != "succeeded"]
    alike = Counter((kind, re.sub(r"\d+", "#", cause)) for kind, cause in failed)
    for (kind, pattern), count in alike.most_common(1):
        if count > SHARE * len(attempts):
            cause = next(cause for other, cause in failed if (other, re.sub(r"\d+", "#", cause)) == (kind, pattern))
            yield f"{count} of the last {len(attempts)} attempts ended as {kind}: {cause}"


def _cause(attempt: Mapping[str, Any]) -> str:
    """The detail, and of an agent's own failure the last line that it wrote to stderr."""
    lines = attempt["stderr"].split("\n") if attempt["kind"] == "agent_error" else []
    last = next((line.strip() for line in reversed(lines) if line.strip()), None)
    return ": ".join(part for part in (attempt["detail"], last) if part)[:MAX_CAUSE] or "no cause is known"


def _equal_rewards(attempts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Credit decided it, from every kind of reward. A group without a token that can be trained shows nothing."""
    groups = {one["group_id"]: one["has_variance"] for one in attempts if one["is_trainable"]}
    if len(groups) < MIN_GROUPS or any(groups.values()):
        return []
    return [f"in each of the last {len(groups)} groups all rewards are equal: there is nothing to learn from them"]


def _count(some: Sequence[object], attempts: Sequence[object]) -> str:
    return f"{len(some)} of the last {len(attempts)} attempts"
