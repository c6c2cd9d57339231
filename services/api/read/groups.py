"""Routes of groups: the siblings of one task side by side."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from leyden.libs.contracts.api.groups import Group
from leyden.libs.store.read import groups
from leyden.services.api.auth import GuardedRoute, Reader
from leyden.services.api.parameters import Store

router = APIRouter(prefix="/v1/groups", tags=["rollouts"], route_class=GuardedRoute)


@router.get("/{group_id}")
async def get_group(
    store: Store,
    caller: Reader,
    group_id: str,
    calls: Annotated[int, Query(ge=0, le=200, description="Calls of each sibling, the first ones.")] = 50,
) -> Group:
    """Show a group: the siblings with the parts of their rewards, their calls and advantages."""
    async with store.read() as session:
        return await groups.get_group(session, group_id, calls=calls)
