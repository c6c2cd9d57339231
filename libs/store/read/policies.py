"""The further policies of runs as the API shows them: inside their run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Any

from sqlalchemy import text

from leyden.libs.contracts.api.alarms import Alarm
from leyden.libs.contracts.api.runs import RunParent, RunPolicy
from leyden.libs.store.alarms.stored import lasting_alarms
from leyden.libs.store.database import ReadSession

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
