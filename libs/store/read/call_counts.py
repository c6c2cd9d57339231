"""Sums of the counts that credit wrote of each group's model calls, by step and for a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import text

from leyden.libs.contracts.alarms import ALARM_RULES
from leyden.libs.contracts.call_counts import CallCounts, total
from leyden.libs.contracts.config import BrokenDocument, RunConfig
from leyden.libs.store.database import ReadSession

_OF_STEPS = text("""
    SELECT s.run_id, s.step, c.calls
    FROM unnest(CAST(:runs AS text[]), CAST(:steps AS integer[])) AS asked (run_id, step)
    JOIN step_groups s ON s.run_id = asked.run_id AND s.step = asked.step
    JOIN group_credits c ON c.group_id = s.group_id AND c.run_id = s.run_id AND c.calls IS NOT NULL
""")

# Why: a long run has thousands of groups, so the database adds up.
_OF_RUN = text("""
    WITH counted AS (SELECT calls FROM group_credits WHERE run_id = :run AND calls IS NOT NULL)
    SELECT jsonb_build_object(
        'calls', coalesce(sum((calls ->> 'calls')::bigint), 0),
        'malformed', coalesce(sum((calls ->> 'malformed')::bigint), 0),
        'empty', coalesce(sum((calls ->> 'empty')::bigint), 0),
        'cut', coalesce(sum((calls ->> 'cut')::bigint), 0),
        'overflows', coalesce(sum((calls ->> 'overflows')::bigint), 0),
        'states', coalesce(sum((calls ->> 'states')::bigint), 0),
        'unmeasured', coalesce(sum((calls ->> 'unmeasured')::bigint), 0),
        'untrainable', (
            SELECT coalesce(jsonb_object_agg(key, count), '{}')
            FROM (SELECT key, sum(value::bigint) AS count FROM counted, jsonb_each_text(calls -> 'untrainable')
                  GROUP BY key) AS reasons),
        'tools', (
            SELECT coalesce(jsonb_object_agg(tool, statuses), '{}')
            FROM (SELECT tool, jsonb_object_agg(status, count) AS statuses
                  FROM (SELECT tools.key AS tool, found.key AS status, sum(found.value::bigint) AS count
                        FROM counted, jsonb_each(calls -> 'tools') AS tools, jsonb_each_text(tools.value) AS found
                        GROUP BY 1, 2) AS single
                  GROUP BY tool) AS of_tools))
    FROM counted
""")

# Two steps in a row, or the only one: then no step has learned anything. The first step of fine-tuning judges all that
# cannot train; where it trains nothing, no second one follows.
_WITHOUT_A_TRAINABLE_TOKEN = text("""
    SELECT s.run_id, array_agg(newest.number ORDER BY newest.number) AS steps
    FROM run_status s JOIN runs r ON r.id = s.run_id
    CROSS JOIN LATERAL (SELECT number FROM steps WHERE run_id = s.run_id ORDER BY number DESC LIMIT 2) AS newest
    WHERE s.phase IN ('running', 'evaluating')
    GROUP BY s.run_id, r.steps, r.algorithm
    HAVING count(*) >= least(CASE WHEN r.algorithm = 'sft' THEN 1 ELSE 2 END, r.steps) AND bool_and(
        EXISTS (SELECT FROM step_groups g WHERE g.run_id = s.run_id AND g.step = newest.number)
        AND NOT EXISTS (SELECT FROM step_groups g
                        WHERE g.run_id = s.run_id AND g.step = newest.number AND g.verdict <> 'untrainable')
        AND NOT EXISTS (SELECT FROM step_replays g WHERE g.run_id = s.run_id AND g.step = newest.number))
""")

# The calls of further policies are others: that nothing of one trains is found among its steps.
_FIRST_STEPS = text("""
    SELECT r.id AS run_id, r.config, array_agg(first.number ORDER BY first.number) AS steps
    FROM runs r JOIN run_status s ON s.run_id = r.id
    JOIN policies ON policies.id = r.id AND policies.name = ''
    CROSS JOIN LATERAL (SELECT number FROM steps WHERE run_id = r.id ORDER BY number LIMIT 2) AS first
    WHERE s.phase IN ('running', 'evaluating') AND (CAST(:run AS text) IS NULL OR r.id = :run)
    GROUP BY r.id
""")


# Why EXISTS: a role that calls have had once is found early.
_ROLES_SEEN = text("""
    SELECT role FROM unnest(CAST(:roles AS text[])) AS role
    WHERE EXISTS (SELECT FROM group_credits WHERE run_id = :run AND jsonb_exists(calls -> 'roles', role))
""")


class AbsentRoles(NamedTuple):
    """Roles in `train` that no call of a run's first steps has."""

    steps: list[int]
    roles: list[str]
    are_all: bool
    """Whether the run trains no other role of its own policy."""

    def __str__(self) -> str:
        return f"{self.reason}: {ALARM_RULES['role_without_calls'].remedy}"

    @property
    def reason(self) -> str:
        """The steps and the roles, in words."""
        steps = f"step{'s' if len(self.steps) > 1 else ''} {' and '.join(map(str, self.steps))}"
        return f"no call of {steps} has the role {' or '.join(self.roles)}, which the run trains"


async def of_steps(session: ReadSession, run_id: str, steps: Sequence[int]) -> dict[int, CallCounts]:
    """The counts of the groups that each step consumed; steps of older versions have none."""
    return (await _of_runs(session, {run_id: steps})).get(run_id, {})


async def _of_runs(session: ReadSession, steps: Mapping[str, Sequence[int]]) -> dict[str, dict[int, CallCounts]]:
    """The counts of the steps of several runs, by run and step."""
    asked = [(run_id, step) for run_id, numbers in steps.items() for step in numbers]
    columns = {"runs": [run_id for run_id, _ in asked], "steps": [step for _, step in asked]}
    found: dict[str, dict[int, list[CallCounts]]] = {}
    for row in await session.execute(_OF_STEPS, columns):
        found.setdefault(row.run_id, {}).setdefault(row.step, []).append(CallCounts.model_validate(row.calls))
    return {run_id: {step: total(one) for step, one in of_run.items()} for run_id, of_run in found.items()}


async def of_run(session: ReadSession, run_id: str) -> CallCounts:
    """The counts of all credited groups of a run."""
    return total([CallCounts.model_validate(await session.scalar(_OF_RUN, {"run": run_id}))])


async def runs_that_train_nothing(session: ReadSession) -> dict[str, tuple[list[int], CallCounts]]:
    """Runs at work whose newest steps, two in a row or the only one, had no token that can be trained: those steps,
    and the counts of their calls."""
    rows = (await session.execute(_WITHOUT_A_TRAINABLE_TOKEN)).all()
    counts = await _of_runs(session, {row.run_id: row.steps for row in rows})
    return {row.run_id: (row.steps, total(counts.get(row.run_id, {}).values())) for row in rows}


async def absent_roles(session: ReadSession, run_id: str | None = None) -> dict[str, AbsentRoles]:
    """Runs at work, or this one, with roles in `train` that no call of their first two steps has."""
    first = (await session.execute(_FIRST_STEPS, {"run": run_id})).all()
    trained = {row.run_id: (row.steps, roles) for row in first if (roles := _trained_roles(row.config))}
    counts = await _of_runs(session, {name: steps for name, (steps, _) in trained.items()})
    found = {}
    for name, (steps, roles) in trained.items():
        seen = total(counts.get(name, {}).values())
        absent = set(roles) - set(seen.roles) if seen.calls and seen.roles is not None else set()
        if absent:
            found[name] = AbsentRoles(steps, [role for role in roles if role in absent], absent == set(roles))
    return found


async def roles_seen(session: ReadSession, run_id: str, roles: Sequence[str]) -> set[str]:
    """Those of the roles that a call of any credited group of the run has."""
    return set(await session.scalars(_ROLES_SEEN, {"run": run_id, "roles": list(roles)}))


def _trained_roles(config: Mapping[str, Any]) -> list[str]:
    """The roles in `train` whose calls the run's own policy answers; none where the document does not parse."""
    found = RunConfig.read(config)
    if isinstance(found, BrokenDocument):
        return []
    return [role.name for role in found.roles if role.policy is None and role.name in (found.train or ())]
