"""The route that shows several runs beside each other."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from leyden.libs.contracts.api.comparison import Comparison
from leyden.libs.store.read.best import best_version
from leyden.libs.store.read.comparison import compare_runs
from leyden.services.api.auth import GuardedRoute, Reader
from leyden.services.api.parameters import Store

router = APIRouter(prefix="/v1/comparison", tags=["runs"], route_class=GuardedRoute)


@router.get("")
async def get_comparison(
    store: Store,
    caller: Reader,
    run: Annotated[list[str], Query(min_length=1, max_length=8, description="Ids of runs, the first one first.")],
    names: Annotated[list[str] | None, Query(max_length=8, description="Series wanted.")] = None,
) -> Comparison:
    """Compare runs: differences of their documents, series, evaluations, and tasks won and lost to the first one."""
    async with store.read() as session:
        found = await compare_runs(session, run, names or ["reward_mean"])
        best = [await best_version(session, one.id) for one in found.runs]
    runs = [
        one.model_copy(update={"best_version": version, "best_version_reason": reason})
        for one, (version, reason) in zip(found.runs, best, strict=True)
    ]
    return found.model_copy(update={"runs": runs})
