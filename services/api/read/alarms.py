"""Routes of alarms: of all runs, and of one policy of a run."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from leyden.libs.contracts.alarms import ALARM_RULES
from leyden.libs.contracts.api.alarms import AlarmPage, AlarmState
from leyden.libs.service import Problem
from leyden.libs.store.alarms.listing import list_alarms
from leyden.libs.store.read import runs
from leyden.services.api.auth import GuardedRoute, Reader
from leyden.services.api.parameters import Cursor, Limit, PolicyName, Store

router = APIRouter(prefix="/v1", tags=["runs"], route_class=GuardedRoute)

Rule = Annotated[str | None, Query(description="A rule of the table of alarms, such as `tool_fails`.")]
State = Annotated[
    AlarmState | None,
    Query(description="`lasted`: until the end of its run. `ended`: the rule did not hold any more."),
]


@router.get("/alarms")
async def get_alarms(
    store: Store,
    caller: Reader,
    run: Annotated[
        str | None, Query(description="Id or name of a run, with its further policies; all runs when left out.")
    ] = None,
    name: Rule = None,
    state: State = None,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> AlarmPage:
    """List the alarms of all runs with reason, evidence and remedy: active ones first, then those that began last."""
    _check_rule(name)
    async with store.read() as session:
        return await list_alarms(session, run=run, name=name, state=state, cursor=cursor, limit=limit)


@router.get("/runs/{run_id}/alarms")
async def get_run_alarms(
    store: Store,
    caller: Reader,
    run_id: str,
    policy: PolicyName = None,
    name: Rule = None,
    state: State = None,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> AlarmPage:
    """List the alarms of a run's own model, or of a further policy: active ones first, then those that began last."""
    _check_rule(name)
    async with store.read() as session:
        policy_id = await runs.policy_id(session, run_id, policy)
        return await list_alarms(session, policy_id=policy_id, name=name, state=state, cursor=cursor, limit=limit)


def _check_rule(name: str | None) -> None:
    if name is not None and name not in ALARM_RULES:
        known = ", ".join(sorted(ALARM_RULES))
        raise Problem(422, f"no rule of the table of alarms is called {name!r}: write one of {known}", cause="unknown")
