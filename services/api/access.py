"""Routes of bearer tokens."""

from __future__ import annotations

import secrets

from fastapi import APIRouter, Request, Response

from libs.contracts import api
from libs.contracts.ids import new_id
from libs.service import JsonResponse, Problem
from libs.store import access
from libs.store.database import Database
from services.api.auth import Admin

router = APIRouter(prefix="/v1/tokens", tags=["tokens"])


@router.post("", response_model=api.IssuedToken, status_code=201)
async def create_token(request: Request, asked: api.TokenRequest, caller: Admin) -> Response:
    """Make a bearer token. Its secret is in this answer and nowhere else, so a repeat makes another one."""
    database: Database = request.app.state.database
    secret = f"leyden_{secrets.token_urlsafe(32)}"
    async with database.session() as session:
        token = await access.add_token(session, new_id("token"), asked.name, secret, asked.scopes)
    return JsonResponse({**token.model_dump(mode="json"), "token": secret}, 201)


@router.get("")
async def list_tokens(request: Request, caller: Admin) -> api.Page[api.Token]:
    """List tokens, newest first, without their secrets."""
    database: Database = request.app.state.database
    async with database.read() as session:
        return api.Page(items=await access.list_tokens(session))


@router.delete("/{token_id}", status_code=204)
async def revoke_token(request: Request, token_id: str, caller: Admin) -> None:
    """Revoke a token; a repeat changes nothing."""
    database: Database = request.app.state.database
    async with database.session() as session:
        found = await access.revoke_token(session, token_id)
    if not found:
        raise Problem(404, f"no token has the id {token_id!r}: list tokens to find it", cause="unknown")
