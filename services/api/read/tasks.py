"""The route of a run's tasks: attempts, rewards by version, and failures of each."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query

from leyden.libs.contracts.api.tasks import RunTaskPage, TaskVerdict
from leyden.libs.store.read import runs
from leyden.libs.store.read.tasks import TaskSort, list_run_tasks
from leyden.services.api.auth import GuardedRoute, Reader
from leyden.services.api.parameters import Cursor, Limit, Store

router = APIRouter(prefix="/v1/runs", tags=["runs"], route_class=GuardedRoute)


@router.get("/{run_id}/tasks")
async def get_run_tasks(
    store: Store,
    caller: Reader,
    run_id: str,
    evaluation: Annotated[str | None, Query(description="Id of one, or `none` for training rollouts alone.")] = None,
    verdict: Annotated[
        TaskVerdict | Literal["unknown"] | None, Query(description="`unknown`: no rollout has a reward.")
    ] = None,
    sort: Annotated[
        TaskSort, Query(description="`highest` and `lowest` sort by mean reward, `failure` by the last one's time.")
    ] = "number",
    cursor: Cursor = None,
    limit: Limit = 100,
) -> RunTaskPage:
    """List the tasks of a run: attempts, mean reward by version, whether they are solved, and the last failure."""
    async with store.read() as session:
        await runs.check_run(session, run_id)
        return await list_run_tasks(
            session, run_id, evaluation=evaluation, verdict=verdict, sort=sort, cursor=cursor, limit=limit
        )
