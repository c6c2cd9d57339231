"""Requests of agents: the path and the key that name their attempt, a path that names the model, and the body."""

from __future__ import annotations

from collections.abc import Sequence

import orjson
from starlette.requests import Request
from starlette.routing import Route

from leyden.libs.service import Share
from leyden.libs.service.body import read_body
from leyden.services.gateway.calls.context import Attempt
from leyden.services.gateway.dialects.body import read_object

ATTEMPT = "/r/{rollout}/{attempt}"
BASE = ATTEMPT + "/v1"


def moved(routes: Sequence[Route], base: str, to: str) -> list[Route]:
    """The routes below another base."""
    return [
        Route(to + route.path.removeprefix(base), route.endpoint, methods=list(route.methods or ())) for route in routes
    ]


def at_both_bases(routes: Sequence[Route]) -> list[Route]:
    """The routes of one attempt, and the same ones without it, where the key alone names one.

    The latter are for a service that reads its base URL once.
    """
    return [*routes, *moved(routes, ATTEMPT, "")]


async def authenticate(request: Request) -> Attempt:
    """Returns the attempt that the key names, and the path if it names one. Raises: KeyRefused."""
    named = request.path_params.get("rollout"), request.path_params.get("attempt", "")
    attempt: Attempt = await request.app.state.auth.authenticate(request.headers, *named)
    return attempt


async def body_of(request: Request, share: Share) -> bytes:
    """Reads the body, decompressed; each chunk is counted against the limits before it is stored.

    A deployment in the path is the body's `model`. Raises: BadRequest: the body should have it, and is no JSON object
    """
    encoding = request.headers.get("content-encoding", "").strip().lower()
    body = await read_body(request.stream(), encoding, share, max_bytes=request.app.state.settings.max_body_bytes)
    deployment = request.path_params.get("deployment")
    if deployment is None:
        return body
    return orjson.dumps({**read_object(body, param="messages"), "model": deployment})
