"""Requests of agents: the path and the key that name their attempt, and the body."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.routing import Route

from leyden.libs.service import Share
from leyden.libs.service.body import read_body
from leyden.services.gateway.calls.context import Attempt

BASE = "/r/{rollout}/{attempt}/v1"
SHARED_BASE = "/v1"
"""The base of all attempts, where the key alone names one: for a service that reads its base URL once."""


def at_both_bases(routes: Sequence[Route]) -> list[Route]:
    """The routes of one attempt, and the same ones below the base of all."""
    shared = [
        Route(SHARED_BASE + route.path.removeprefix(BASE), route.endpoint, methods=list(route.methods or ()))
        for route in routes
    ]
    return [*routes, *shared]


async def authenticate(request: Request) -> Attempt:
    """Returns the attempt that the key names, and the path if it names one. Raises: KeyRefused."""
    named = request.path_params.get("rollout"), request.path_params.get("attempt", "")
    attempt: Attempt = await request.app.state.auth.authenticate(request.headers, *named)
    return attempt


async def body_of(request: Request, share: Share) -> bytes:
    """Reads the body, decompressed; each chunk is counted against the limits before it is stored."""
    encoding = request.headers.get("content-encoding", "").strip().lower()
    return await read_body(request.stream(), encoding, share, max_bytes=request.app.state.settings.max_body_bytes)
