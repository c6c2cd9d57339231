"""The route of a rollout's transitions."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from leyden.libs.contracts.api.body import Page
from leyden.libs.contracts.api.trajectory import Transition
from leyden.libs.store.read.trajectory.transitions import read_trajectory
from leyden.services.api.auth import GuardedRoute, Reader
from leyden.services.api.parameters import Cursor, Store

router = APIRouter(prefix="/v1/rollouts", tags=["rollouts"], route_class=GuardedRoute)


@router.get("/{rollout_id}/trajectory")
async def get_trajectory(
    store: Store,
    caller: Reader,
    rollout_id: str,
    cursor: Cursor = None,
    limit: Annotated[int, Query(ge=1, le=100, description="Items on a page.")] = 20,
) -> Page[Transition]:
    """List a rollout as transitions by time: state, action, reward, next state. Texts are cut; `whole` has all of one.

    The attempt is the one that counts, or else the newest. A state has fields of the task, results of tools, and values
    that the agent's telemetry gave.
    """
    async with store.read() as session:
        return await read_trajectory(session, rollout_id, cursor=cursor, limit=limit)
