"""The policies of runs as the API shows them: further ones inside their run, and the versions of each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Any, cast

from sqlalchemy import select, text

from leyden.libs.contracts.api.alarms import Alarm
from leyden.libs.contracts.api.body import Page
from leyden.libs.contracts.api.runs import PolicyVersion, RunParent, RunPolicy
from leyden.libs.store import tables
from leyden.libs.store.alarms.stored import lasting_alarms
from leyden.libs.store.database import ReadSession
from leyden.libs.store.read.paging import decode_cursor, page
from leyden.libs.store.rewards import GIVEN_OF_RUNS, SIBLING, TRAINING_REWARD

# A policy continues the policy of its name in its run's parent.
_SHOWN = text("""
    SELECT policies.id, policies.run_id, policies.name, policies.trains, made.steps,
        run.parent_run_id, made.parent_version,
        coalesce((SELECT max(number) FROM steps WHERE steps.run_id = policies.id), 0) AS step,
        (SELECT max(version) FROM policy_versions WHERE policy_versions.run_id = policies.id) AS policy_version
    FROM policies
    JOIN runs AS made ON made.id = policies.id
    JOIN runs AS run ON run.id = policies.run_id
    WHERE policies.run_id = ANY(:runs) AND policies.name <> ''
    ORDER BY policies.name
""")

# Groups are admitted at a version of the run's own model; its further policies sample with theirs of the same number.
_TRAINED = text(f"""
    WITH given AS MATERIALIZED ({GIVEN_OF_RUNS})
    SELECT groups.admitted_version AS version, avg({TRAINING_REWARD}) AS reward FROM groups
    JOIN runs ON runs.id = groups.run_id
    JOIN rollouts ON rollouts.group_id = groups.id AND rollouts.state = 'finished' AND {SIBLING}
    LEFT JOIN given ON given.id = rollouts.id
    WHERE groups.run_id = ANY(:run_ids) AND groups.admitted_version = ANY(:versions) AND groups.state = 'complete'
        AND groups.evaluation_id IS NULL
    GROUP BY groups.admitted_version
""")  # noqa: S608  # constants alone

_SERVED = text("""
    SELECT version, count(*) AS engines FROM (
        SELECT url, policy_version AS version FROM engines WHERE run_id = :policy AND state IN ('serving', 'draining')
        UNION
        SELECT url, engine_adapters.policy_version FROM engine_adapters JOIN engines USING (url)
        WHERE engine_adapters.run_id = :policy AND state IN ('serving', 'draining')
    ) AS served WHERE version IS NOT NULL GROUP BY version
""")


async def shown_policies(session: ReadSession, run_ids: Collection[str]) -> dict[str, dict[str, RunPolicy]]:
    """The further policies of each run by name."""
    found = defaultdict[str, dict[str, RunPolicy]](dict)
    rows = (await session.execute(_SHOWN, {"runs": list(run_ids)})).all()
    alarms = await lasting_alarms(session, [row.id for row in rows]) if rows else {}
    for row in rows:
        found[row.run_id][row.name] = _policy(row, alarms.get(row.id, []))
    return found


def _policy(row: Any, alarms: list[Alarm]) -> RunPolicy:
    is_new = row.parent_run_id is None or row.parent_version is None
    return RunPolicy(
        id=row.id,
        trains=row.trains,
        step=row.step,
        steps=row.steps,
        policy_version=row.policy_version,
        parent=None if is_new else RunParent(run_id=row.parent_run_id, version=row.parent_version),
        alarms=alarms,
    )


async def list_policy_versions(
    session: ReadSession, run_id: str, policy_id: str, *, kept: bool | None = None, cursor: str | None, limit: int
) -> Page[PolicyVersion]:
    """Versions of a policy of a run from 0, with the engines that serve them and what they earned in training.

    Args: kept: those alone whose files are there, or were removed
    """
    table, name = tables.PolicyVersion, f"policy versions of {policy_id}"
    conditions = [table.run_id == policy_id]
    if kept is not None:
        conditions.append(table.pruned_at.is_(None) if kept else table.pruned_at.is_not(None))
    if key := decode_cursor(cursor, name, int):
        conditions.append(table.version > cast(int, key[0]))
    query = select(table).where(*conditions).order_by(table.version).limit(limit + 1)
    rows = (await session.scalars(query)).all()
    asked = {"run_ids": [run_id], "versions": [row.version for row in rows]}
    earned = {row.version: row.reward for row in await session.execute(_TRAINED, asked)}
    served = {row.version: row.engines for row in await session.execute(_SERVED, {"policy": policy_id})}
    return page(
        name,
        rows,
        limit,
        lambda row: PolicyVersion.model_validate(row, from_attributes=True).model_copy(
            update={"reward_mean": earned.get(row.version), "engines": served.get(row.version, 0)}
        ),
        lambda row: (row.version,),
    )
