"""Changes of the API: one transaction each, which also records whose token asked for it; and their list.

Every route that changes something does it inside `changing`. A test calls each of them and looks for its entry.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel

from leyden.libs.contracts.api.body import Page
from leyden.libs.contracts.api.tokens import AuditEntry
from leyden.libs.contracts.conversation import Json
from leyden.libs.store import access
from leyden.libs.store.database import Database, Session
from leyden.services.api.auth import Admin, Caller, GuardedRoute
from leyden.services.api.parameters import Cursor, Limit, Store

router = APIRouter(prefix="/v1/audit", tags=["tokens"], route_class=GuardedRoute)

RECORDED = ("id", "number", "key", "name", "component", "value", "revision", "total", "call_id", "scopes", "expires_at")
"""Fields of a new thing that its entry holds."""


@dataclass
class Change:
    """The transaction of one change. `is_new` false: a repeat, which changed nothing and leaves no entry."""

    session: Session
    caller: Caller
    subject: str | None
    is_new: bool = True
    detail: Json = field(default_factory=dict)

    def made(self, thing: BaseModel) -> None:
        """Records the new thing: its id is the subject where the address names none."""
        found = thing.model_dump(mode="json", include=set(RECORDED))
        if self.subject is None:
            self.subject = found.pop("id", None)
        self.detail |= {name: value for name, value in found.items() if value is not None}


@asynccontextmanager
async def changing(request: Request) -> AsyncIterator[Change]:
    """A transaction of the request; its end writes the entry, unless an exception or `is_new` says that none is due."""
    database: Database = request.app.state.database
    caller: Caller = request.state.caller
    async with database.session() as session:
        change = Change(session, caller, next(iter(request.path_params.values()), None))
        yield change
        if change.is_new:
            action = request.scope["route"].name
            await access.add_audit_entry(session, caller.token_id, caller.name, action, change.subject, change.detail)


@router.get("")
async def get_audit(
    store: Store,
    caller: Admin,
    token: Annotated[str | None, Query(max_length=200, description="Id or name of the token.")] = None,
    action: Annotated[str | None, Query(max_length=100, description="The operation, such as `create_reward`.")] = None,
    subject: Annotated[str | None, Query(max_length=300, description="The id or name that was changed.")] = None,
    cursor: Cursor = None,
    limit: Limit = 50,
) -> Page[AuditEntry]:
    """List the changes that bearer tokens asked for, newest first: who did what, and when."""
    async with store.read() as session:
        return await access.list_audit(session, token=token, action=action, subject=subject, cursor=cursor, limit=limit)
