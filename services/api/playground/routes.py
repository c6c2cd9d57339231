"""The route of the playground: it asks the gateway with a key that belongs to no attempt."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from leyden.libs.capability import sign
from leyden.libs.contracts.api.playground import PlaygroundRequest
from leyden.libs.contracts.capability import PLAYGROUND, Capability
from leyden.libs.contracts.capability import Scope as KeyScope
from leyden.libs.contracts.states import ENDED
from leyden.libs.service import Problem
from leyden.libs.store.database import Database
from leyden.libs.store.engines import has_engines, newest_policy_version, serving_engines
from leyden.libs.store.read import runs
from leyden.services.api.attempts.context import AttemptContext, context_of
from leyden.services.api.auth import GuardedRoute, Writer
from leyden.services.api.parameters import Store

router = APIRouter(prefix="/v1/runs/{run_id}/playground", tags=["runs"], route_class=GuardedRoute)

KEY_SECONDS = 120
# Longer than the gateway lets a person wait.
SILENCE = httpx.Timeout(10.0, read=30.0)
HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


class _Passed(StreamingResponse):
    """Passes an answer's events on, and ends what it holds whether or not the browser reads them."""

    def __init__(self, answer: httpx.Response, held: AsyncExitStack) -> None:
        super().__init__(_events(answer), media_type="text/event-stream", headers=HEADERS)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._held:
            await super().__call__(scope, receive, send)


@router.post("", response_class=StreamingResponse, responses={200: {"content": {"text/event-stream": {}}}})
async def ask_policy(
    request: Request, store: Store, caller: Writer, run_id: str, asked: PlaygroundRequest
) -> StreamingResponse:
    """Ask the policy that engines serve for the run, and stream its answer; nothing is recorded, and nothing trains.

    Events: `tokens` with `content`, `reasoning` and `tokens` (text, log-probability, version), then `end` with
    `finish_reason`, `tool_calls`, `prompt_tokens` and `completion_tokens`, or `error`. A token has one question at a
    time (429). 503 where no engine serves the policy, 409 where those that do serve another version than `version`; no
    engine is started for it, and no other version answers.
    """
    context = context_of(request)
    policy_id = await _served(store, run_id, asked)
    asking: set[str] = request.app.state.asking
    if caller in asking:
        raise Problem(429, "this token has a question in hand: wait for its answer, or leave it", cause="busy")
    async with AsyncExitStack() as stack:
        asking.add(caller)
        stack.callback(asking.discard, caller)
        answer = await _ask(stack, context, policy_id, asked)
        return _Passed(answer, stack.pop_all())


async def _served(store: Database, run_id: str, asked: PlaygroundRequest) -> str:
    """The policy's id. Raises: Problem: no engine serves it, or none its version."""
    async with store.read() as session:
        policy_id = await runs.policy_id(session, run_id, asked.policy)
        served = {one.policy_version for one in await serving_engines(session) if one.run_id == policy_id}
        if asked.version is not None:
            newest = await newest_policy_version(session, policy_id)
            if newest is not None and asked.version > newest:
                raise Problem(
                    404, f"run {run_id} has no version {asked.version}: its newest is {newest}", cause="not_found"
                )
        if served and asked.version is not None and asked.version not in served:
            raise Problem(409, _other_version(run_id, asked, served), cause="version_not_served")
        if served or not await has_engines(session):
            return policy_id
        run = await runs.get_run(session, run_id)
    raise Problem(503, _unserved(run_id, run.phase), cause="not_served")


def _other_version(run_id: str, asked: PlaygroundRequest, served: set[int | None]) -> str:
    """The sentence of a 409: an engine has the weights of one version of a run."""
    versions = ", ".join(str(one) for one in sorted(one for one in served if one is not None)) or "none"
    policy = "" if asked.policy is None else f" --policy {asked.policy}"
    return (
        f"engines serve version {versions} of run {run_id}, and each serves one at a time, so version {asked.version}"
        " cannot answer: ask the served one, or copy the other by `leyden policy export"
        f" {run_id}{policy} --version {asked.version} --to FOLDER` and serve that beside it"
    )


def _unserved(run_id: str, phase: str) -> str:
    if phase in ENDED:
        remedy = f"continue it, or copy a version by `leyden policy export {run_id}` and serve that"
    else:
        remedy = "it is paused, waits for its pool, or engines load its weights: the page Platform says what they serve"
    return f"no engine serves run {run_id}, which is {phase}: {remedy}"


async def _ask(
    stack: AsyncExitStack, context: AttemptContext, policy_id: str, asked: PlaygroundRequest
) -> httpx.Response:
    """The gateway's answer, whose events are still to be read. Raises: Problem: it has none."""
    claims = {"run_id": policy_id, "rollout_id": PLAYGROUND, "attempt": 0, "scopes": {KeyScope.PLAYGROUND}}
    key = sign(context.keys, Capability(**claims, expires_at=int(time.time()) + KEY_SECONDS))
    client = await stack.enter_async_context(httpx.AsyncClient(timeout=SILENCE))
    try:
        answer = await stack.enter_async_context(
            client.stream(
                "POST",
                f"{context.gateway_url}/playground",
                params={} if asked.version is None else {"version": asked.version},
                json=_completion(asked),
                headers={"authorization": f"Bearer {key}"},
            )
        )
        if answer.status_code == 200:
            return answer
        await answer.aread()
    except httpx.TransportError as error:
        raise Problem(
            503, "the gateway does not answer: try again, and see `leyden doctor`", cause="gateway"
        ) from error
    raise _refused(answer)


def _completion(asked: PlaygroundRequest) -> dict[str, Any]:
    system = [{"role": "system", "content": asked.system}] if asked.system else []
    messages = [*system, {"role": "user", "content": asked.user}]
    more: dict[str, Any] = {"temperature": asked.temperature, "max_tokens": asked.max_tokens}
    if asked.tools:
        more["tools"] = asked.tools
    if asked.seed is not None:
        more["seed"] = asked.seed
    return {"model": "policy", "messages": messages, **more}


def _refused(answer: httpx.Response) -> Problem:
    try:
        error = answer.json()["error"]
        detail, cause = str(error["message"]), str(error["code"])
    except (ValueError, LookupError, TypeError):
        return Problem(502, f"the gateway answered {answer.status_code}: see its log", cause="gateway")
    # A key that it refuses is this platform's fault, not the caller's.
    status = 502 if answer.status_code in {401, 403} else answer.status_code
    retry = answer.headers.get("retry-after")
    return Problem(status, detail, cause=cause, headers={} if retry is None else {"retry-after": retry})


async def _events(answer: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for piece in answer.aiter_raw():
            yield piece
    except httpx.TransportError:
        message = "the gateway was lost in the middle of the answer: ask again"
        yield f'event: error\ndata: {{"error": {{"message": "{message}"}}}}\n\n'.encode()
