"""The routes that show several runs beside each other."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from leyden.libs.contracts.api.body import Page
from leyden.libs.contracts.api.comparison import Comparison, RunCurve
from leyden.libs.store.read.best import best_versions
from leyden.libs.store.read.comparison import compare_runs, run_curves
from leyden.services.api.auth import GuardedRoute, Reader
from leyden.services.api.parameters import Store

router = APIRouter(prefix="/v1", tags=["runs"], route_class=GuardedRoute)


@router.get("/comparison")
async def get_comparison(
    store: Store,
    caller: Reader,
    run: Annotated[list[str], Query(min_length=1, max_length=8, description="Ids of runs, the first one first.")],
    names: Annotated[list[str] | None, Query(max_length=8, description="Series wanted.")] = None,
) -> Comparison:
    """Compare runs: differences of their documents, series, evaluations, and tasks won and lost to the first one."""
    async with store.read() as session:
        found = await compare_runs(session, run, names or ["reward_mean"])
        best = await best_versions(session, run)
    runs = [
        one.model_copy(update={"best_version": best[one.id].version, "best_version_reason": best[one.id].reason})
        for one in found.runs
    ]
    return found.model_copy(update={"runs": runs})


@router.get("/curves")
async def get_curves(
    store: Store,
    caller: Reader,
    run: Annotated[list[str], Query(min_length=1, max_length=100, description="Ids of runs.")],
) -> Page[RunCurve]:
    """Show the reward over steps and the best version of several runs, in one answer; unknown runs are left out."""
    async with store.read() as session:
        return Page[RunCurve](items=await run_curves(session, run))
