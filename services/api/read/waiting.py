"""Routes of what waits: rollouts for people's grades, and the work of the platform."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request

from leyden.libs.contracts.api.waiting import Platform, WaitingPage
from leyden.libs.store.read import runs
from leyden.libs.store.read.waiting import folders_written, list_waiting, read_platform
from leyden.services.api.auth import GuardedRoute, Reader
from leyden.services.api.parameters import Cursor, Limit, Store

router = APIRouter(prefix="/v1", tags=["platform"], route_class=GuardedRoute)


@router.get("/feedback")
async def get_waiting(
    store: Store,
    caller: Reader,
    run: Annotated[str | None, Query(description="Id of a run; all runs when left out.")] = None,
    cursor: Cursor = None,
    limit: Limit = 20,
) -> WaitingPage:
    """List the rollouts that wait for people's grades (`from: feedback`), those that ended first at the beginning."""
    async with store.read() as session:
        if run is not None:
            await runs.check_run(session, run)
        return await list_waiting(session, run, cursor=cursor, limit=limit)


@router.get("/platform")
async def get_platform(request: Request, store: Store, caller: Reader) -> Platform:
    """Show the services as the database sees them, the work that waits, and disk space."""
    async with store.read() as session:
        found = await read_platform(session)
        folders = await folders_written(session)
    return found.model_copy(update={"volumes": await request.app.state.volumes.measure(*folders)})
