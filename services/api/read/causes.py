"""The route of the causes for which a run's rollouts do not count."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from leyden.libs.contracts.api.body import Page
from leyden.libs.contracts.api.rollouts import Cause
from leyden.libs.store.read import runs
from leyden.libs.store.read.rollouts import list_causes
from leyden.services.api.auth import GuardedRoute, Reader
from leyden.services.api.parameters import Store

router = APIRouter(prefix="/v1/runs", tags=["runs"], route_class=GuardedRoute)


@router.get("/{run_id}/causes")
async def get_causes(
    store: Store,
    caller: Reader,
    run_id: str,
    evaluation: Annotated[str | None, Query(description="Id of one, or `none` for training rollouts alone.")] = None,
) -> Page[Cause]:
    """List why rollouts of a run were excluded, failed or taught nothing, the 50 most frequent causes first."""
    async with store.read() as session:
        await runs.check_run(session, run_id)
        return Page(items=await list_causes(session, run_id, evaluation))
