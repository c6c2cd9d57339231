"""Routes of duels."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from leyden.libs.contracts.api.body import Page
from leyden.libs.contracts.api.duels import Duel, DuelRequest
from leyden.libs.contracts.config.graders import RelativeModel
from leyden.libs.store.database import Session
from leyden.libs.store.read.runs import check_run
from leyden.libs.store.runs.duels import add_duel, list_duels
from leyden.services.api.auth import Caller, GuardedRoute, Reader, Writer
from leyden.services.api.creation import IdempotencyKey, create_once, create_request
from leyden.services.api.models import refusal
from leyden.services.api.parameters import Cursor, Limit, Store

router = APIRouter(prefix="/v1/runs", tags=["runs"], route_class=GuardedRoute)


@router.get("/{run_id}/duels")
async def get_duels(store: Store, caller: Reader, run_id: str, cursor: Cursor = None, limit: Limit = 50) -> Page[Duel]:
    """List the duels of a run's evaluations with their win rates, newest first."""
    async with store.read() as session:
        await check_run(session, run_id)
        return await list_duels(session, run_id, cursor=cursor, limit=limit)


@router.post("/{run_id}/duels", response_model=Duel, status_code=201)
async def create_duel(
    request: Request,
    asked: DuelRequest,
    caller: Writer,
    store: Store,
    run_id: str,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """Store the judged pairs of two evaluations; the answer has their win rates. No reward changes."""
    for number, one in enumerate(asked.reward.components):
        if not isinstance(one.grader, RelativeModel):
            raise refusal(f"reward.components.{number}.grader", "a duel has components with relative_model alone")

    async def work(session: Session) -> tuple[BaseModel, bool]:
        giver: Caller = request.state.caller
        await check_run(session, run_id)
        return await add_duel(session, run_id, asked, giver.name), True

    return await create_once(request, create_request(request, caller, idempotency_key, asked), work)
