"""Answers people who try a policy: by the templates and engines of attempts, without an attempt and without a record.

The API alone comes through this door, with a key of scope `playground`, which opens no other. Nothing here writes a
row, so no answer can train. At most `MAX_CALLS` run at once in a gateway: attempts lose no more of their engines.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from leyden.libs.contracts.conversation import Json
from leyden.libs.contracts.ids import new_call_id
from leyden.services.gateway.calls.context import Answer, ModelRequest, Prompt, SampledTokens, seed_of_call
from leyden.services.gateway.calls.streaming import EventStream
from leyden.services.gateway.dialects.chat_completions import ChatCompletions
from leyden.services.gateway.engine.client import EngineClient
from leyden.services.gateway.engine.sglang import EngineRequest
from leyden.services.gateway.errors import GatewayError, OtherVersion, TooManyCalls, Unavailable
from leyden.services.gateway.prompt.answer import AnswerStream, finish_answer
from leyden.services.gateway.prompt.models import PoolModels, ServedModel
from leyden.services.gateway.prompt.reasoning import Piece
from leyden.services.gateway.requests import body_of
from leyden.services.gateway.samplers.engine import check_vocabulary, engine_request

MAX_CALLS = 2
FIRST_TOKEN_SECONDS = 20.0
"""How long a call waits for an engine: a swap of weights takes seconds, a person no longer."""
ANSWER_SECONDS = 60.0
CHAT_COMPLETIONS = ChatCompletions()


class Playground:
    """Runs the calls of people, `MAX_CALLS` of them at once."""

    def __init__(self, models: PoolModels, engines: EngineClient) -> None:
        self._models = models
        self._engines = engines
        self._running = 0

    async def ask(self, policy_id: str, body: bytes, version: int | None = None) -> AsyncGenerator[bytes]:
        """Yields the events of an answer to a chat completion's body: `tokens` as they come, then `end` or `error`.

        Args: version: alone answers; None: any that an engine serves
        Raises: GatewayError: before the first event
        """
        request = replace(CHAT_COMPLETIONS.parse(body, max_choices=1), stream=True, logprobs=True)
        with self._place():
            served = await self._models.of_run(policy_id)
            call_id, seed = new_call_id(), request.sampling.seed
            choice = SampledTokens(call_id, 0, seed_of_call(call_id) if seed is None else seed)
            prompt = (await served.prefixes.whole(("playground", call_id), request)).prompt
            check_vocabulary(served.chat, request, prompt)
            temperature = 1.0 if request.sampling.temperature is None else request.sampling.temperature
            asked = engine_request(served, request, prompt, (policy_id, call_id), temperature)
            asked = replace(asked, version=version)
            async with aclosing(self._follow(served, request, prompt, asked, choice)) as events:
                async for event in events:
                    yield event

    @contextmanager
    def _place(self) -> Iterator[None]:
        if self._running >= MAX_CALLS:
            message = f"{MAX_CALLS} people already try a policy here, and rollouts come first; ask again in a moment."
            raise TooManyCalls(message, code="rate_limit_exceeded", retry_after_seconds=5)
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    async def _follow(
        self, served: ServedModel, request: ModelRequest, prompt: Prompt, asked: EngineRequest, choice: SampledTokens
    ) -> AsyncGenerator[bytes]:
        shown = AnswerStream(served.chat, request, prompt, choice)
        progress = asyncio.Event()
        sampling = asyncio.create_task(self._engines.sample(asked, choice, progress.set))
        sampling.add_done_callback(lambda _: progress.set())
        began, has_begun = time.perf_counter(), False
        try:
            while not sampling.done():
                await _wait(progress, began, choice)
                progress.clear()
                _check_version(asked.version, choice)
                if not sampling.done() and any(text := shown.next_text()):
                    yield _tokens(text, shown, choice)
                    has_begun = True
            sampling.result()
            _check_version(asked.version, choice)
            answer = finish_answer(served.chat, request, prompt, choice)
            yield _tokens(shown.rest(answer), shown, choice) + _end(answer, prompt, choice)
        except GatewayError as error:
            if not has_begun:
                raise
            yield _event("error", error.body())
        finally:
            sampling.cancel()
            await asyncio.wait({sampling})


async def play(request: Request) -> Response:
    """Answers a chat completion to a person, as a stream of events."""
    request.state.wire_format = CHAT_COMPLETIONS
    policy_id = request.app.state.auth.policy_of(request.headers)
    version = request.query_params.get("version")
    with request.app.state.budget.share() as share:
        body = await body_of(request, share)
    playground: Playground = request.app.state.playground
    events = playground.ask(policy_id, body, None if version is None else int(version))
    first = await anext(events)
    return EventStream("text/event-stream", first, events, on_loss=_ignore, on_end=_ignore)


PLAYGROUND_ROUTES = (Route("/playground", play, methods=["POST"]),)


def _check_version(version: int | None, choice: SampledTokens) -> None:
    """Engines change their weights while they sample. Raises: OtherVersion: another one sampled a token."""
    others = {one for one in choice.policy_versions if version is not None and one != version}
    if others:
        message = (
            f"The engine serves version {max(others)} now, not {version}: ask that one, or copy the other by"
            " `leyden policy export --version` and serve it."
        )
        raise OtherVersion(message, code="version_not_served")


async def _wait(progress: asyncio.Event, began: float, choice: SampledTokens) -> None:
    """Raises: Unavailable: the answer, or its first token, takes too long."""
    limit = ANSWER_SECONDS if choice.ids else FIRST_TOKEN_SECONDS
    try:
        async with asyncio.timeout(began + limit - time.perf_counter()):
            await progress.wait()
    except TimeoutError:
        if choice.ids:
            message = f"The answer took longer than {limit:g} seconds; ask for fewer tokens."
            raise Unavailable(message, code="timeout", retry_after_seconds=1) from None
        message = f"No engine answered for this policy within {limit:g} seconds; try again."
        raise Unavailable(message, code="engine_unavailable", retry_after_seconds=10) from None


def _tokens(text: Piece, shown: AnswerStream, choice: SampledTokens) -> bytes:
    new = shown.next_logprobs() or ()
    versions = choice.policy_versions[len(choice.policy_versions) - len(new) :]
    tokens = [
        {"text": one.text, "logprob": one.logprob, "version": version}
        for one, version in zip(new, versions, strict=True)
    ]
    return _event("tokens", {"reasoning": text.reasoning, "content": text.content, "tokens": tokens})


def _end(answer: Answer, prompt: Prompt, choice: SampledTokens) -> bytes:
    calls = [{"name": call.name, "arguments": call.arguments} for call in answer.turn.tool_calls]
    usage = {"prompt_tokens": len(prompt.ids), "completion_tokens": len(choice.ids)}
    return _event("end", {"finish_reason": answer.finish_reason, "tool_calls": calls, **usage})


def _event(name: str, document: Json) -> bytes:
    return f"event: {name}\ndata: ".encode() + orjson.dumps(document) + b"\n\n"


def _ignore() -> None:
    """A person who leaves loses the answer, which nobody else waits for."""
