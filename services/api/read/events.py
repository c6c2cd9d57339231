"""The stream of what changed in a run, so that a page asks again at once and otherwise seldom."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import StreamingResponse

from leyden.libs.contracts.api.runs import RUN_PARTS
from leyden.libs.store.database import Database
from leyden.libs.store.read.changes import read_marks
from leyden.services.api.auth import GuardedRoute, Reader
from leyden.services.api.parameters import Store

router = APIRouter(prefix="/v1/events", tags=["runs"], route_class=GuardedRoute)

TICK_SECONDS = 2.0
TICKS = 25
"""A stream ends after so many; browsers ask again, and the token is checked again."""
DIGITS = 8
# A proxy such as nginx would keep the events until it has a buffer full.
HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


@router.get("", response_class=StreamingResponse, responses={200: {"content": {"text/event-stream": {}}}})
async def get_events(
    request: Request,
    store: Store,
    caller: Reader,
    run: Annotated[str, Query(description="Id of the run.")],
    last_event_id: Annotated[
        str | None, Header(max_length=200, description="Id of the last event that came: goes on from there.")
    ] = None,
) -> StreamingResponse:
    """Stream the names of what changed in a run, as server-sent events: run, steps, evaluations, rollouts.

    The data of an event are a JSON array of names: all at first, and none or more after `Last-Event-ID`. A stream ends
    after 50 seconds.
    """
    marks = await _marks(store, run)
    events = _events(store, run, marks, last_event_id, request.app.state.stopping)
    return StreamingResponse(events, media_type="text/event-stream", headers=HEADERS)


async def _events(
    store: Database, run: str, marks: list[str], last: str | None, stopping: asyncio.Event
) -> AsyncIterator[str]:
    seen = (last or "").split(".")
    for tick in range(TICKS):
        changed = [part for place, part in enumerate(RUN_PARTS) if seen[place : place + 1] != marks[place : place + 1]]
        # The first one tells that events come through, whatever it says.
        if changed or tick == 0:
            yield f"id: {'.'.join(marks)}\ndata: {json.dumps(changed)}\n\n"
        else:
            # Tells the server, and proxies, whether the browser is still there.
            yield ":\n\n"
        seen = marks
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), TICK_SECONDS)
            return
        marks = await _marks(store, run)


async def _marks(store: Database, run: str) -> list[str]:
    async with store.read() as session:
        marks = await read_marks(session, run)
    return [hashlib.sha256(mark.encode()).hexdigest()[:DIGITS] for mark in marks]
