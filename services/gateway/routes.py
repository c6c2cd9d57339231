"""HTTP routes for agents, under `/r/{rollout}/{attempt}/v1`; `at_both_bases` adds the same under `/v1`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from leyden.libs.contracts.conversation import Json
from leyden.libs.service import JsonResponse, Overloaded
from leyden.services.gateway.calls import streaming
from leyden.services.gateway.calls.context import Completion, ModelRequest
from leyden.services.gateway.calls.retries import InFlightCall
from leyden.services.gateway.calls.service import CallService
from leyden.services.gateway.dialects.base import WireFormat
from leyden.services.gateway.dialects.chat_completions import ChatCompletions
from leyden.services.gateway.dialects.completions import Completions
from leyden.services.gateway.dialects.gemini.chunks import Form
from leyden.services.gateway.dialects.gemini.dialect import Gemini
from leyden.services.gateway.dialects.messages import Messages
from leyden.services.gateway.dialects.ollama import OllamaChat
from leyden.services.gateway.embeddings.service import Embeddings
from leyden.services.gateway.embeddings.vendors import EmbeddingForm, GeminiEmbed, OllamaEmbed
from leyden.services.gateway.errors import Unavailable
from leyden.services.gateway.requests import (
    ATTEMPT,
    BASE,
    attempt_of,
    authenticate,
    body_of,
    body_of_running,
    disconnected,
    watched,
)

T = TypeVar("T")
CLIENT_CLOSED_REQUEST = 499
UNWATCHED_SECONDS = 0.25
"""Only calls longer than this start a task that watches for the client's disconnect."""
CHAT_COMPLETIONS = ChatCompletions()
COMPLETIONS = Completions()
MESSAGES = Messages()
OLLAMA_CHAT, OLLAMA_EMBED = OllamaChat(), OllamaEmbed()


async def chat_completions(request: Request) -> Response:
    """Answers a chat completion, in one body or as a stream."""
    return await _answer(request, CHAT_COMPLETIONS)


async def responses(request: Request) -> Response:
    """Answers a response of OpenAI's Responses API, in one body or as a stream."""
    return await _answer(request, request.app.state.responses)


async def compact(request: Request) -> Response:
    """Answers with the context that takes the place of a conversation, which the model sums up."""
    return await _answer(request, request.app.state.compaction)


async def completions(request: Request) -> Response:
    """Continues a raw prompt, in one body or as a stream."""
    return await _answer(request, COMPLETIONS)


async def messages(request: Request) -> Response:
    """Answers a request of Anthropic's messages, in one body or as a stream."""
    return await _answer(request, MESSAGES)


async def ollama_chat(request: Request) -> Response:
    """Answers a request of Ollama's chat, as a stream or in one body."""
    return await _answer(request, OLLAMA_CHAT)


async def generate_content(request: Request) -> Response:
    """Answers a request of Gemini's in one body."""
    return await _answer(request, Gemini(request.path_params["model"]))


async def stream_generate_content(request: Request) -> Response:
    """Answers a request of Gemini's as a stream: of events for `alt=sse`, else of the items of one JSON array."""
    form: Form = "events" if request.query_params.get("alt") == "sse" else "array"
    return await _answer(request, Gemini(request.path_params["model"], form))


async def count_tokens(request: Request) -> Response:
    """Counts the tokens of the prompt that a request of Anthropic's messages would have."""
    return JsonResponse({"input_tokens": await _count(request, MESSAGES)})


async def total_tokens(request: Request) -> Response:
    """Counts the tokens of the prompt that a request of Gemini's would have."""
    return JsonResponse({"totalTokens": await _count(request, Gemini(request.path_params["model"]))})


async def input_tokens(request: Request) -> Response:
    """Counts the tokens of the prompt that a request of the Responses API would have."""
    count = await _count(request, request.app.state.responses)
    return JsonResponse({"object": "response.input_tokens", "input_tokens": count})


async def embeddings(request: Request) -> Response:
    """Answers a request for embeddings, from whoever makes those of the run."""
    return await _embed(request, None)


async def ollama_embed(request: Request) -> Response:
    """Answers a request for embeddings in Ollama's form."""
    return await _embed(request, OLLAMA_EMBED)


async def embed_content(request: Request) -> Response:
    """Answers a request for the embedding of one content in Google's form."""
    return await _embed(request, GeminiEmbed(request.path_params["model"], "embedContent"))


async def batch_embed_contents(request: Request) -> Response:
    """Answers a request for the embeddings of several contents in Google's form."""
    return await _embed(request, GeminiEmbed(request.path_params["model"], "batchEmbedContents"))


async def _embed(request: Request, form: EmbeddingForm | None) -> Response:
    # The error handlers answer in this form.
    request.state.wire_format = form and form.wire_format
    attempt = await authenticate(request)
    defaults = await request.app.state.reader.defaults(attempt.run_id)
    service: Embeddings = request.app.state.embeddings
    try:
        # Before the body: a slow server holds the bodies of few requests, which the budget of model calls then spares.
        async with service.turn(attempt.key):
            with request.app.state.budget.share(attempt.key) as share:
                body = await body_of(request, share)
            if form is None:
                return await service.answer(attempt, body, request.headers, defaults.embeddings)
            asked = await asyncio.to_thread(form.asked, body)
            answer = await service.answer(attempt, asked, request.headers, defaults.embeddings)
            if answer.status_code >= 400:
                return answer
            return Response(await asyncio.to_thread(form.answered, bytes(answer.body)), media_type="application/json")
    except (Overloaded, Unavailable):
        request.app.state.calls.give_up(attempt)
        raise


async def models(request: Request) -> Response:
    """Lists the model behind this address."""
    attempt = await authenticate(request)
    calls: CallService = request.app.state.calls
    served = await calls.models.of_run(attempt.run_id)
    return JsonResponse({"object": "list", "data": [_model(served.chat.name)]})


async def model(request: Request) -> Response:
    """Describes one model; any name is the run's policy."""
    await authenticate(request)
    return JsonResponse(_model(request.path_params["name"].rstrip("/")))


OPENAI_ROUTES = (
    *(Route(BASE + path, chat_completions, methods=["POST"]) for path in ("/chat/completions", "/chat/completions/")),
    *(Route(BASE + path, responses, methods=["POST"]) for path in ("/responses", "/responses/")),
    *(Route(BASE + path, completions, methods=["POST"]) for path in ("/completions", "/completions/")),
    Route(BASE + "/responses/input_tokens", input_tokens, methods=["POST"]),
    Route(BASE + "/responses/compact", compact, methods=["POST"]),
    *(Route(BASE + path, embeddings, methods=["POST"]) for path in ("/embeddings", "/embeddings/")),
    *(Route(BASE + path, models, methods=["GET"]) for path in ("/models", "/models/")),
    Route(BASE + "/models/{name:path}", model, methods=["GET"]),
)
ANTHROPIC_ROUTES = (
    *(Route(BASE + path, messages, methods=["POST"]) for path in ("/messages", "/messages/")),
    Route(BASE + "/messages/count_tokens", count_tokens, methods=["POST"]),
)
OLLAMA_ROUTES = (
    Route(ATTEMPT + "/api/chat", ollama_chat, methods=["POST"]),
    Route(ATTEMPT + "/api/embed", ollama_embed, methods=["POST"]),
)
GEMINI = ATTEMPT + "/{version}/models/{model:path}"
"""Google's clients send `v1` or `v1beta`; every version gets the newest form of an answer."""
GEMINI_ROUTES = (
    Route(GEMINI + ":generateContent", generate_content, methods=["POST"]),
    Route(GEMINI + ":streamGenerateContent", stream_generate_content, methods=["POST"]),
    Route(GEMINI + ":countTokens", total_tokens, methods=["POST"]),
    Route(GEMINI + ":embedContent", embed_content, methods=["POST"]),
    Route(GEMINI + ":batchEmbedContents", batch_embed_contents, methods=["POST"]),
)


async def _count(request: Request, wire_format: WireFormat) -> int:
    request.state.wire_format = wire_format
    attempt = await authenticate(request)
    calls: CallService = request.app.state.calls
    with request.app.state.budget.share(attempt.key) as share:
        return await calls.count(attempt, wire_format, await body_of(request, share), request.headers)


async def _answer(request: Request, wire_format: WireFormat) -> Response:
    # The error handlers answer in the form of the wire format.
    request.state.wire_format = wire_format
    attempt = attempt_of(request)
    calls: CallService = request.app.state.calls
    with request.app.state.budget.share(attempt.key) as share:
        try:
            body = await body_of_running(request, attempt, share)
        except Overloaded:
            calls.give_up(attempt)
            raise
        arrival = calls.arrive(attempt, wire_format, body, request.headers)
        async with watched(request, arrival.delivery):
            await request.app.state.auth.confirm(attempt)
            asked, call = await calls.start(arrival)
    if arrival.delivery.left_at is not None:
        calls.abandon(call, attempt, arrival.digest)
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    delivered, lost = (partial(note, call, attempt, arrival.digest) for note in (calls.deliver, calls.lose))
    if asked.stream:
        return await _stream(request, wire_format, asked, call, _Ending(request, delivered, lost))
    if isinstance(call, Completion):
        return _complete(wire_format.body(asked, call), delivered)
    assert call.task is not None
    with call.listening():
        await asyncio.wait({call.task}, timeout=UNWATCHED_SECONDS)
        has_left = not call.task.done() and await _until_disconnect(request, asyncio.wait({call.task})) is None
        if has_left or await request.is_disconnected():
            lost()
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return _complete(wire_format.body(asked, call.result()), delivered)


def _complete(body: Json, delivered: Callable[[], None]) -> Response:
    """An answer in one body; its background task begins once the body went out."""

    async def sent() -> None:
        delivered()

    response = JsonResponse(body)
    response.background = BackgroundTask(sent)
    return response


async def _stream(
    request: Request,
    wire_format: WireFormat,
    asked: ModelRequest,
    call: InFlightCall | Completion,
    ending: _Ending,
) -> Response:
    settings = request.app.state.settings
    writer = wire_format.stream(asked, call.request_id, call.created, call.prompt_tokens)
    if isinstance(call, Completion):
        events = streaming.replay(writer, call, ending.begin)
    else:
        events = streaming.follow(
            writer,
            call.sampler.chat,
            call,
            ending.begin,
            keepalive_after_seconds=settings.keepalive_after_seconds,
            keepalive_seconds=settings.keepalive_seconds,
        )
    first = await _until_disconnect(request, anext(events))
    if first is None:
        ending.lose()
        await events.aclose()
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    if request.scope["http_version"] == "1.0":
        # That protocol has no chunks, and the server would send some.
        rest = await _until_disconnect(request, _joined(events))
        ending.end()
        return Response((first + rest) if rest is not None else b"", media_type=wire_format.stream_type)
    return streaming.EventStream(wire_format.stream_type, first, events, ending.lose, ending.end)


class _Ending:
    """The end of a stream. Clients close the connection at once after the last event, so it is asked for before it."""

    def __init__(self, request: Request, deliver: Callable[[], None], lose: Callable[[], None]) -> None:
        self._request, self._deliver, self.lose = request, deliver, lose
        self._is_connected = False

    async def begin(self) -> None:
        self._is_connected = not await self._request.is_disconnected()

    def end(self) -> None:
        if self._is_connected:
            self._deliver()
        else:
            self.lose()


async def _joined(events: AsyncGenerator[bytes]) -> bytes:
    async with aclosing(events):
        return b"".join([event async for event in events])


async def _until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """Returns the result; cancels the work and returns None where the client disconnects."""
    task, hangup = asyncio.create_task(work), asyncio.create_task(disconnected(request))
    try:
        await asyncio.wait({task, hangup}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        hangup.cancel()
        await asyncio.wait({task, hangup})


def _model(name: str) -> Json:
    return {"id": name, "object": "model", "created": 0, "owned_by": "leyden"}
