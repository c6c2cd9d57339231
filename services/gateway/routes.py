"""HTTP in, HTTP out: the agents' addresses under `/r/{rollout}/{attempt}/v1`."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from leyden.libs.service import JsonResponse, Share
from leyden.libs.service.plain import PlainRoute
from leyden.services.gateway.answer import Completion, model_body, models_body
from leyden.services.gateway.door import Door
from leyden.services.gateway.forward import Call, Gateway
from leyden.services.gateway.stream import EventStream, hung_up, result_of

HUNG_UP = 499
UNWATCHED_SECONDS = 0.25
"""How old a call is before anyone looks whether its agent has hung up: a task more, which short calls do without."""


async def chat_completions(request: Request) -> Response:
    """A chat completion, whole or as a stream."""
    door = await _door(request)
    gateway: Gateway = request.app.state.gateway
    with request.app.state.budget.share() as share:
        chat, call = await gateway.begin(door, await _body(request, share), request.headers)
    if chat.stream:
        settings = request.app.state.settings
        return EventStream(gateway, chat, call, settings.keepalive_after_seconds, settings.keepalive_seconds)
    if isinstance(call, Completion):
        return JsonResponse(call.body())
    completion = await _until_hung_up(call, request.receive)
    return Response(status_code=HUNG_UP) if completion is None else JsonResponse(completion.body())


async def models(request: Request) -> Response:
    """The model behind this door."""
    await _door(request)
    return JsonResponse(models_body(request.app.state.gateway.model.name))


async def model(request: Request) -> Response:
    """Any name is served by the policy."""
    await _door(request)
    return JsonResponse(model_body(request.path_params["name"]))


DOOR = "/r/{rollout}/{attempt}/v1"
CHAT = DOOR + "/chat/completions"
ROUTES = (
    PlainRoute(CHAT, chat_completions, methods=["POST"]),
    PlainRoute(DOOR + "/models", models, methods=["GET"]),
    PlainRoute(DOOR + "/models/{name:path}", model, methods=["GET"]),
)


async def _door(request: Request) -> Door:
    named = request.path_params
    door: Door = await request.app.state.doors.open(request.headers, named["rollout"], named["attempt"])
    return door


async def _body(request: Request, share: Share) -> bytes:
    """The body; each piece is counted before it is kept."""
    parts: list[bytes] = []
    async for part in request.stream():
        share.take(len(part))
        parts.append(part)
    return b"".join(parts)


async def _until_hung_up(call: Call, receive: Receive) -> Completion | None:
    """The call's answer; None when the agent hung up before."""
    assert call.task is not None
    with call.watched():
        done, _ = await asyncio.wait({call.task}, timeout=UNWATCHED_SECONDS)
        if not done:
            await _ended_or_hung_up(call.task, receive)
        return result_of(call.task) if call.task.done() else None


async def _ended_or_hung_up(task: asyncio.Task[Completion], receive: Receive) -> None:
    hangup = asyncio.create_task(hung_up(receive))
    try:
        await asyncio.wait({task, hangup}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        hangup.cancel()
        with suppress(asyncio.CancelledError):
            await hangup
