"""Requests of agents: the path and the key that name their attempt, a path that names the model, and the body.

A request is watched from its last byte on: what it waits for from then on is the platform's time, and what came before
was its client's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import Route

from leyden.libs.service import Share
from leyden.libs.service.body import read_body
from leyden.services.gateway.auth import Authenticator
from leyden.services.gateway.calls.context import Attempt
from leyden.services.gateway.dialects.body import read_object
from leyden.services.gateway.errors import GatewayError, Unavailable
from leyden.services.gateway.records.deliveries import Deliveries, Delivery

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


def attempt_of(request: Request) -> Attempt:
    """Returns the attempt that the key names, and the path if it names one; it may have ended. Raises: KeyRefused."""
    named = request.path_params.get("rollout"), request.path_params.get("attempt", "")
    attempt: Attempt = request.app.state.auth.attempt_of(request.headers, *named)
    return attempt


async def authenticate(request: Request) -> Attempt:
    """Returns the running attempt that a request without a model call is for. Raises: KeyRefused, Unavailable."""
    attempt = attempt_of(request)
    async with watched(request, request.app.state.calls.visit(attempt), is_read=False):
        await request.app.state.auth.confirm(attempt)
    return attempt


@asynccontextmanager
async def watched(request: Request, delivery: Delivery, *, is_read: bool = True) -> AsyncIterator[None]:
    """Ends the watch of a request that gets no call of its own in the block, and notes when its client leaves.

    A refusal of what the agent asked for is an answer; an error of the platform is none.

    Args: is_read: whether the client has sent all of its body, so that nothing but its hang-up can follow
    """
    deliveries: Deliveries = request.app.state.deliveries
    leaving: list[asyncio.Task[None]] = []
    if is_read:
        # Only for a request that waits for long: most have their call within a moment.
        delivery.on_wait = lambda: leaving.append(asyncio.create_task(_note_leaving(request, delivery)))
    has_failed = False
    try:
        yield
    except BaseException as error:
        has_failed = not _is_answer(error)
        raise
    finally:
        delivery.on_wait = lambda: None
        for task in leaving:
            task.cancel()
        if not (delivery.has_call or delivery.is_ended):
            answered = True if delivery.left_at is None else None
            deliveries.end_early(delivery, delivered=False if has_failed else answered)


async def disconnected(request: Request) -> None:
    """Returns when the client disconnects; call it after reading the body."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _note_leaving(request: Request, delivery: Delivery) -> None:
    await disconnected(request)
    delivery.left_at = time.perf_counter()


def _is_answer(error: BaseException) -> bool:
    status = error.status if isinstance(error, GatewayError) else 500
    return (error.status_code if isinstance(error, HTTPException) else status) < 500


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


async def body_of_running(request: Request, attempt: Attempt, share: Share) -> bytes:
    """Reads the body while the gateway asks whether the attempt runs, so that no ended one fills the memory for bodies.

    No answer yet stops nothing here: the request's watch begins after its body, and the caller confirms the attempt in
    it. Raises: KeyRefused: it has ended; BadRequest
    """
    auth: Authenticator = request.app.state.auth
    if auth.is_confirmed(attempt):
        return await body_of(request, share)
    confirming, reading = asyncio.create_task(auth.confirm(attempt)), asyncio.create_task(body_of(request, share))
    try:
        await asyncio.wait({confirming, reading}, return_when=asyncio.FIRST_COMPLETED)
        if confirming.done():
            with suppress(Unavailable):
                confirming.result()
        return await reading
    finally:
        confirming.cancel()
        reading.cancel()
        await asyncio.gather(confirming, reading, return_exceptions=True)
