"""Requests tokens from engines over HTTP and continues a call on another engine when its engine fails.

An engine that dies, that is paused with abort, or that changes to another run delays a call but does not fail it. The
client retains the tokens received so far and requests the rest after them, so that the recorded policy version sampled
each token, after exactly the tokens before it.
"""

from __future__ import annotations

import asyncio
import io
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial

import aiohttp
import orjson
from cachetools import TTLCache

from leyden.libs.contracts.states import CONTEXT_EXCEEDED
from leyden.libs.telemetry import inject, logger
from leyden.services.gateway.calls.context import SampledTokens, Stalls
from leyden.services.gateway.calls.silence import Silence
from leyden.services.gateway.engine.pace import Pace
from leyden.services.gateway.engine.pool import Endpoint, EnginePool, HoldTimeout
from leyden.services.gateway.engine.sglang import (
    PIECE_TOKENS,
    EngineLost,
    EngineRequest,
    Event,
    SampleBuilder,
    UnknownVersion,
    read_event,
    refusal,
    request_body,
)
from leyden.services.gateway.errors import BadRequest, Unavailable
from leyden.services.gateway.metrics import ENGINE_RETRIES

CONNECT_SECONDS = 5.0
ABORT_SECONDS = 5.0
"""How long the client waits for the rest of an aborted answer."""
RETRY_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0)
ERROR_BYTES = 64 * 1024
"""The client reads at most this much of an error's body."""
LONG_EVENT_BYTES = 2**18
"""A longer event, as one with the experts of many tokens, is parsed in a thread, because that takes milliseconds."""
RESERVED_TOKENS = 6
"""Tokens of its context that SGLang leaves out of `max_req_input_len`."""
CONTEXT_LENGTH_SECONDS = 60.0
"""How long an engine with a shorter context than the model's is asked for fewer tokens before it is tried again."""
MAX_ENGINES = 10_000

log = logger()


class EngineClient:
    """One HTTP session to all engines; create it inside a running loop.

    Args: silence_seconds: a request without any byte from its engine for this long is sent again; hold_seconds: how
        long a call may wait for an engine that accepts it; newest_version: reads a run's newest policy version, None
        for a run without any; an engine that names a newer one is not believed
    """

    def __init__(
        self,
        pool: EnginePool,
        *,
        api_key: str | None,
        silence_seconds: float,
        hold_seconds: float,
        newest_version: Callable[[str], Awaitable[int | None]],
    ) -> None:
        self._pool = pool
        self._newest_version = newest_version
        self._hold_seconds = hold_seconds
        self._silence_seconds = silence_seconds
        # Forgotten after a while: an engine may have a longer context since its restart.
        self._context_lengths: TTLCache[str, int] = TTLCache(MAX_ENGINES, CONTEXT_LENGTH_SECONDS)
        self._paces: defaultdict[str, Pace] = defaultdict(Pace)
        self._authorization = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"accept-encoding": "identity", "content-type": "application/json"},
            timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS),
        )

    async def close(self) -> None:
        """Closes all connections."""
        await self._session.close()

    async def sample(self, request: EngineRequest, tokens: SampledTokens, on_progress: Callable[[], None]) -> None:
        """Adds tokens to the choice until it is finished.

        Cancelling it aborts the request at the engine and retains the tokens received until then.

        Args: on_progress: called after new tokens
        Raises: Unavailable: no engine served the run for too long; BadRequest: the engine refuses the request
        """
        hold = HoldTimeout(self._hold_seconds)
        tries = failures = 0
        while tokens.finish is None:
            endpoint = await self._pool.pick(request.run_id, request.rollout_id, hold, request.pool, request.version)
            before, context_length = len(tokens.ids), self._context_lengths.get(endpoint.url)
            try:
                await self._request(endpoint, request, tokens, _request_id(tokens.call_id, tries), on_progress, hold)
            except BadRequest as refused:
                if refused.code != CONTEXT_EXCEEDED:
                    raise
                if not await self._may_fit(endpoint, request, context_length):
                    raise
            except EngineLost as lost:
                log.info("engine request lost", engine=endpoint.url, cause=lost.cause, detail=str(lost)[:200])
                ENGINE_RETRIES.labels(lost.cause).inc()
                tokens.stalls.lose()
                hold.lose(endpoint.url, str(lost))
                if len(tokens.ids) > before:
                    hold.renew()
                    failures = 0
                if lost.cause != "aborted":
                    self._pool.mark_unhealthy(endpoint.url, request.run_id)
                if request.constraint and tokens.ids:
                    _restart(request, tokens)
                await asyncio.sleep(min(hold.remaining(), RETRY_SECONDS[min(failures, len(RETRY_SECONDS) - 1)]))
                failures += 1
            tries += 1
        tokens.ended_at = time.perf_counter()

    async def _request(
        self,
        endpoint: Endpoint,
        request: EngineRequest,
        tokens: SampledTokens,
        request_id: str,
        on_progress: Callable[[], None],
        hold: HoldTimeout,
    ) -> None:
        """Sends one request to one engine.

        Raises: EngineLost: the answer ended before the choice was finished
        """
        room = self._context_lengths.get(endpoint.url, math.inf) - len(request.prompt_ids)
        # The engine itself refuses a prompt without room: it may have a longer context since its restart.
        if room > 0 or tokens.ids:
            request = replace(request, max_tokens=int(min(request.max_tokens, room)))
        if len(tokens.ids) >= request.max_tokens:
            tokens.finish = "length"
            return
        stated = endpoint.weight_version if endpoint.is_shared else None
        builder = SampleBuilder(request, tokens, on_progress, weight_version=stated)
        if endpoint.policy_version is not None:
            builder.newest_version = endpoint.policy_version
        pace = self._paces[endpoint.url]
        piece = 1 if request.stream else min(PIECE_TOKENS, request.max_tokens - len(tokens.ids))
        tokens.stalls.begin(pace.usual, piece)
        body = request_body(request, tokens, request_id, endpoint.weight_version, endpoint.adapter)
        # A task of its own: it reads the rest of the answer while a cancelled call aborts the request.
        exchange = asyncio.create_task(self._generate(endpoint, body, builder, hold))
        try:
            await asyncio.shield(exchange)
        except asyncio.CancelledError:
            if not await self._abort(endpoint, request_id, exchange):
                tokens.stalls.lose()
            raise
        finally:
            exchange.cancel()
            pace.learn(tokens.stalls)
        if tokens.finish is None:
            cause = "aborted" if builder.was_aborted else "connection"
            raise EngineLost(cause, "the answer ended before it was finished")

    async def _may_fit(self, endpoint: Endpoint, request: EngineRequest, sent_for: int | None) -> bool:
        """Reads how many tokens of prompt and answer the engine takes, after it refused more.

        Args: sent_for: the context length for which the refused request was sent
        Returns: whether the length is another one, and the prompt fits, so that fewer tokens may be requested
        """
        try:
            async with await self._get(endpoint, "/server_info") as response:
                response.raise_for_status()
                longest_prompt = int(orjson.loads(await response.read())["max_req_input_len"])
        except (aiohttp.ClientError, OSError, LookupError, TypeError, ValueError) as error:
            log.warning("context length not read", engine=endpoint.url, error=str(error))
            return False
        length = longest_prompt + RESERVED_TOKENS
        self._context_lengths[endpoint.url] = length
        log.warning("engine takes less than the model's context", engine=endpoint.url, context_length=length)
        return length != sent_for and longest_prompt >= len(request.prompt_ids)

    async def _generate(self, endpoint: Endpoint, body: bytes, builder: SampleBuilder, hold: HoldTimeout) -> None:
        try:
            async with await self._post(endpoint, "/generate", body) as response:
                with hold.paused(), _listening(response, self._silence_seconds) as on_piece:
                    if response.status != 200:
                        raise refusal(response.status, await _error_text(response, on_piece))
                    async for data in _events(response, on_piece):
                        long = len(data) > LONG_EVENT_BYTES
                        event = await asyncio.to_thread(read_event, data) if long else read_event(data)
                        await self._add_event(builder, endpoint, event)
        except (aiohttp.ClientError, OSError) as error:
            raise EngineLost("connection", f"{type(error).__name__}: {error}") from error

    async def _add_event(self, builder: SampleBuilder, endpoint: Endpoint, event: Event) -> None:
        """Adds an event; where it names a version newer than the pool knew, asks the store once whether it exists."""
        try:
            builder.add_event(event)
        except UnknownVersion:
            newest = await self._newest_version(endpoint.run_id) if endpoint.run_id is not None else None
            builder.newest_version = math.inf if newest is None else newest
            builder.add_event(event)

    async def _abort(self, endpoint: Endpoint, request_id: str, exchange: asyncio.Task[None]) -> bool:
        """Stops generation and waits `ABORT_SECONDS` for the tokens sampled until then.

        An engine with a separate admin key refuses the abort; it stops when the connection closes.

        Returns: whether the engine gave any answer
        """
        try:
            async with asyncio.timeout(ABORT_SECONDS):
                body = orjson.dumps({"rid": request_id})
                async with await self._post(endpoint, "/abort_request", body) as response:
                    response.raise_for_status()
                await asyncio.wait({exchange})
        except (aiohttp.ClientError, OSError) as error:
            log.info("abort not delivered", engine=endpoint.url, error=str(error))
            return isinstance(error, aiohttp.ClientResponseError)
        return True

    async def _get(self, endpoint: Endpoint, path: str) -> aiohttp.ClientResponse:
        timeout = aiohttp.ClientTimeout(total=CONNECT_SECONDS)
        return await self._session.get(f"{endpoint.url}{path}", headers=self._headers(endpoint), timeout=timeout)

    def _headers(self, endpoint: Endpoint) -> dict[str, str]:
        # aiohttp adds an Authorization header itself when the URL has a user and password.
        headers = {} if "@" in endpoint.url else dict(self._authorization)
        if (traceparent := inject()) is not None:
            headers["traceparent"] = traceparent
        return headers

    async def _post(self, endpoint: Endpoint, path: str, body: bytes) -> aiohttp.ClientResponse:
        # Until the answer begins; `_listening` begins there. Bodies are BytesIO: aiohttp warns about large bytes.
        async with asyncio.timeout(self._silence_seconds):
            return await self._session.post(
                f"{endpoint.url}{path}",
                data=io.BytesIO(body),
                headers=self._headers(endpoint),
                allow_redirects=False,
            )


def _restart(request: EngineRequest, tokens: SampledTokens) -> None:
    """Drops the tokens: an engine starts a grammar at its beginning and cannot continue a part of an answer.

    Raises: Unavailable: the agent may have read them
    """
    if request.stream:
        message = "The engine was lost in the middle of a constrained answer; try again."
        raise Unavailable(message, code="engine_unavailable", retry_after_seconds=1)
    for column in (tokens.ids, tokens.logprobs, tokens.policy_versions, tokens.top_logprobs):
        column.clear()
    tokens.accepted_at = tokens.first_token_at = None
    tokens.stalls = Stalls()


@contextmanager
def _listening(response: aiohttp.ClientResponse, silence_seconds: float) -> Iterator[Callable[[], None]]:
    """Closes an answer without any byte for so long; the block calls the function that it gets after each piece.

    Why: aiohttp's `sock_read` starts and cancels a timer for each piece, 0.9 us of CPU; this costs 0.3.

    Raises: TimeoutError: the answer was closed
    """
    with closing(Silence(response.close)) as silence:
        on_piece = partial(silence.begin, silence_seconds)
        on_piece()
        try:
            yield on_piece
        except aiohttp.ClientError as error:
            if silence.is_over:
                raise TimeoutError(f"no byte for {silence_seconds:g} seconds") from error
            raise


async def _events(response: aiohttp.ClientResponse, on_piece: Callable[[], None]) -> AsyncIterator[bytes]:
    """Yields the data of server-sent events, without `[DONE]`."""
    # Pieces of one long line are joined once: an event with the experts of many tokens has megabytes.
    parts: list[bytes] = []
    async for piece in response.content.iter_any():
        on_piece()
        parts.append(piece)
        if b"\n" not in piece:
            continue
        *lines, rest = b"".join(parts).split(b"\n")
        parts = [rest]
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and data != b"[DONE]":
                yield data


async def _error_text(response: aiohttp.ClientResponse, on_piece: Callable[[], None]) -> str:
    body = b""
    async for piece in response.content.iter_any():
        on_piece()
        body += piece
        if len(body) >= ERROR_BYTES:
            break
    return body[:ERROR_BYTES].decode(errors="replace")


def _request_id(call_id: str, tries: int) -> str:
    # SGLang refuses the id of a running request, so each try has its own id.
    return f"{call_id}-{tries}" if tries else call_id
