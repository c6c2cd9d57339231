"""Requests of agents: the path that names their attempt, its key, and the body."""

from __future__ import annotations

from starlette.requests import Request

from leyden.libs.service import Share
from leyden.libs.service.body import read_body
from leyden.services.gateway.calls.context import Attempt

BASE = "/r/{rollout}/{attempt}/v1"


async def authenticate(request: Request) -> Attempt:
    """Returns the attempt that path and key name. Raises: KeyRefused."""
    path = request.path_params
    attempt: Attempt = await request.app.state.auth.authenticate(request.headers, path["rollout"], path["attempt"])
    return attempt


async def body_of(request: Request, share: Share) -> bytes:
    """Reads the body, decompressed; each chunk is counted against the limits before it is stored."""
    encoding = request.headers.get("content-encoding", "").strip().lower()
    return await read_body(request.stream(), encoding, share, max_bytes=request.app.state.settings.max_body_bytes)
